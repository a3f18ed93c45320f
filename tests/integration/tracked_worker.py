"""Train with both trackers: `tracked_worker.py OUTPUT_DIR CALLS`; after CALLS micro-batches it kills itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from spec_train.batch import Batch
from tests.toy_speculator import toy_states, toy_train


def main() -> None:
    calls = int(sys.argv[2])

    def provide(batch: Batch) -> Batch:
        nonlocal calls
        calls -= 1
        if calls < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return toy_states(batch)

    toy_train(
        Path(sys.argv[1]), provider=provide, trackers=["wandb", "tensorboard"], max_steps=10,
        held_out=2, save_every=4,
    )  # fmt: skip


if __name__ == "__main__":
    main()
