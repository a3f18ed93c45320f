"""Have the target answer the prompts: `spec-train responses RECIPE [section.key=value ...]` by path, from a clone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spec_train.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "responses")
    main()
