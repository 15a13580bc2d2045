# Each target makes its own environment on first use and keeps it until pyproject.toml changes.
# VENV=.venv312 PYTHON=python3.12 make test     another environment, another interpreter

VENV ?= .venv
# Of the slow tests: with torch, and with compilers of which jax concludes that there must be a GPU.
SLOW_VENV = $(VENV)-slow
PYTEST = bin/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-aot lint format bench docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

demo: $(VENV)/.installed-base  ## install what is needed, fetch a small model, show what the radix cache saves
	$(VENV)/bin/python -m radix_jax demo

test: $(VENV)/.installed-test  ## the tests, 15 minutes at most on 2 cores; needs neither torch nor an accelerator
	$(VENV)/$(PYTEST)

test-slow: $(SLOW_VENV)/.installed-test $(SLOW_VENV)/.installed-oracle $(SLOW_VENV)/.installed-aot $(SLOW_VENV)/.installed-aot-tpu  ## the rest: against transformers, the real model at length, kernels compiled for GPUs and TPUs
	$(SLOW_VENV)/$(PYTEST) -m 'slow and not aot' --timeout=1200 --no-loadscope-reorder

test-aot: $(SLOW_VENV)/.installed-test $(SLOW_VENV)/.installed-aot $(SLOW_VENV)/.installed-aot-tpu  ## full models compiled for accelerators that are not there, the rest of the TPU kernels' grid
	$(SLOW_VENV)/$(PYTEST) -m aot

lint: $(VENV)/.installed-dev  ## style, types and the arrows between the rooms
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev  ## lay the code out and mend what can be mended by rule
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.installed-base  ## the four offline workloads, one JSON line each
	$(VENV)/bin/python -m benchmarks.offline --json

docs: $(VENV)/.installed-docs  ## the site, built into site/; a broken link or docstring fails
	$(VENV)/bin/python -m mkdocs build --strict

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) $(SLOW_VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(VENV)/.installed-%: pyproject.toml .ci/install
	.ci/install $(VENV) $*

$(SLOW_VENV)/.installed-%: pyproject.toml .ci/install
	.ci/install $(SLOW_VENV) $*
