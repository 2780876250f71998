# make serve | check | test | lint | bench | clean

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
ARGS   ?=
# Workers of the tests. Each runs on one thread, and some start a server beside it.
WORKERS ?= 2
# TORCH_INDEX: a package index with CPU builds of torch, which are much smaller (optional).
TORCH_FROM := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Compiled modules are kept whatever the shell says: the tests start many processes.
export PYTHONDONTWRITEBYTECODE =

.PHONY: serve check quick test lint bench clean
.DEFAULT_GOAL := serve

serve: $(STAMP)
	$(BIN)/specserve serve $(ARGS)

# What to run before each commit: lint, and the tests that are quick, side by side.
check: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint quick

# The plugin of schemathesis serves slow tests only, and takes a second to import.
quick: $(STAMP)
	$(BIN)/python -m pytest --quick -q -p no:schemathesis -n $(WORKERS) --dist worksteal $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find benchmarks engine server loadtest training tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted installation is done again.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "specserve needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) -V 2>&1);" \
	       "name another one: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=24.1'
	$(BIN)/python -m pip install --quiet $(TORCH_FROM) --editable '.[test]'
	@touch $@
