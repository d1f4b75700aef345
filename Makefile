# The whole project runs in one virtual environment, .venv, made on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core
STAMP  := $(VENV)/.installed
READY  := $(VENV)/.compiled
JITTED := $(wildcard src/tacit/kernels/numba/*.py)

# Without bytecode files each of a thousand processes would compile all sources anew: a second of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo quick test check lint docs
setup: $(READY) $(STAMP)

# What the kernels need comes first: `make -j2 setup` compiles them while the rest is installed.
$(CORE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# --no-compile saves half a minute: Python compiles a module when it is first imported.
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[kernels]'
	@touch $(CORE)

$(STAMP): $(CORE)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[all,dev]'
	@# For an example and its test. Alone: it asks for loaders of data sets, which are 300 MB.
	$(BIN)/python -m pip install --quiet --no-compile --no-deps torchtitan==0.3.0
	@touch $(STAMP)

# Numba compiles a kernel for a processor once, and keeps it; else each of the tests' processes would at first.
$(READY): $(CORE) $(JITTED)
	@$(BIN)/python -m compileall -q src
	@echo "compiling kernels: half a minute" && printf '%s\n' $(basename $(notdir $(JITTED))) | xargs -P 2 -n 12 $(BIN)/python -c \
	    "import sys; from importlib import import_module; [import_module('tacit.kernels.numba.' + each) for each in sys.argv[1:]]"
	@touch $(READY)

demo: setup  ## Train with six algorithms on an emulated slow network and compare them.
	$(BIN)/tacit compare

quick: setup  ## The laws, and the tests that start no process: about a minute and a half on two cores.
	$(BIN)/python -m pytest --forks 6 -m "not processes and not long"

test: setup  ## The whole test suite; tests that need network namespaces say so where they cannot run.
	$(BIN)/python -m pytest --forks 6

check: lint  ## Format, lint, strict types, and the rules of the source's structure.
	$(BIN)/python -m pytest -q tests/test_architecture.py

lint: $(STAMP)  ## What `check` is but for those rules, which `test` holds too.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(STAMP)  ## The documentation site, in build/site; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
