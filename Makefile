# Each target makes its own environment in .venv from constraints.txt; nothing else has to be installed but Python and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# torch first and alone: a CPU build that is already there satisfies everything after it.
TORCH ?= torch==2.13.0
STAMP = $(VENV)/.installed
DOCS_STAMP = $(VENV)/.installed-docs
# pip would compile on one core what is compiled on all of them afterwards.
PIP_OPTIONS = --quiet --disable-pip-version-check --no-compile
# Processes that share the tests; each keeps to one thread.
JOBS ?= 2
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: quickstart test test-all slurm-test lint docs bench bench-tiny clean

quickstart: $(STAMP)
	$(BIN)/python main.py quickstart

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu and not multi_gpu and not network"

test-all: $(STAMP)
	$(PYTEST)

# A real SLURM of one node, from the system's packages where they are there.
slurm-test: $(STAMP)
	$(BIN)/python -m tests.slurm.run

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The documentation site in site/, from the pages, the CSV tables, the parsers and the docstrings.
docs: $(STAMP) $(DOCS_STAMP)
	HF_HUB_OFFLINE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

bench-tiny: $(STAMP)
	$(BIN)/python -m benchmarks.run --tiny

$(STAMP): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) $(TORCH)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt -e ".[quickstart,cpu,dev]"
	$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt -e ".[docs]"
	touch $(DOCS_STAMP)

clean:
	rm -rf $(VENV) .cache site
