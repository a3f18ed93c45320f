"""`python -m spec_train` and `accelerate launch ... -m spec_train` are the same program as `spec-train`."""

from spec_train.cli import main

if __name__ == "__main__":
    main()
