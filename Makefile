# The whole project runs in one virtual environment, .venv, made on first use.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Without bytecode files each of a thousand processes would compile all sources anew: a second of processor time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo quick test check docs
setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	@# For an example and its test. Alone: it asks for loaders of data sets, which are 300 MB.
	$(BIN)/python -m pip install --quiet --no-deps torchtitan==0.3.0
	@touch $(STAMP)

demo: setup  ## Train with five algorithms on an emulated slow network and compare them.
	$(BIN)/tacit compare

quick: setup  ## The laws, and the tests that start no process: two minutes on two cores.
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not processes and not long"

test: setup  ## The whole test suite; tests that need network namespaces say so where they cannot run.
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

check: setup  ## Format, lint, strict types, and the rules of the source's structure.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py

docs: setup  ## The documentation site, in build/site; a broken link is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
