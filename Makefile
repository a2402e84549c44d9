# `make demo` and `make test` do all of their own set-up. Nothing is installed outside .venv; the built llama.cpp wheel is
# kept in the user's cache (~/.cache/swarmnode), so the next checkout need not build it again.

# The first Python that is new enough; set-up itself says what is wrong if there is none.
PYTHON ?= $(or $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done),python3)
BIN := .venv/bin

.PHONY: help setup setup-dev demo check test clean
.DEFAULT_GOAL := help

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile | expand -t 20

setup:  ## make .venv and install swarmnode into it
	@$(PYTHON) swarmnode/bootstrap.py

setup-dev:  ## the same, with what tests and checks need
	@$(PYTHON) swarmnode/bootstrap.py --dev

demo: setup  ## a swarm of four daemons on this machine answers a prompt
	@$(BIN)/swarmctl demo

check: setup-dev  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/mypy

test: check  ## the checks and all tests
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

clean:  ## remove everything that the commands above made in this folder
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
