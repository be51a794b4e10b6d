# make demo   the whole loop on this machine, in the browser
# make test   every test, headless Chromium included
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
export PYTHONUNBUFFERED := 1

.PHONY: demo test check fmt bench chromium clean

demo: $(VENV)/.all
	$(BIN)/fp8scope demo $(ARGS)

# Two processes, each with one thread for torch's sums, on any machine: many tests start processes themselves.
test: $(VENV)/.dev chromium
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .

# A benchmark that cannot run on this machine says why and ends with 2.
bench: $(VENV)/.dev
	@for file in benchmarks/*.py; do \
	  echo "== $$file"; $(BIN)/python $$file --quick; code=$$?; \
	  [ $$code = 0 ] || [ $$code = 2 ] || exit $$code; \
	done

# The browser tests drive the system's Chromium; only the system can install it.
chromium:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	  else \
	    echo "make test needs Chromium; install it, for example: sudo apt-get install chromium" >&2; exit 1; \
	  fi

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "fp8scope needs Python 3.11 or newer; name one with make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.all: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing fp8scope and what it needs into $(VENV)"
	$(PIP) --editable '.[all]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing fp8scope, its tests and tools into $(VENV)"
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.all

clean:
	rm -rf $(VENV) dist build .mypy_cache .ruff_cache .pytest_cache
