# make train   sets up .venv and trains the default recipe
# make test    sets up .venv and runs style, types, import rules and tests
# make slow    runs the tests that take minutes or fetch the real model
# make docs    builds the documentation as a site, in site/
# make hooks   has git run 'make check' before each commit
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RECIPE ?= arithmetic
# Options for pip that choose a build of torch, such as an index with CPU builds.
TORCH_FROM ?=

.PHONY: train test slow check docs hooks clean

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Stretto needs Python 3.11 or newer; choose one with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_FROM) "torch>=2.11,<2.14"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

train: $(VENV)/.installed
	$(BIN)/stretto train $(RECIPE)

test: check docs
	$(BIN)/python -m pytest -n auto --dist loadfile

slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy --config-file mypy-tests.ini
	$(BIN)/lint-imports

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

hooks: $(VENV)/.installed
	$(BIN)/pre-commit install

clean:
	rm -rf $(VENV) site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
