"""The program as a user meets it: start-up time, help, exit status, one-line errors, silence of other ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from spec_train.cli import _repeat_options
from spec_train.recipe import Recipe, known_keys
from spec_train.serving.contract import CAPABILITIES, installed_vllm
from spec_train.speculators import METHODS, options_class
from tests.program import spec_train

ROOT = Path(__file__).parents[2]
COMMANDS = (
    *("run", "prompts", "responses", "features", "train", "eval", "export", "verify", "push"),
    *("inspect", "compare", "report", "advise", "suites", "doctor"),
)
RECIPE = """
run: {name: tiny, output_dir: OUT}
target: {model: some/model}
data: {sources: [{path: prompts.jsonl}]}
speculator: {type: eagle3}
"""


def started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process of its own; the other tests run the program in this one."""
    return subprocess.run(
        [sys.executable, "-m", "spec_train", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},
        check=False,
    )


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    file = tmp_path / "r.yaml"
    file.write_text(RECIPE.replace("OUT", str(tmp_path / "out")))
    return file


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    begun = time.monotonic()
    shown = started("--help")
    elapsed = time.monotonic() - begun
    assert shown.returncode == 0
    assert elapsed < 3.0  # under a second on a quiet machine
    assert [command for command in COMMANDS if command not in shown.stdout] == []
    program = (
        "import sys; sys.argv = ['spec-train', '--help']\n"
        "from spec_train.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'accelerate', 'vllm', 'wandb', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = spec_train(ROOT, command, "--help")
    assert shown.returncode == 0
    assert "Usage: spec-train" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["runn"], ["runn", "run"]),
        (["run"], ["RECIPE"]),
        (["run", "absent.yaml"], ["absent.yaml: no such recipe file"]),
        (["train", "RECIPE", "train.lrr=1"], ["train.lrr is not a known key", "optim.lr"]),
        (["inspect", "RECIPE", "--number", "3"], ["--number"]),
        (["run", "RECIPE", "--force", "trian"], ["--force trian", "train"]),
        (["eval", "nowhere", "--target", "t", "--suite", "gsm8k"], ["nowhere", "neither a recipe"]),
        (["eval", "ngram", "--suite", "gsm8k"], ["--target"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--num-draft-tokens", "0"], ["--num-draft-tokens"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--temperature", "-1"], ["--temperature"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--dtype", "fp8"], ["--dtype", "bfloat16"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--top-k", "-1"], ["--top-k"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--min-p", "2"], ["min_p is 2"]),
        (["eval", "ngram", "--target", "t", "--suite", "s", "--rejection-sample-method", "fly"], ["fly", "block"]),
        (["eval", "RECIPE", "--num-draft-tokens", "3"], ["eval.num_draft_tokens"]),
        (["eval", "ngram", "eval.top_k=3"], ["eval.top_k=3", "overrides belong to a recipe"]),
        (["verify", "nowhere"], ["nowhere", "neither a recipe"]),
        (["verify", "RECIPE", "--target", "t"], ["drop --target"]),
    ],
)
def test_wrong_input_is_one_line_and_status_2(recipe_file: Path, arguments: list[str], parts: list[str]) -> None:
    result = spec_train(ROOT, *(str(recipe_file) if argument == "RECIPE" else argument for argument in arguments))
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


def test_other_ranks_stay_silent(recipe_file: Path) -> None:
    result = spec_train(ROOT, "train", str(recipe_file), "train.lrr=1", RANK="1", LOCAL_RANK="1")
    assert (result.returncode, result.stdout, result.stderr) == (2, "", "")
    first_of_second_machine = spec_train(ROOT, "train", str(recipe_file), "train.lrr=1", RANK="8", LOCAL_RANK="0")
    assert "train.lrr" in first_of_second_machine.stderr


def test_an_interrupt_says_that_the_run_can_be_repeated() -> None:
    """The alarm goes off while doctor imports torch and acts as ctrl-C does."""
    program = (
        "import signal, sys; from spec_train.cli import main\n"
        "sys.argv = ['spec-train', 'doctor']\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.15)\n"
        "main()\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 130
    assert result.stderr == "interrupted; repeat the same command to go on from here\n"


def test_other_failures_keep_their_traceback() -> None:
    """A fault of the program is not dressed up as a user's mistake."""
    result = started("doctor", PYTHONPATH=str(ROOT / "tests" / "unit" / "absent"), PATH="", HOME="/nonexistent")
    assert result.returncode == 0, "doctor needs neither git nor a home"
    program = (
        "import sys; sys.argv = ['spec-train', 'doctor']; sys.modules['torch'] = None\n"
        "from spec_train.cli import main; main()\n"
    )
    broken = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert broken.returncode == 1
    assert "Traceback" in broken.stderr


def test_doctor_names_versions_devices_and_methods() -> None:
    result = spec_train(ROOT, "doctor")
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert {"versions", "cpu", "memory", "disk", "vllm", "hub"} <= set(lines)
    assert "torch 2" in lines["versions"]
    assert "offline" in lines["hub"]
    version = installed_vllm()
    if version is None:
        assert "vLLM is not installed" in lines["vllm"]
    else:
        minor = ".".join(version.split(".")[:2])
        loaded = [name for name, row in CAPABILITIES.items() if minor in row.runners]
        assert {"eagle3", "draft_lm"} <= set(loaded)
        assert lines["vllm"].endswith(f"vLLM {version} loads {', '.join(loaded)}")


def test_options_with_several_numbers() -> None:
    names = ("--k", "--t")
    assert _repeat_options(["x", "--k", "3", "5", "7", "--t", "0", "0.5"], names) == (
        ["x", "--k", "3", "--k", "5", "--k", "7", "--t", "0", "--t", "0.5"]
    )
    assert _repeat_options(["--k", "3", "ngram", "4"], names) == ["--k", "3", "ngram", "4"]
    assert _repeat_options(["--k", "3", "--json", "5"], names) == ["--k", "3", "--json", "5"]


def documents() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def code_blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("file", documents(), ids=lambda file: file.name)
def test_documented_commands_exist(file: Path) -> None:
    """Every spec-train line in a shell block uses a known command and known override keys, and names real files."""
    lines = [line for block in code_blocks(file, "bash") for line in block.replace("\\\n", " ").splitlines()]
    known = {key for kind in METHODS for key in known_keys(options_class(kind))}
    for line in lines:
        words = line.split("#")[0].split()
        for position, word in enumerate(words):
            if word in ("spec-train", ".venv/bin/spec-train") or (word == "spec_train" and words[position - 1] == "-m"):
                assert words[position + 1] in COMMANDS, line
        for word in words:
            key, equals, _ = word.strip("'\"").partition("=")  # quoted for the shell
            if equals and "." in key and not word.startswith("-"):
                assert re.sub(r"\.\d+(?=\.|$)", ".N", key) in known, line
            if word.startswith(("recipes/", "accelerate_configs/")):
                assert (ROOT / word).exists(), line


@pytest.mark.parametrize("file", documents(), ids=lambda file: file.name)
def test_documented_recipes_are_valid(file: Path) -> None:
    for block in code_blocks(file, "yaml"):
        fields = yaml.safe_load(block)
        if "run" in fields:
            Recipe[options_class(fields["speculator"]["type"])].model_validate(fields)
