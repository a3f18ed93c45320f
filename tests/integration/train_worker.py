"""Run `toy_train` in this process: `train_worker.py OUTPUT_DIR JSON`, the JSON being its keyword arguments.

"stop_after": N raises after N provider calls, as if the process had died there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from spec_train.batch import Batch
from tests.toy_speculator import mean_weight, toy_states, toy_train


def main() -> None:
    arguments: dict[str, Any] = json.loads(sys.argv[2])
    calls = arguments.pop("stop_after", None)

    def provide(batch: Batch) -> Batch:
        nonlocal calls
        if calls is not None:
            calls -= 1
            if calls < 0:
                raise KeyboardInterrupt
        return toy_states(batch)

    toy_train(Path(sys.argv[1]), provider=provide, decode=mean_weight, **arguments)


if __name__ == "__main__":
    main()
