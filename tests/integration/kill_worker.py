"""Train once undisturbed and once killed at random points: `kill_worker.py DIRECTORY SEED KILLS`.

The children are forked after the imports, so a kill costs no start-up. Prints how many lines each killed child logged.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from tests.toy_speculator import toy_train


def start(output_dir: Path) -> int:
    """Fork a child that trains; the process id. Every step saves, so about half of all kills strike while saving."""
    child = os.fork()
    if child == 0:
        toy_train(output_dir, save_every=1, epochs=4)
        os._exit(0)
    return child


def lines(output_dir: Path) -> int:
    log = output_dir / "log.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def main() -> None:
    directory, seed, kills = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    assert os.waitpid(start(directory / "whole"), 0)[1] == 0
    total = lines(directory / "whole")
    for target in sorted(rng.sample(range(2, total - 10), kills)):
        child = start(directory / "killed")
        while lines(directory / "killed") < target and os.waitpid(child, os.WNOHANG)[0] == 0:
            time.sleep(0.001)
        time.sleep(rng.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
        print("killed after", lines(directory / "killed"), "lines of", total)
    assert os.waitpid(start(directory / "killed"), 0)[1] == 0


if __name__ == "__main__":
    main()
