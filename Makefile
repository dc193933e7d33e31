# One door to every chore; people and CI use the same verbs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_FLAGS ?=
# Those with budgets. The others in benchmarks/ fit weights or make the tables of docs, and are run by hand.
BENCHMARKS := align causal collector dashboard detect gpu_probe guards ingest remedy

.PHONY: help demo dev test check bench heavy probe clean system-packages browser

help:
	@echo "make demo   install, run the demo with a slow rank, print the verdict, keep serving until Ctrl-C"
	@echo "make test   install what the tests need (browser included) and run them"
	@echo "make check  ruff, mypy, layering"
	@echo "make bench  the benchmarks with budgets, --quick, JSON on stdout"
	@echo "make heavy  soaks, crash loops and large simulations"
	@echo "make probe  compile the CUDA and NCCL probes"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24" "setuptools>=77"
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt torch
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e ".[server,dev]"
	@echo "compiling the collective tap and the OTLP decoder (once; without a C++ compiler slower ways are taken)"
	-@$(BIN)/python -m lanterne.collector.native >/dev/null 2>&1
	-@$(BIN)/python -m lanterne.backend.ingest.walker >/dev/null 2>&1
	touch $(STAMP)

dev: $(STAMP)

demo: $(STAMP)
	$(BIN)/lanterne demo --fault slow-rank --rank 2 --ranks 4

browser:
	@command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || $(MAKE) system-packages

system-packages:
	@if command -v apt-get >/dev/null 2>&1; then \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || command -v sudo || true ); \
	  $$SUDO apt-get update -qq && $$SUDO env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium g++ cmake make valgrind >/dev/null; \
	else echo "install chromium, a C++ compiler and cmake by hand: apt-get is not here"; fi

test: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not heavy and not gpu" -q $(PYTEST_FLAGS)

heavy: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "heavy" -q --timeout 3600 $(PYTEST_FLAGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	@for name in $(BENCHMARKS); do \
	  OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.$$name --quick --json || exit 1; done

probe: $(STAMP)
	$(BIN)/lanterne probe build
	$(BIN)/lanterne probe status

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
