# Everything goes on in .venv; nothing is installed elsewhere. `make demo` and `make test` are all one needs to know.

PYTHON ?= python3
LEAST_PYTHON := 3.11
# Time limit of `make test`, in case something hangs; it takes about eight minutes.
TEST_SECONDS := 3600
BIN := .venv/bin
STAMP := .venv/.installed
UV := 0.13.8
AUDIT := pip-audit@2.10.1

# Bytecode is kept even where the environment says not to: without it, each of the tests' thousand processes compiles all that it
# imports, and the tests take twice as long.
unexport PYTHONDONTWRITEBYTECODE

# Both work with any Python version. The message names the make goal that the user asked for.
IS_NEW_ENOUGH := import sys; sys.exit(sys.version_info < tuple(map(int, "$(LEAST_PYTHON)".split("."))))
GOAL = $(firstword $(MAKECMDGOALS) setup)
define CHECK_PYTHON
{ command -v $(PYTHON) >/dev/null || { \
    echo 'visiond needs Python $(LEAST_PYTHON) or newer, and $(PYTHON) was not found. Name yours: make $(GOAL) PYTHON=python3.12' >&2; exit 1; }; \
  $(PYTHON) -c '$(IS_NEW_ENOUGH)' || { \
    echo "visiond needs Python $(LEAST_PYTHON) or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make $(GOAL) PYTHON=python3.12" >&2; exit 1; }; \
  $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
    echo 'visiond needs a virtual environment, and $(PYTHON) cannot make one. On Debian or Ubuntu: apt install python3-venv' >&2; exit 1; }; }
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types faults mutants bench gpu-test gpu-bench lock audit docs clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(STAMP)  ## make .venv with everything that requirements.lock names

# A .venv whose Python is too old, or has been removed, is made again.
$(STAMP): requirements.lock pyproject.toml
	@$(BIN)/python -c '$(IS_NEW_ENOUGH)' 2>/dev/null || { $(CHECK_PYTHON) && $(PYTHON) -m venv --clear .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV)
	$(BIN)/uv pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	touch $@

demo: $(STAMP)  ## sample images and two photographs through the daemon, and a table of what came out
	$(BIN)/visiond demo

test: lint types  ## lint, types and every test, three files at a time: most of them wait for processes
	@OMP_WAIT_POLICY=PASSIVE timeout -s ABRT -k 30 $(TEST_SECONDS) $(BIN)/python -m pytest --numprocesses 3; \
	  status=$$?; [ $$status != 124 ] || echo 'the tests were stopped after $(TEST_SECONDS) s: the tracebacks above show what hung' >&2; \
	  exit $$status

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

faults: $(STAMP)  ## every fault of the catalogue in full, and a table (an hour; FAULTS="--only 9,10" for some)
	VISIOND_ALONE=1 $(BIN)/python -m tests.faults $(FAULTS)

mutants: $(STAMP)  ## bugs planted one at a time, and the test that notices each (a quarter of an hour; MUTANTS="--only state-lock" for some)
	$(BIN)/python -m tests.mutants $(MUTANTS)

bench: $(STAMP)  ## what the daemon costs beside a bare loop, with fake stages
	$(BIN)/python -m benchmarks.overhead

gpu-test: $(STAMP)  ## the tests that need a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "torch finds no CUDA device")'
	$(BIN)/python -m pytest -m gpu

gpu-bench: $(STAMP)  ## the standard job on this machine, beside one image at a time (BENCH="--count 2000 --memory 10")
	$(BIN)/visiond bench $(BENCH)

lock: $(STAMP)  ## resolve the dependencies again
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --group dev --extra heic --extra parquet \
	  --extra train --no-emit-index-url --no-annotate --no-header --upgrade pyproject.toml -o requirements.lock

audit: $(STAMP)  ## known weaknesses of what requirements.lock names; wants a network, and fails where it cannot ask of a package
	$(BIN)/uv tool run $(AUDIT) --requirement requirements.lock --require-hashes --disable-pip --strict

docs: $(STAMP)  ## what is generated: the configuration reference and the dashboard
	$(BIN)/python -m daemon.config.reference > docs/configuration.md
	$(BIN)/python -m daemon.config.reference --toml > daemon.toml
	$(BIN)/python -m daemon.sidecar > docs/sidecar.schema.json
	$(BIN)/python deploy/grafana/dashboard.py > deploy/grafana/visiond.json

clean:  ## remove .venv and the demo
	rm -rf .venv demo
