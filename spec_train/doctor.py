"""What `spec-train doctor` reports about the machine and the installation."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from spec_train.manifest import git_revision, package_versions

if TYPE_CHECKING:
    from rich.table import Table

GIB = 2**30


def findings() -> list[tuple[str, str]]:
    """(name, finding) pairs in the order to print them. Imports torch; never vLLM, which takes seconds."""
    versions = package_versions()
    rows = [("versions", ", ".join(f"{name} {version}" for name, version in versions.items()))]
    revision = git_revision()
    if revision:
        rows.append(("checkout", revision))
    rows += [*_devices(), ("memory", _memory()), ("disk", _disk()), *_installation(), ("vllm methods", _methods())]
    offline = os.environ.get("HF_HUB_OFFLINE", "") in ("1", "true", "True", "yes", "on")
    rows.append(("hub", "offline (HF_HUB_OFFLINE is set)" if offline else "online; tokens come from HF_TOKEN"))
    return rows


def _devices() -> list[tuple[str, str]]:
    import torch

    cores = len(os.sched_getaffinity(0))
    rows = [
        (
            "cpu",
            f"{cores} cores, torch uses {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}",
        )
    ]
    if not torch.cuda.is_available():
        return [*rows, ("gpu", "none that torch can use")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        rows.append((f"gpu {index}", f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, {capability}"))
    return rows


def _memory() -> str:
    page = os.sysconf("SC_PAGE_SIZE")
    available, total = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
    return f"{available / GIB:.1f} GiB free of {total / GIB:.1f} GiB"


def _disk() -> str:
    usage = shutil.disk_usage(Path.cwd())
    return f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} GiB in the current directory"


def _installation() -> list[tuple[str, str]]:
    """Known faults of an installation that surface late and under another name."""
    if importlib.util.find_spec("torchvision") is None:
        return []
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        advice = "transformers cannot load models beside it: pip uninstall -y torchvision torchaudio torchcodec"
        return [("torchvision", f"broken ({' '.join(str(error).split())}); {advice}")]
    return []


def _methods() -> str:
    from spec_train.serving.contract import CAPABILITIES, VERSIONS, installed_vllm

    version = installed_vllm()
    if version is None:
        return "vLLM is not installed; eval and export work without it, verify then checks the reload only"
    minor = ".".join(version.split(".")[:2])
    if minor not in VERSIONS:
        return f"vLLM {version} has not been checked; what {', '.join(VERSIONS)} load may load, verify tells"
    return f"vLLM {version} loads {', '.join(name for name, row in CAPABILITIES.items() if minor in row.runners)}"


def capability_table() -> Table:
    """Which method loads in which vLLM version and runner, what else it needs, and what we offer instead."""
    from rich.table import Table

    from spec_train.serving.contract import CAPABILITIES, VERSIONS

    table = Table(title="What vLLM serves, by version and model runner", title_justify="left")
    for column in ("method", "vLLM's name", *VERSIONS, "needs", "instead"):
        table.add_column(column)
    for name, row in CAPABILITIES.items():
        table.add_row(name, row.method, *(row.runners.get(v, "no") for v in VERSIONS), row.needs, row.instead)
    return table
