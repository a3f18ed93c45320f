"""MLP speculators and Medusa heads in real vLLM, through the plugin, where the requests of a batch progress unequally.

Every proposal of every step is held against the heads' own drafts from Transformers' hidden states. The heads are
fitted to the answers of some of the requests, so that these accept most drafts, and the others hardly any.
"""

from __future__ import annotations

import json
import random
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spec_train.decoding.engine import plain_decode
from spec_train.decoding.sampling import Sampling
from spec_train.errors import UserError
from spec_train.serving.contract import PLUGIN_KEY
from spec_train.serving.processes import VLLM_ENVIRONMENT, run_worker
from spec_train.serving.vllm_plugin import SpecTrainProposer
from spec_train.serving.vllm_plugin.proposer import rows_to_read
from spec_train.speculators import medusa_heads, mlp_heads
from spec_train.speculators.heads import DraftHeads
from spec_train.target import TargetModel
from tests.tiny import tiny_model

pytestmark = pytest.mark.vllm
DRAW = random.Random(0)
LENGTHS = (3, 60, 9, 33, 120, 5, 17, 80, 2, 41)
PROMPTS = [[DRAW.randrange(4, 320) for _ in range(length)] for length in LENGTHS]
NEW_TOKENS = [28, 40, 17, 32, 9, 40, 36, 16, 40, 30]
K = 3
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 11,  # less than four requests with three drafts each need, so some drafts are cut
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "generation_config": "vllm",
    "skip_tokenizer_init": True,
    "seed": 0,
}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """The files of an export that the plugin reads."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def states(target: TargetModel, tokens: list[int]) -> Tensor:
    """Transformers' states after the final norm [T, H]."""
    with torch.no_grad():
        return target.decoder(input_ids=torch.tensor([tokens])).last_hidden_state[0]


def fit(heads: DraftHeads, target: TargetModel, texts: list[list[int]], steps: int) -> None:
    """Teach the heads the tokens that follow in `texts`."""
    generator = torch.Generator().manual_seed(0)
    for parameter in heads.parameters():
        parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
        parameter.requires_grad_(True)
    index = {int(token): i for i, token in enumerate(heads.draft_ids_D)}
    hidden = torch.cat([states(target, text)[: -heads.num_heads - 1] for text in texts])
    following = torch.cat(
        [torch.tensor(text[1:]).unfold(0, heads.num_heads + 1, 1) for text in texts]
    )  # the sampled token, then what each head is to draft
    optimizer = torch.optim.Adam(heads.parameters(), lr=1e-2)
    for _ in range(steps):
        state, loss = heads.start(hidden), torch.zeros(())
        for k in range(heads.num_heads):
            state = heads.step(state, following[:, k], k)
            wanted = torch.tensor([index.get(int(token), -100) for token in following[:, k + 1]])
            loss = loss + torch.nn.functional.cross_entropy(state[0] @ heads.output_head(k).T, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    heads.requires_grad_(False)


class Served:
    """One process of vLLM: without a speculator, and with heads under several kinds of pressure."""

    def __init__(self, folder: Path) -> None:
        path = tiny_model("llama", folder)
        self.target = TargetModel.load(str(path))
        answers = plain_decode(
            self.target, PROMPTS, sampling=Sampling(), max_new_tokens=max(NEW_TOKENS), batch_size=len(PROMPTS)
        )
        texts = [answer.prompt_ids + answer.output_ids for answer in answers.requests]
        whole, some = torch.arange(320), torch.arange(0, 320, 2)
        mlp = mlp_heads.make_heads(mlp_heads.MlpShape(64, 48, 320, num_heads=3), torch.zeros_like(whole))
        medusa = medusa_heads.MedusaHeads(medusa_heads.MedusaShape(64, 320, num_heads=4), some - torch.arange(160))
        for heads in (mlp, medusa):
            fit(heads, self.target, texts[:2] + texts[4:], steps=40)  # the first prefixes are learnt, not every token
        mlp_config = {"model_type": "mlp_speculator", "vocab_size": 320, "emb_dim": 64, "inner_dim": 48}
        medusa_config = {"model_type": "medusa", "vocab_size": 320, "hidden_size": 64, "num_heads": 4}
        self.folders = {
            "mlp": write(
                folder / "mlp", {**mlp_config, "n_predict": 3, "tie_weights": True}, mlp_heads.served_tensors(mlp)
            ),
            "medusa": write(folder / "medusa", medusa_config, medusa_heads.served_tensors(medusa)),
        }
        self.heads: dict[str, DraftHeads] = {"mlp": mlp, "medusa": medusa}
        scarce = {"num_gpu_blocks_override": 7, "block_size": 32, "max_model_len": 130}
        runs = [
            self.run(path, None, {"max_num_batched_tokens": 512}, logprobs=3, prompt_logprobs=2),
            self.run(path, "mlp", {}),
            self.run(path, "medusa", {}, logprobs=3, prompt_logprobs=2),
            self.run(path, "mlp", scarce),
        ]
        names = ["plain", "mlp", "medusa with logprobs", "scarce"]
        results = run_worker("tests.vllm.plugin_worker", {"runs": runs}, VLLM_ENVIRONMENT, timeout_s=300)["runs"]
        self.runs = dict(zip(names, results, strict=True))

    def run(self, path: Path, kind: str | None, changes: dict[str, Any], **sampling: int) -> dict[str, Any]:
        """A run of the worker's job. Every second request asks for log-probabilities."""
        arguments = {"model": str(path), **ENGINE, **changes}
        if kind is not None:
            arguments["speculative_config"] = {
                "method": "custom_class",
                "model": "spec_train.serving.vllm_plugin.SpecTrainProposer",
                "num_speculative_tokens": K,
            }
            arguments["additional_config"] = {PLUGIN_KEY: str(self.folders[kind])}
        if kind == "medusa":  # the short form, through the entry point of the installed package
            arguments["speculative_config"]["model"] = str(self.folders[kind])
            del arguments["additional_config"]
        requests = [
            {"prompt": prompt, "max_tokens": count, **(sampling if number % 2 or kind is None else {})}
            for number, (prompt, count) in enumerate(zip(PROMPTS, NEW_TOKENS, strict=True))
        ]
        return {"arguments": arguments, "requests": requests}

    def check(self, name: str, kind: str, min_cycles: int) -> list[dict[str, Any]]:
        """Hold a run's text against the plain one and each proposal against the heads; return the rows noted."""
        run, heads = self.runs[name], self.heads[kind]
        assert run["outputs"] == self.runs["plain"]["outputs"]
        rows: list[dict[str, Any]] = [row for step in run["steps"] for row in step]
        for request in range(len(PROMPTS)):
            own = [row for row in rows if row["request"] == request]
            hidden = states(self.target, max((row["tokens"] for row in own), key=len))
            for row in own:
                if row["new"] == 0:
                    assert row["drafts"] == []
                    continue
                # The state before the newest token is the one that it was chosen from.
                newest = torch.tensor([row["tokens"][-1]])
                expected = heads.draft(hidden[len(row["tokens"]) - 2][None], newest, K)[0].tolist()
                assert row["drafts"] == expected, (name, row)
        assert sum(row["new"] > 0 for row in rows) >= min_cycles
        return rows


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("served"))


def assert_unequal(steps: list[list[dict[str, Any]]]) -> None:
    """Every way in which the requests of one step can differ has come up, most of them in steps they share."""
    decoding = [[row for row in step if row["new"] > 0] for step in steps]
    assert {row["new"] for step in decoding for row in step} == {1, 2, 3, 4}
    assert {row["scheduled"] for step in decoding for row in step} >= {0, 2, 3}  # 2: cut by the budget
    assert any(len({row["new"] for row in step}) >= 3 for step in decoding)
    # A part of a prompt beside requests that accepted drafts, in the same step, before as well as behind them.
    for earlier, later in ((0, 1), (1, 0)):
        assert any(
            min(a["new"], 1) == earlier and min(b["new"], 1) == later and max(a["new"], b["new"]) > 1
            for step in steps
            for i, a in enumerate(step)
            for b in step[i + 1 :]
        )


def test_mixed_steps_of_an_mlp_speculator(served: Served) -> None:
    served.check("mlp", "mlp", min_cycles=80)
    assert_unequal(served.runs["mlp"]["steps"])


def test_medusa_heads_with_log_probabilities(served: Served) -> None:
    served.check("medusa with logprobs", "medusa", min_cycles=80)
    assert_unequal(served.runs["medusa with logprobs"]["steps"])
    for kind in ("logprobs", "prompt_logprobs"):
        plain, ours = served.runs["plain"][kind][1::2], served.runs["medusa with logprobs"][kind][1::2]
        assert [len(request) for request in ours] == [len(request) for request in plain]
        for a, b in zip(chain.from_iterable(plain), chain.from_iterable(ours), strict=True):
            assert b == pytest.approx(a, abs=1e-3)


def test_requests_that_are_preempted_or_near_the_limit(served: Served) -> None:
    """Too little memory for four requests, and one whose drafts might outrun the model's length: vLLM then asks for
    none of the whole batch, and schedules zeros."""
    assert served.runs["scarce"]["counters"]["vllm:num_preemptions"] > 0
    rows = served.check("scarce", "mlp", min_cycles=80)
    longest = [max(len(row["tokens"]) for row in some) for some in (chain(*served.runs["mlp"]["steps"]), rows)]
    assert longest[1] <= 130 - K + 1 < longest[0]


@pytest.mark.parametrize(
    ("num_drafts", "num_new", "rows"),
    [
        ([3, 3], [4, 1], [3, 4]),
        ([0, 3, 0, 2], [1, 2, 0, 3], [0, 2, None, 8]),
        ([0, 0], [0, 0], [None, None]),
    ],
)
def test_the_row_of_the_newest_token(num_drafts: list[int], num_new: list[int], rows: list[int | None]) -> None:
    assert rows_to_read(num_drafts, num_new) == rows


def engine_config(folder: Path | None, **changes: Any) -> Any:
    """As much of vLLM's configuration as the plugin reads."""
    values = {"hidden": 64, "vocab": 320, "drafts": K, "stages": 1, **changes}
    return SimpleNamespace(
        additional_config={PLUGIN_KEY: str(folder)} if folder else {},
        parallel_config=SimpleNamespace(pipeline_parallel_size=values["stages"]),
        speculative_config=SimpleNamespace(num_speculative_tokens=values["drafts"], model="package.Class"),
        device_config=SimpleNamespace(device_type="cpu"),
        model_config=SimpleNamespace(
            model="some/target",
            dtype=torch.float32,
            get_hidden_size=lambda: values["hidden"],
            get_vocab_size=lambda: values["vocab"],
        ),
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"drafts": 4}, "3 heads cannot draft 4 tokens: lower num_speculative_tokens to 3"),
        ({"hidden": 128}, r"\(64, 320\) cannot draft for some/target, which has \(128, 320\)"),
        ({"stages": 2}, "no drafter with pipeline parallelism"),
    ],
)
def test_an_engine_that_does_not_suit_is_refused(served: Served, changes: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SpecTrainProposer(engine_config(served.folders["mlp"], **changes))


def test_a_folder_that_does_not_suit_is_refused(served: Served, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r'needs --additional-config .{"spec_train_speculator"'):
        SpecTrainProposer(engine_config(None))
    with pytest.raises(UserError, match=r"which has no config\.json and weights"):
        SpecTrainProposer(engine_config(tmp_path))
    llama = write(tmp_path / "llama", {"model_type": "llama"}, {"fc.weight": torch.ones(2, 2)})
    with pytest.raises(UserError, match="serves mlp and medusa alone"):
        SpecTrainProposer(engine_config(llama))
    config = json.loads((served.folders["mlp"] / "config.json").read_text())
    tensors = load_file(served.folders["mlp"] / "model.safetensors")
    extra = write(tmp_path / "extra", config, {**tensors, "fc.weight": torch.ones(2, 2)})
    with pytest.raises(UserError, match=r"unknown tensors \['fc.weight'\]"):
        SpecTrainProposer(engine_config(extra))
    del tensors["head.0.weight"], tensors["head.1.weight"], tensors["head.2.weight"]
    short = write(tmp_path / "short", config, tensors)
    with pytest.raises(UserError, match="missing tensors"):
        SpecTrainProposer(engine_config(short))


def test_a_target_whose_states_lack_the_norm_is_refused(served: Served) -> None:
    class MiMoForCausalLM(torch.nn.Linear):
        """Named as vLLM's class is."""

    with pytest.raises(UserError, match="cannot serve MiMoForCausalLM"):
        SpecTrainProposer(engine_config(served.folders["mlp"])).load_model(MiMoForCausalLM(2, 2))
