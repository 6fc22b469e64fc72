# Everything lives in .venv, which the first target that needs it sets up.  Another Python: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := src tests benchmarks scripts
CONTRACTS := $(wildcard src/llm_op_guard/contracts/*/*.contract tests/yardstick/*.contract)

# Nothing here downloads a model.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test zoo lint format types bench docs clean
help:
	@echo "make demo    a tiny Llama with and without guards, then bad inputs side by side"
	@echo "make test    the tests                           make zoo     every model type of Transformers, guarded and not"
	@echo "make lint    ruff check and format check        make format  apply both"
	@echo "make types   mypy --strict                      make bench   the benchmarks"
	@echo "make docs    write the generated parts anew     make clean   remove .venv and caches"

demo: $(READY)
	@$(BIN)/python -m llm_op_guard demo

test: $(READY)
	@$(BIN)/python -m pytest

# For example: make zoo ZOO="--types llama,bert --jobs 4"
zoo: $(READY)
	@$(BIN)/python tests/zoo/zoo.py $(ZOO)

lint: $(READY)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/python -m llm_op_guard fmt --check $(CONTRACTS)

format: $(READY)
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/python -m llm_op_guard fmt $(CONTRACTS)

types: $(READY)
	@$(BIN)/mypy --strict

bench: $(READY)
	@$(BIN)/python benchmarks/rope_class_a.py
	@$(BIN)/python benchmarks/patching.py

docs: $(READY)
	@$(BIN)/python scripts/language_reference.py
	@$(BIN)/python scripts/examples.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is taken up again.
$(READY): pyproject.toml constraints-dev.txt
	@echo "setting up $(VENV): Python, torch and transformers; a few minutes the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the package, its development tools, torch and transformers"
	@$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev,transformers]'
	@touch $(READY)
	@echo "$(VENV) is ready"
