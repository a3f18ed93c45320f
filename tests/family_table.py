"""The table of families and methods in docs/families.md: `python -m tests.family_table FOLDER` runs all cells in FOLDER
and prints it. A cell is a run from prompts to its evaluation on a tiny target of the family, see `cell`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_train.dry_run import plan
from spec_train.errors import UserError
from spec_train.pipeline import STAGES, run_all
from spec_train.recipe import load_recipe
from spec_train.run import Run
from tests.more_families import CONFIGS, more_family

# What a recipe's `speculator` section holds beside the type.
METHODS: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 2, "draft_vocab_size": 200},
    "peagle": {"num_depths": 2, "draft_vocab_size": 200},
    "eagle1": {"ttt_steps": 2},
    "mtp": {"ttt_steps": 2},
    "mlp": {"num_heads": 2},
    "medusa": {"num_heads": 2},
    "draft_lm": {"start_layers": 3},
    "pard": {"start_layers": 3, "num_depths": 2},
}


def cell(family: str, method: str, folder: Path) -> tuple[str, str]:
    """("runs", the acceptance lengths of the method and of prompt lookup), or ("refused", the line that says why, with
    `TARGET` for the target's folder).

    Runs: the text of every decode is that of plain decoding, and the estimate is what was counted. Refused: by `run` in
    the same line as by its dry run, with nothing made. Targets and their answers in `folder` are shared.
    """
    target = folder / family if (folder / family).is_dir() else more_family(family, folder)
    recipe = load_recipe(write_recipe(family, method, target, folder))
    try:
        plan(recipe)
    except UserError as error:
        refused, before = str(error), sorted(folder.rglob("*"))
        with pytest.raises(UserError) as caught:
            run_all(recipe, set())
        assert str(caught.value) == refused and "\n" not in refused
        assert sorted(folder.rglob("*")) == before
        return "refused", refused.replace(str(target), "TARGET")
    run = Run(recipe)
    for stage in ("prompts", "responses", "features", "train", "eval"):
        STAGES[stage](run, False)
    lengths = []
    for name in (method, "ngram"):
        result = json.loads((run.directory / "eval" / f"held_out-{name}-k2-t0.json").read_text())
        assert result["lossless"]["identical"] == result["lossless"]["checked"] == 4, (name, result["lossless"])
        assert result["estimate"]["renewal"] == result["mean_acceptance_length"], (name, result["estimate"])
        lengths.append(f"{result['mean_acceptance_length']:.2f}")
    return "runs", " ".join(lengths)


def write_recipe(family: str, method: str, target: Path, folder: Path) -> Path:
    """Two steps of training, on answers that all methods of a family share."""
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt": f"What is {n} and {n * n + 3}?{' Say why.' * (n % 3)}"} for n in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields: dict[str, Any] = {
        "run": {"name": f"{family}-{method}", "output_dir": str(folder / "runs" / f"{family}-{method}")},
        "target": {"model": str(target)},
        "data": {"sources": [{"path": str(prompts)}], "held_out": 4, "max_length": 128},
        "responses": {"max_new_tokens": 32, "batch_size": 12},
        "features": {"mode": "offline", "dtype": "float32", "aux_layer_ids": [1, 2, 4]},
        "speculator": {"type": method, **METHODS[method]},
        "optim": {"lr": 1e-2, "warmup_ratio": 0.0},
        "train": {"epochs": 1, "max_steps": 2, "micro_batch_tokens": 400, "precision": "fp32", "save_every": 2},
        "eval": {"num_draft_tokens": [2], "ngram_num_draft_tokens": [2], "batch_size": 3, "speed_prompts": 0},
    }
    fields["run"].update(data_dir=str(folder / "runs" / family), device="cpu")
    fields["eval"].update(measure_costs=False, max_new_tokens=32)
    fields["export"] = {"verify_num_draft_tokens": 2}
    file = folder / f"{family}-{method}.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


def main(folder: Path) -> None:
    """Print the table in Markdown, and below it why cells are refused."""
    print(f"| target | {' | '.join(METHODS)} | ngram |\n|{'---|' * (len(METHODS) + 2)}")
    reasons: dict[str, str] = {}
    for family in CONFIGS:
        cells, lookup = [], "refused"
        for method in METHODS:
            kind, text = cell(family, method, folder)
            if kind == "runs":
                length, lookup = text.split()
                cells.append(length)
            else:
                cells.append("refused")
                reasons.setdefault(text.replace(family, "FAMILY"), f"{family} x {method}")
        print(f"| `{family}` | {' | '.join(cells)} | {lookup} |", flush=True)
    print("\n".join(f"- {where}: {text}" for text, where in reasons.items()))


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    main(Path(sys.argv[1]))
