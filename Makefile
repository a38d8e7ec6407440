# Each target first installs the versions of constraints.txt into .venv. Only Python and make have to be installed before.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# torch is installed first and separately, so that the later installs keep its build (such as a CPU build).
TORCH ?= torch==2.13.0
STAMP = $(VENV)/.installed
DOCS_STAMP = $(VENV)/.installed-docs
# pip would compile the bytecode on one core, after the rest; the install target does it on all cores, and that of torch while
# the other packages are installed. Modules of UNCOMPILED, of which few or none are imported, are compiled when they are.
PIP_OPTIONS = --quiet --disable-pip-version-check --no-compile
# uv installs 150 packages in 20 s where pip takes 80; pip does it where uv fails, as with an index that only pip.conf names.
# setuptools is there already, so the build of this package needs no environment of its own.
THIS = --no-build-isolation -c constraints.txt -e ".[$(EXTRAS)]"
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python $(THIS) || $(BIN)/python -m pip install $(PIP_OPTIONS) $(THIS)
$(STAMP): EXTRAS = quickstart,cpu,dev
$(DOCS_STAMP): EXTRAS = docs
FEW_IMPORTED = distutils|f2py|fontTools|mypyc?|networkx|openai|physics|pip|pygments|pytorch_lightning|setuptools|sqlalchemy|torchgen
UNCOMPILED = /tests?/|/testing/_internal/|/transformers/models/|/($(FEW_IMPORTED))/
COMPILE = $(BIN)/python -m compileall -qq -x '$(UNCOMPILED)' $(VENV)/lib
# Number of test processes; each uses one thread. Four keep two cores busy while some tests wait.
JOBS ?= 4
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: quickstart test test-all test-gpu slurm-test lint docs bench bench-tiny canary wheel clean

quickstart: $(STAMP)
	$(BIN)/python main.py quickstart

# Empty, so that Python writes bytecode files and the many processes of the tests do not recompile the modules.
export PYTHONDONTWRITEBYTECODE =

# Set here because huggingface_hub reads it on import, before tests/conftest.py runs.
test test-all test-gpu: export HF_HUB_OFFLINE = 1

test: $(STAMP)
	$(PYTEST) -m "not slow and not gpu and not multi_gpu and not network"

test-all: $(STAMP)
	$(PYTEST)

# Needs a CUDA GPU and torch's CUDA build (TORCH=… names another one). Prints what the machine supports and which benchmarks
# it would skip, then runs the tests marked gpu, which compare every fused path with the CPU.
test-gpu: $(STAMP)
	$(BIN)/python -m benchmarks.gpu --check
	$(BIN)/python -m pytest -m gpu -rs tests

# Runs the batch files on a real one-node SLURM cluster. Passes with a message if the system has no SLURM packages.
slurm-test: $(STAMP)
	$(BIN)/python -m tests.slurm.run

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Builds the documentation site in site/ from the pages, the CSV tables, the parsers and the docstrings.
docs: $(STAMP) $(DOCS_STAMP)
	HF_HUB_OFFLINE=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)
	$(BIN)/python -m benchmarks.run

bench-tiny: $(STAMP)
	$(BIN)/python -m benchmarks.run --tiny $(ONLY)

# Installs the newest releases within the bounds of pyproject.toml in a separate environment, and runs the tests of the code that
# uses their private names, command line, model files and training loop. TORCH_CANARY="torch --pre …" tries another torch, and
# RELEASES=lowest-direct the oldest releases.
CANARY = $(VENV)/canary
TORCH_CANARY ?= $(TORCH)
RELEASES ?= highest
CANARY_TESTS = tests/cli/test_parser.py tests/cli/test_main.py tests/cli/test_fit.py tests/callbacks/test_run_record.py \
	tests/callbacks/test_preemption.py tests/data/test_loader.py tests/models/test_anchor_token.py \
	tests/models/test_bidirectional.py tests/models/test_directory.py tests/models/test_half_precision.py \
	tests/strategies/test_fsdp.py tests/strategies/test_zero.py tests/training/test_graphs.py tests/test_end_to_end.py tests/test_wheel.py
canary:
	$(PYTHON) -m venv --clear $(CANARY)
	$(CANARY)/bin/python -m pip install $(PIP_OPTIONS) $(TORCH_CANARY) uv
	$(CANARY)/bin/uv pip install --quiet --python $(CANARY)/bin/python --resolution $(RELEASES) -e ".[quickstart,cpu,dev]"
	$(CANARY)/bin/python -m pip list --format freeze
	OMP_NUM_THREADS=1 $(CANARY)/bin/python -m pytest -n $(JOBS) --dist worksteal -m "not slow and not gpu" $(CANARY_TESTS)

# Writes dist/embedding_zoo-VERSION-py3-none-any.whl. build/ is removed because it may contain deleted files.
wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_OPTIONS) $(TORCH)
	$(BIN)/python -m pip install $(PIP_OPTIONS) -c constraints.txt setuptools uv
	$(COMPILE) & $(INSTALL)
	$(COMPILE) -j 0 || true
	touch $(STAMP)

$(DOCS_STAMP): $(STAMP)
	$(INSTALL)
	touch $(DOCS_STAMP)

clean:
	rm -rf $(VENV) .cache site
