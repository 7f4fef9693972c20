# On a machine with Python 3.11+ and make, each target does all of its own set-up, once, in .venv.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: setup demo test test-slow lint bench docs pictures clean

setup: $(VENV)/.ready

# torch comes first and pinned: left to itself the resolver may fetch a build with several GB of CUDA packages.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Equipoise needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	touch $@

demo: setup  ## Train an equilibrium network on bundled digits, and write a page about it: under a minute.
	rm -rf build/demo
	$(BIN)/equipoise demo --output build/demo

test: setup  ## The default tier.
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## Beside torchdeq; writes docs/results. Leave the machine alone meanwhile.
	$(PIP) --no-deps torchdeq==0.1.0
	$(BIN)/python benchmarks/core.py
	$(BIN)/python benchmarks/opteq.py

# The documentation's own packages are installed here only: nothing else needs them.
$(VENV)/.ready-docs: $(VENV)/.ready
	$(PIP) --editable '.[docs]'
	touch $@

docs: $(VENV)/.ready-docs  ## The site in build/site; a warning is an error.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="(https?:)?//' build/site

pictures: setup  ## The pictures of README and docs; the one of the report needs Chromium.
	$(BIN)/python docs/pictures/make.py

clean:
	rm -rf $(VENV) build dist
