# `make demo` and `make test` set everything up in .venv and run; nothing is installed outside this folder.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
LINT := $(VENV)/lint
STEP := @printf '\n\033[1m%s\033[0m\n'
RECENT := $(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Fathom needs Python 3.11 or newer; set PYTHON=...")'

.PHONY: demo test slow gpu gpu-quick lint clean

demo: $(VENV)/.runtime
	@$(BIN)/python -m scripts.demo

# Tests start many processes: without bytecode on disk, each of them would compile torch's and transformers' sources.
test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist loadfile --no-loadscope-reorder

slow: $(VENV)/.dev  ## evidence that takes minutes
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m slow

# On a machine with a GPU, by the torch that is installed: PYTHON says which. What is missing is told in a line.
gpu:  ## right or not, then how fast; writes audits/gpu.md
	@$(RECENT)
	@PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m scripts.gpu

gpu-quick:  ## the same in four minutes
	@$(RECENT)
	@PYTHONDONTWRITEBYTECODE=1 $(PYTHON) -m scripts.gpu --quick

lint: $(VENV)/.dev $(LINT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=$(LINT) $(BIN)/mypy
	cd $(LINT) && ../bin/lint-imports --no-cache --config ../../pyproject.toml

$(VENV)/.runtime: pyproject.toml constraints.txt
	@cat scripts/welcome.txt
	$(STEP) "1/3  a virtual environment in $(VENV)"
	$(RECENT)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --no-compile --constraint constraints.txt pip setuptools
	$(STEP) "2/3  torch (the largest download, a minute or two)"
	$(PIP) install --quiet --no-compile --constraint constraints.txt torch==2.13.0
	$(STEP) "3/3  the other packages, and this folder itself"
	$(PIP) install --quiet --no-compile --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(STEP) "the packages that only the tests need (transformers is their oracle)"
	$(PIP) install --quiet --no-compile --constraint constraints.txt --group dev
	$(PIP) install --quiet --no-compile --no-deps --upgrade --target $(VENV)/oldest-triton --group oldest
	@touch $@

# The package as it is installed: type checkers and import-linter do not run fathom.py to find its folders.
$(LINT):
	@mkdir -p $@/fathom
	@for folder in kernels model runtime probes scripts; do ln -s ../../../$$folder $@/fathom/$$folder; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build ./*.egg-info
