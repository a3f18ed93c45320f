"""Reload the exports in a fresh process, then run them in real vLLM."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from spec_train.data.documents import prompts_of
from spec_train.errors import RunFailure
from spec_train.manifest import Stage, atomic_write_json, read_manifest
from spec_train.run import Run
from spec_train.speculators import load_speculator
from spec_train.stages.common import documents_of, make_stage
from spec_train.stages.evaluate import best_checkpoint
from spec_train.stages.inputs import verify_inputs


def verify(run: Run, force: bool) -> None:
    """Make the stage where needed. Raises RunFailure where the export does not serve as it was trained."""
    recipe = run.recipe

    def work(stage: Stage) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        from spec_train.decoding.engine import speculative_decode
        from spec_train.decoding.sampling import Sampling
        from spec_train.serving.verify import comparison_dtype, local_folder, render_report, verify_exports

        section = recipe.export
        forms = read_manifest(run.directory / "export")["outputs"]["serve"]
        _, prompts = prompts_of(documents_of(run, "held_out") or documents_of(run, "train"))
        prompts = prompts[: section.verify_prompts]
        target = run.target(comparison_dtype(run.target_path))
        head = load_speculator(best_checkpoint(run), target).to(target.dtype)
        k, limit = section.verify_num_draft_tokens, recipe.responses.max_new_tokens
        trace = speculative_decode(
            target, head, prompts, num_draft_tokens=k, sampling=Sampling(), max_new_tokens=limit, batch_size=16
        )
        reports = verify_exports(
            [run.directory / "export" / form for form in forms],
            local_folder(run.target_path),
            prompts=prompts,
            max_new_tokens=limit,
            num_draft_tokens=k,
            expected_trace=trace,
            vllm=section.vllm,
        )
        for report in reports:
            Console().print(render_report(report))
        atomic_write_json(stage.directory / "report.json", [report.to_json() for report in reports])
        problems = [problem for report in reports for problem in report.problems]
        if problems:
            raise RunFailure(f"verify: {problems[0]} ({len(problems)} problems, see {stage.directory / 'report.json'})")
        status = {"reports": [report.vllm_status for report in reports]}
        return status, {"prompts": len(prompts)}, status  # no stage comes after it

    make_stage(run, "verify", verify_inputs, force, work)
