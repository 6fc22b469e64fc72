# Everything lives in .venv, which the first target that needs it sets up.  Another Python: make demo PYTHON=python3.12
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CODE := src tests benchmarks scripts
NATIVE := setup.py $(wildcard src/llm_op_guard/native/*.cpp src/llm_op_guard/native/*.h)
TRANSFORMERS_4 := 4.57.6
TRANSFORMERS_5 := $(shell sed -n 's/^transformers==//p' constraints-dev.txt)
SDIST := .sdist/transformers-$(TRANSFORMERS_5)
# The version that support-draft is about: make support-draft VERSION=5.25.0
VERSION ?= $(TRANSFORMERS_4)
CONTRACTS := $(wildcard src/llm_op_guard/contracts/*/*.contract tests/yardstick/*.contract)

# Nothing here downloads a model.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# What CI injects into: a contract of each kind, without those that take longer than some seconds.
INJECT_SAMPLE := functional:embedding functional:layer_norm functional:cross_entropy attention:repeat_kv \
	attention:eager_attention_forward cache:update cache:shared_layer_update entry:token_ids entry:learned_positions \
	logits:processors logits:repetition_penalty logits:whisper_timestamps logits:prefix_constrained mask:create_bidirectional_mask \
	moe:router norm:rms_norm norm:gated_rms_norm norm:layer_norm_of_channels rope:apply_rotary_emb rope:apply_rotary_pos_emb_at_positions \
	rope_vision:apply_rotary_embeddings

.PHONY: help demo test browser sanitize triton zoo inject inject-sample transformers-suites test-transformers-4 lint format types bench bench-values docs support support-check support-draft clean
help:
	@echo "make demo    a tiny Llama with and without guards, then bad inputs side by side"
	@echo "make test    the tests                           make zoo     every model type of Transformers, guarded and not"
	@echo "make inject  broken calls made from every contract, guarded and not: docs/injection.md"
	@echo "make inject-sample    the same for some contracts, as CI does"
	@echo "make lint    ruff, fmt and check of contracts   make format  apply what can be applied"
	@echo "make browser the pages of reports in Chromium"
	@echo "make triton  the Triton kernel in its interpreter, and compiled for sm_80, sm_90 and sm_100, without a GPU"
	@echo "make types   mypy --strict                      make bench   what guards cost here: docs/benchmarks.md"
	@echo "make sanitize    the native checks under the address and undefined-behaviour sanitizers, without PyTorch"
	@echo "make bench-values    what it costs to look at every element of a tensor"
	@echo "make docs    write the generated parts anew     make clean   remove .venv and caches"
	@echo "make test-transformers-4    the tests of the Transformers contracts with Transformers $(TRANSFORMERS_4)"
	@echo "make transformers-suites    the test suites of Transformers $(TRANSFORMERS_5), guarded and not"
	@echo "make support    write docs/transformers-support.md anew, from Transformers $(TRANSFORMERS_4) too"
	@echo "make support-draft VERSION=5.25.0    what another Transformers has that no contract was written for"

demo: $(READY)
	@$(BIN)/python -m llm_op_guard demo

test: $(READY)
	@$(BIN)/python -m pytest -n auto --dist worksteal

browser: $(VENV)/.browser
	@$(BIN)/python -m pytest -m browser tests/browser

triton: .venv-triton/.ready
	@TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest -n auto --dist worksteal tests/values/test_late_answers.py tests/values/test_places.py
	@.venv-triton/bin/python -m pytest -n auto --dist worksteal tests/values/test_kernel_compiles.py

# Sanitizers are built into both extensions and not into Python, which frees nothing at its end.
SANITIZED := .sanitized
SANITIZER_FLAGS := -g -O1 -std=c++17 -fPIC -shared -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
sanitize: $(READY)
	@mkdir -p $(SANITIZED)
	@include=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["include"])'); \
	$(CXX) $(SANITIZER_FLAGS) -I$$include src/llm_op_guard/native/*.cpp -o $(SANITIZED)/_check.abi3.so && \
	$(CXX) $(SANITIZER_FLAGS) -I$$include -Isrc/llm_op_guard/native tests/native/stub.cpp -o $(SANITIZED)/stub.abi3.so
	@ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
		LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
		$(BIN)/python tests/native/sanitized.py $(SANITIZED)

test-transformers-4: .venv-$(TRANSFORMERS_4)/.ready
	@.venv-$(TRANSFORMERS_4)/bin/python -m pytest tests/transformers tests/test_transformers_support.py

# For example: make zoo ZOO="--types llama,bert --jobs 4"
zoo: $(READY)
	@$(BIN)/python tests/zoo/zoo.py $(ZOO)

# For example: make transformers-suites SUITES="--types llama,bert --jobs 4"
transformers-suites: $(READY) $(SDIST)/.ready
	@$(BIN)/python tests/suites/suites.py $(SDIST) $(SUITES)

# For example: make inject INJECT="norm:rms_norm --seed 1"
inject: $(READY)
	@$(BIN)/python -m llm_op_guard inject $(or $(INJECT),--all)

inject-sample: $(READY)
	@$(BIN)/python -m llm_op_guard inject $(INJECT_SAMPLE) --valid 15

lint: $(READY)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/python -m llm_op_guard fmt --check $(CONTRACTS)
	@$(BIN)/python -m llm_op_guard check --strict $(CONTRACTS)

format: $(READY)
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/python -m llm_op_guard fmt $(CONTRACTS)

types: $(READY)
	@$(BIN)/mypy --strict

# For example: make bench BENCH="--json bench.json --plots docs/benchmarks"
bench: $(VENV)/.bench
	@$(BIN)/python -m llm_op_guard bench $(BENCH)

bench-values: $(READY)
	@$(BIN)/python benchmarks/values.py

docs: $(READY)
	@$(BIN)/python scripts/language_reference.py
	@$(BIN)/python scripts/examples.py

support: $(READY) .venv-$(TRANSFORMERS_4)/.ready
	@$(BIN)/python scripts/transformers_support.py
	@.venv-$(TRANSFORMERS_4)/bin/python scripts/transformers_support.py
	@$(BIN)/ruff format --quiet src/llm_op_guard/integrations

support-check: $(READY)
	@$(BIN)/python scripts/transformers_support.py --check

support-draft: $(READY) .venv-$(VERSION)/.ready
	@.venv-$(VERSION)/bin/python scripts/transformers_support.py --draft --beside $(BIN)/python

clean:
	rm -rf $(VENV) .venv-* .sdist .sanitized .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find $(CODE) -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is taken up again.
$(READY): pyproject.toml constraints-dev.txt $(NATIVE)
	@echo "setting up $(VENV): Python, torch and transformers; a few minutes the first time"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is %d.%d: make PYTHON=python3.11 ..." % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the package, its development tools, torch and transformers"
	@$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[dev,transformers]'
	@touch $(READY)
	@echo "$(VENV) is ready"

# What is timed beside guards, and what draws.
$(VENV)/.bench: $(READY)
	@$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[bench]'
	@touch $@

# What drives the Chromium that is installed: apt-get install chromium.
$(VENV)/.browser: $(READY)
	@$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[browser]'
	@touch $@

# Triton, which takes 1 GB, and the rest from .venv.
.venv-triton/.ready: $(READY)
	@echo "setting up .venv-triton: Triton, and the rest from $(VENV)"
	@test -x .venv-triton/bin/python || $(BIN)/python -m venv .venv-triton
	@.venv-triton/bin/python -m pip install --quiet --constraint constraints-dev.txt triton
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$(.venv-triton/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@touch $@

# Another Transformers and what it needs of its own; the rest, torch included, is that of .venv.
.venv-%/.ready: $(READY)
	@echo "setting up .venv-$*: transformers $*, and the rest from $(VENV)"
	@test -x .venv-$*/bin/python || $(BIN)/python -m venv .venv-$*
	@grep -v '^transformers==' constraints-dev.txt > .venv-$*/constraints.txt
	@.venv-$*/bin/python -m pip install --quiet --constraint .venv-$*/constraints.txt 'transformers==$*'
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')')" \
		> "$$(.venv-$*/bin/python -c 'import site; print(site.getsitepackages()[0])')/beside.pth"
	@touch $@

# The tests of Transformers, which no wheel has, and what they need besides.
$(SDIST)/.ready: $(READY)
	@echo "downloading the source distribution of transformers $(TRANSFORMERS_5)"
	@mkdir -p .sdist
	@$(BIN)/python -m pip download --quiet --no-deps --no-binary transformers --dest .sdist 'transformers==$(TRANSFORMERS_5)' \
		|| { echo "the source distribution of transformers $(TRANSFORMERS_5) could not be downloaded: this takes a package index"; exit 1; }
	@tar -xzf $(SDIST).tar.gz -C .sdist
	@$(BIN)/python -m pip install --quiet --constraint constraints-dev.txt --editable '.[suites]'
	@touch $@
