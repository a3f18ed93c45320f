"""The program in this process: what `python -m spec_train ...` prints and returns, without its seconds of imports."""

from __future__ import annotations

import io
import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from spec_train.cli import main


@dataclass(frozen=True)
class Ended:
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def spec_train(folder: Path, *arguments: str, **environment: str) -> Ended:
    """Run the command in `folder` with `environment` added to this process's."""
    out, err = io.StringIO(), io.StringIO()
    with (
        chdir(folder),
        mock.patch.dict(os.environ, {"COLUMNS": "200", **environment}),
        mock.patch.object(sys, "argv", ["spec-train", *arguments]),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    assert isinstance(ended.value.code, int)
    return Ended(ended.value.code, out.getvalue(), err.getvalue())
