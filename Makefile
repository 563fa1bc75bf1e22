# `make demo` sets everything up and trains the quickstart; `make test` runs the suite, `make test-fast` what needs
# no Ray in less than a minute, `make test-long` what takes long; `make check` the linters.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.rl-cluster-ready
# GPU requirements where an NVIDIA driver answers, CPU requirements otherwise; override with DEVICE=cpu.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
CPU_TORCH := $(shell sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/cpu.txt)
CPU_TORCH_INDEX := https://download.pytorch.org/whl/cpu
FAST_TESTS := $(addprefix tests/,algorithms config data files judge loop losses metrics pipeline rewards run_folder \
    weights test_batch.py test_layers.py test_public_names.py)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test test-fast test-long check mutants clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): requirements/$(DEVICE).txt requirements/dev.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "setup: $(PYTHON) not found; install Python 3.11 or later, or give PYTHON=…"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "setup: $$($(PYTHON) --version) is too old; give PYTHON=python3.11 or later"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	    || { echo "setup: $(PYTHON) has no venv module; on Debian: apt install python3-venv"; exit 1; }
	@for tool in g++ git; do command -v $$tool >/dev/null \
	    || { echo "setup: $$tool not found; on Debian: apt install g++ git"; exit 1; }; done
	@echo "setup: $(DEVICE) requirements into $(VENV); the first time takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(MAKE) --no-print-directory install-$(DEVICE)
	$(PIP) install --quiet --no-deps -r requirements/dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

.PHONY: install-cpu install-gpu
install-cpu:
	$(PIP) install --quiet --no-deps "$(CPU_TORCH)" \
	    || $(PIP) install --quiet --no-deps "$(CPU_TORCH)" --index-url $(CPU_TORCH_INDEX)
	$(PIP) install --quiet --no-deps -r requirements/cpu.txt

install-gpu:
	$(PIP) install --quiet -r requirements/gpu.txt

demo: setup
	$(BIN)/python launch.py train configs/quickstart.yaml

test: setup
	$(BIN)/python -m pytest -m "not long"

test-fast: setup
	$(BIN)/python -m pytest -q -m "not stack and not gpu and not slow and not long" $(FAST_TESTS)

test-long: setup
	$(BIN)/python -m pytest -m long

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy rl_cluster actors learners
	$(BIN)/lint-imports
	$(BIN)/vulture

# 20 one-place mutants of each folder against the tests that reach them; SEED=n for others.
mutants: setup
	$(BIN)/python bench/mutants.py --seed $(or $(SEED),0)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache *.egg-info
