"""Measure a running vLLM server: streamed requests at chosen loads, and its Prometheus counters before and after.

Prompts go out as token ids through /v1/completions, one thread a place, so a load of c keeps c requests running until
the prompts run out. TTFT is from sending to the first token, TPOT the time per token after it. Acceptance is what the
server counts, drafts that the end of an answer cuts off included. Each load salts the prefix cache, so that no request
finds its prompt cached by the warm-up or by the load before.

Without speculation is measured on a second server (`baseline_url`). The API key comes from VLLM_API_KEY or
OPENAI_API_KEY and is shown nowhere.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from typing import Any

from spec_train.decoding.acceptance import acceptance_length
from spec_train.decoding.sampling import Sampling
from spec_train.decoding.trace import RequestTrace
from spec_train.errors import RunFailure, UserError
from spec_train.evaluation.evaluate import render_suite
from spec_train.evaluation.turns import Suite, next_turn
from spec_train.evaluation.vllm_backend import BASELINES, names_of, time_summary
from spec_train.manifest import package_versions
from spec_train.progress import progress

ATTEMPTS = 3  # of a request that the server was too busy for
BUSY = (429, 502, 503)
TIMEOUT_S = 600.0
SETTLE_S = 5.0  # counters are published a moment after the last token
WARM_UP_TOKENS = 8
COUNTER = re.compile(r"^vllm:(\w+?)_total(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """One streamed request. `token_ids` are empty where the server does not send them; `speculation`: the server's own
    account of the request, None unless it runs with --per-request-spec-decode-metrics."""

    token_ids: list[int]
    num_tokens: int
    ttft_s: float
    decode_s: float
    speculation: dict[str, Any] | None


@dataclass(frozen=True)
class ServedLoad:
    """One load. `counters`: the server's spec_decode counters of it, empty without speculation; `generated`: tokens
    that the server made meanwhile, for whomever."""

    answers: list[Answer]
    counters: dict[str, Any]
    generated: int
    seconds: float

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(answer.num_tokens for answer in self.answers)


class Server:
    """A vLLM server that answers and counts. Raises UserError where it does not. `context`: its limit of prompt and
    answer together, in tokens."""

    def __init__(self, url: str, target: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise UserError(f"{url}: give the server as http://HOST:PORT")
        served = {entry["id"]: entry for entry in json.loads(self.fetch("/v1/models"))["data"]}
        if target not in served and len(served) != 1:
            raise UserError(f"{self.url} serves {', '.join(served) or 'no model'}, not {target}: name one in --target")
        self.target, self.model = target, target if target in served else next(iter(served))
        self.context = int(served[self.model].get("max_model_len") or sys.maxsize)
        if "generation_tokens" not in self.counters():
            raise UserError(f"{self.url}/metrics has no counters: start vLLM without --disable-log-stats")

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The open answer of a request, tried again while the server is too busy."""
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY") or os.environ.get("OPENAI_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                request = urllib.request.Request(self.url + path, data, headers)
                return urllib.request.urlopen(request, timeout=TIMEOUT_S)
            except urllib.error.HTTPError as error:
                if error.code not in BUSY or attempt == ATTEMPTS:
                    said = " ".join(error.read().decode(errors="replace").split())[:300]
                    raise UserError(f"{self.url}{path} answers {error.code}: {said}") from None
            except urllib.error.URLError as error:
                raise UserError(f"{self.url} cannot be reached ({error.reason}): is the server running?") from None
            time.sleep(2.0**attempt)
        raise AssertionError("the last attempt returns or raises")

    def fetch(self, path: str) -> str:
        """The text of a page."""
        with self.open(path) as page:
            return str(page.read().decode())

    def counters(self) -> dict[str, Any]:
        """Every counter of vLLM by name, engines added up; one with a `position` label is a list."""
        found: dict[str, Any] = {}
        for name, labels, value in COUNTER.findall(self.fetch("/metrics")):
            position = re.search(r'position="(\d+)"', labels)
            if position is None:
                found[name] = found.get(name, 0) + int(float(value))
                continue
            values = found.setdefault(name, [])
            values += [0] * (int(position[1]) + 1 - len(values))
            values[int(position[1])] += int(float(value))
        return found

    def complete(self, prompt: list[int], sampling: Sampling, seed: int, max_tokens: int, salt: str) -> Answer:
        """One streamed completion. Raises RunFailure where the stream breaks off or carries an error."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": sampling.temperature,
            "top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p, "repetition_penalty": 1.0,
            "seed": seed, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
            "cache_salt": salt,
        }  # fmt: skip
        ids: list[int] = []
        usage: dict[str, Any] | None = None
        speculation = None
        started = time.perf_counter()
        first = last = 0.0
        try:
            with self.open("/v1/completions", body) as stream:
                for line in stream:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RunFailure(f"{self.url}: {event['error'].get('message', event['error'])}")
                    if event.get("choices"):
                        last = time.perf_counter()
                        first = first or last
                        ids += event["choices"][0].get("token_ids") or []
                    usage = event.get("usage") or usage
                    speculation = (event.get("metrics") or {}).get("speculative_decoding") or speculation
        except (OSError, HTTPException) as error:
            raise RunFailure(f"{self.url}: the answer broke off ({error})") from None
        if usage is None or not first:
            raise RunFailure(f"{self.url}: the answer ended without a token or its usage")
        return Answer(ids, usage["completion_tokens"], first - started, last - first, speculation)

    def load(
        self, prompts: Sequence[list[int]], sampling: Sampling, concurrency: int, max_tokens: int,
        advance: Callable[[int], None],
    ) -> ServedLoad:  # fmt: skip
        """Warm up, then send every prompt, `concurrency` at a time."""
        salt = uuid.uuid4().hex

        def send(index: int) -> Answer:
            answer = self.complete(prompts[index], sampling, sampling.seed + index, max_tokens, f"{salt}-{index}")
            advance(1)
            return answer

        with ThreadPoolExecutor(concurrency) as pool:
            warm_up = prompts[:concurrency]
            count = len(warm_up)
            before = self.counters()
            made = sum(
                answer.num_tokens
                for answer in pool.map(
                    self.complete,
                    warm_up,
                    [sampling] * count,
                    range(count),
                    [WARM_UP_TOKENS] * count,
                    [f"{salt}-warm-{index}" for index in range(count)],
                )
            )
            before = self.settled(before["generation_tokens"] + made)
            started = time.perf_counter()
            answers = list(pool.map(send, range(len(prompts))))
            seconds = time.perf_counter() - started
        after = self.settled(before["generation_tokens"] + sum(answer.num_tokens for answer in answers))
        generated = after["generation_tokens"] - before["generation_tokens"]
        counters: dict[str, Any] = {}
        for name in (name for name in after if name.startswith("spec_decode_")):
            now, then = after[name], before.get(name, 0)
            if isinstance(now, list):
                then = [*then, *[0] * (len(now) - len(then))] if isinstance(then, list) else [0] * len(now)
                counters[name.removeprefix("spec_decode_")] = [a - b for a, b in zip(now, then, strict=True)]
            else:
                counters[name.removeprefix("spec_decode_")] = now - then
        return ServedLoad(answers, counters, generated, seconds)

    def settled(self, generated: int) -> dict[str, Any]:
        """The counters once they show `generated` tokens, or after a few seconds as they are."""
        until = time.monotonic() + SETTLE_S
        counters = self.counters()
        while counters["generation_tokens"] < generated and time.monotonic() < until:
            time.sleep(0.1)
            counters = self.counters()
        return counters


def evaluate_server(
    subject: str,
    target: str,
    suite: str,
    *,
    url: str,
    baseline_url: str | None,
    temperature: Sequence[float],
    concurrency: Sequence[int],
    max_prompts: int | None = None,
    max_new_tokens: int = 256,
    **sampling_options: Any,
) -> list[dict[str, Any]]:
    """One result for each temperature and load. `subject` (an export, ngram, suffix) only names what the server runs,
    `target` gives the tokenizer. Raises UserError for bad input and where a server does not answer or count.
    `sampling_options`: further fields of Sampling."""
    from spec_train.data.chat import load_tokenizer
    from spec_train.speculators import recorded_prompt
    from spec_train.stop_ids import stop_token_ids

    server = Server(url, target)
    baseline = Server(baseline_url, target) if baseline_url else None
    prompt = {} if subject in BASELINES else recorded_prompt(Path(subject))
    rendered = render_suite(suite, load_tokenizer(target), prompt, stop_token_ids(target)).first(max_prompts)
    return evaluate_served(
        server, baseline, subject, rendered, [Sampling(temperature=value, **sampling_options) for value in temperature],
        concurrency=concurrency, max_new_tokens=max_new_tokens,
    )  # fmt: skip


def evaluate_served(
    server: Server, baseline: Server | None, subject: str, suite: Suite, samplings: Sequence[Sampling], *,
    concurrency: Sequence[int], max_new_tokens: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """`evaluate_server` of rendered prompts; later turns follow the answers that the server without speculation gives,
    or the only server: either writes the target's text."""
    results = []
    for sampling in samplings:
        whole = with_answers(baseline or server, suite, sampling, max(concurrency), max_new_tokens)
        for places in concurrency:
            loads = [
                _load(each, whole, sampling, places, max_new_tokens)
                for each in ((server, baseline) if baseline else (server,))
            ]
            if not loads[0].counters.get("num_drafts"):
                raise UserError(f"{server.url} drafted nothing: start it with the speculator (the export's README.md)")
            if baseline and loads[1].counters.get("num_drafts"):
                raise UserError(f"{baseline.url} drafts too: --baseline-server is one without a speculator")
            results.append(served_result(server, subject, whole, sampling, places, loads))
    return results


def with_answers(server: Server, suite: Suite, sampling: Sampling, concurrency: int, max_new_tokens: int) -> Suite:
    """`suite` with every later turn in it, each rendered from the server's answers. A conversation ends before a turn
    that would not fit into the server's context with its answer. Raises UserError where the server sends no tokens."""
    turn, suite = suite, replace(suite, follow_ups=[])
    while turn.follow_ups:
        answers = _load(server, turn, sampling, concurrency, max_new_tokens).answers
        if not all(answer.token_ids for answer in answers):
            raise UserError(
                f"{server.url} sends no token ids, which the later turns of {suite.name} are made of; use vLLM 0.11 or "
                "newer, or a suite of single turns"
            )
        told = [
            RequestTrace(name, prompt, answer.token_ids)
            for name, prompt, answer in zip(turn.ids, turn.prompts, answers, strict=True)
        ]
        turn = next_turn(turn, told, server.context - max_new_tokens + 1)
        suite = suite.joined(turn)
    return suite


def _load(server: Server, suite: Suite, sampling: Sampling, concurrency: int, max_new_tokens: int) -> ServedLoad:
    with progress(f"{suite.name}: {concurrency} at a time, {server.url}", len(suite.prompts), "req") as advance:
        return server.load(suite.prompts, sampling, concurrency, max_new_tokens, advance)


def served_result(
    server: Server, subject: str, suite: Suite, sampling: Sampling, concurrency: int, loads: list[ServedLoad]
) -> dict[str, Any]:
    """A result as `metrics.summarise` gives it, None where a server does not tell. `loads`: with the speculator, then
    without where that was measured."""
    load, plain = loads[0], loads[1] if len(loads) > 1 else None
    counted, kind = load.counters, names_of(subject)
    rounds, accepted, drafted = (counted[name] for name in ("num_drafts", "num_accepted_tokens", "num_draft_tokens"))
    survivors = counted["num_accepted_tokens_per_pos"]
    rate, plain_rate = load.num_tokens / load.seconds, plain.num_tokens / plain.seconds if plain else None
    speed: dict[str, Any] = {
        "tokens_per_second": rate,
        "baseline_tokens_per_second": plain_rate,
        "speedup": rate / plain_rate if plain_rate else None,
        "concurrency": concurrency,
        "rounds": 1,
    }
    for name, run in (("", load), ("baseline_", plain)):
        answers = run.answers if run else []
        tpot_s = [answer.decode_s / (answer.num_tokens - 1) for answer in answers if answer.num_tokens > 1]
        times = time_summary([answer.ttft_s for answer in answers], tpot_s)
        speed |= {f"{name}{key}": value for key, value in times.items()}
    ids, plain_ids = ([answer.token_ids for answer in run.answers] for run in (load, plain or load))
    comparable = plain is not None and sampling.greedy and all(ids) and all(plain_ids)
    return {
        "target": server.target,
        "speculator": subject,
        "type": kind[0],
        "method": kind[1],
        "suite": suite.name,
        "backend": "server",
        "device": None,
        "dtype": None,
        "num_draft_tokens": len(survivors),
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "draft_sample_method": None,
        "batch_size": concurrency,
        "seed": sampling.seed,
        "num_prompts": len(load.answers),
        "num_output_tokens": load.num_tokens,
        "num_spec_steps": rounds,
        "num_draft_tokens_total": drafted,
        "num_accepted_draft_tokens": accepted,
        "mean_acceptance_length": acceptance_length(accepted, rounds),
        "mean_acceptance_length_ci95": None,
        "tokens_per_step": None,
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_rate_per_position": [count / rounds for count in survivors],
        "conditional_acceptance_rate_per_position": [
            count / before if before else 0.0 for before, count in zip([rounds, *survivors], survivors, strict=False)
        ],
        "vllm_counters": counted,
        "per_request": [answer.speculation for answer in load.answers],
        "lossless": {"checked": len(ids), "identical": sum(a == b for a, b in zip(ids, plain_ids, strict=True))}
        if comparable
        else None,
        "others_tokens": load.generated - load.num_tokens,
        "speed": speed,
        "estimate": None,
        "by_category": {},
        **({"left_out": dict(suite.left_out)} if suite.left_out else {}),
        "versions": package_versions(),
    }
