# Everything runs in .venv, which is made on first use and again when its inputs change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^torch==/torch==/p' constraints.txt)

# The child processes of tests and benchmarks find the same interpreter and tools.
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help venv demo test lint format conformance bench clean

help:
	@echo "make demo         an ordinary Keras script, stock and under keras_turbo; quick benchmark"
	@echo "make test         all tests of this package (PYTEST=... for pytest's options)"
	@echo "make lint         ruff and pyright"
	@echo "make conformance  Keras's own tests, stock against keras_turbo (CONFORMANCE= for all)"
	@echo "make bench        the whole benchmark (BENCH=... for its options)"
	@echo "make venv         only make the virtual environment"
	@echo "make clean        remove what was made"

# torch goes first and alone: a resolver that sees the whole list may take another build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt '$(TORCH)'
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,bench]'
	touch $@

venv: $(STAMP)

demo: venv
	$(BIN)/python examples/compare.py
	$(BIN)/keras-turbo bench --quick

PYTEST ?= --numprocesses auto
test: venv
	$(BIN)/python -m pytest $(PYTEST)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

CONFORMANCE ?= --quick
conformance: venv
	$(BIN)/python -m tests.keras_suite $(CONFORMANCE)

BENCH ?=
bench: venv
	$(BIN)/keras-turbo bench $(BENCH)

clean:
	rm -rf $(VENV) build dist out .pytest_cache .ruff_cache .hypothesis
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
