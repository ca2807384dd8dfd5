# Everything a clone needs is Python 3.11 or newer and make; the rest is installed into .venv with pinned versions.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3.14 python3; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$python; break; }; done)
# One seed for everything random in the tests: the commit, so that a run can be repeated.
SEED ?= $(shell printf '%d' 0x$$(git rev-parse --short=8 HEAD 2>/dev/null || echo 0))
TESTS ?= tests
# Tests wait for servers more than they work: two processes take a bit more than half of the time, on two cores too.
PROCESSES ?= 2
BIN := .venv/bin

.PHONY: help run test lint bench soak mutants
.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

run: .venv/for-running ## Install what is missing, start Berth with all it needs and some load; Ctrl-C stops it
	$(BIN)/berth run

test: lint ## Lint, types, import rules and every test; TESTS=path for some, SEED=n to repeat a run
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --hypothesis-seed=$(SEED) -m "not soak" $(TESTS)

lint: .venv/for-developing ## Style, formatting, types and import rules only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/for-developing ## Measure; docs/performance.md says what and how
	$(BIN)/berth bench

mutants: .venv/for-developing ## Plant faults in the rules one by one: each must fail a test, or a test is missing
	$(BIN)/python -m tests.mutants

soak: .venv/for-developing ## The long fault tests, which `make test` leaves out
	$(BIN)/python -m pytest --hypothesis-seed=$(SEED) -m soak $(TESTS)

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Berth needs Python 3.11 or newer. Install it, or name it: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/for-running: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing Berth and what it needs into .venv (once)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

.venv/for-developing: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/for-running
