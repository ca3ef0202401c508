PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help test lint format docs serve links paper dist clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

test: lint  ## set up .venv if needed, then ruff, mypy, import-linter and pytest
	$(BIN)/pytest -n auto --dist worksteal

lint: $(READY)  ## ruff, mypy and import-linter only
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)  ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Without the note that MkDocs Material prints about its successor.
docs serve: export NO_MKDOCS_2_WARNING = 1

docs: $(READY)  ## the documentation site, from docs/ and the docstrings: site/index.html
	$(BIN)/mkdocs build --strict

serve: $(READY)  ## the same on http://127.0.0.1:8000, rebuilt when a page changes
	$(BIN)/mkdocs serve

links: $(READY)  ## the links of README and docs that leave the repository, with the pages that have them
	@$(BIN)/python tests/support/pages.py

paper: $(READY)  ## the paper's experiments, the quick version, and the report: paper-results/report.html
	$(BIN)/marquardt paper

dist: $(READY)  ## sdist and wheel, checked, installed into empty environments and tried, with torch alone and with each extra
	rm -rf dist
	$(BIN)/python -m pip install -q -c constraints.txt build twine
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/python tests/release/environments.py dist/*.whl

clean:  ## remove caches and builds; .venv stays
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The constraints matter: a bare `torch` may bring gigabytes of CUDA packages along.
$(READY): pyproject.toml constraints.txt requirements-peers.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q --no-deps -r requirements-peers.txt
	touch $@
