# Two commands do everything on a fresh machine with Python 3.10 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# NVIDIA's plugin front end without its library, and type stubs in a folder where no import finds them.
FRONT_END := "tensorrt-cu13-bindings==11.4.*"
STUBS := "tensorrt-stubs==10.13.*"

.PHONY: demo test test-compile sanitize lint clean

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/.base: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[test,bench,serve,plugins,compare,rtx]"
	$(BIN)/python -m pip install --quiet --no-deps $(FRONT_END)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(VENV)/tensorrt-stubs $(STUBS)
	touch $@

demo: $(VENV)/.base
	$(BIN)/python build_scripts/demo.py

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest --ignore=tests/plugins --ignore=tests/gpu
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/plugins --confcutdir=tests/plugins -m "not compile"

test-compile: $(VENV)/.test
	$(BIN)/python -m pytest tests/plugins --confcutdir=tests/plugins -m compile

sanitize: $(VENV)/.test
	build_scripts/sanitize.sh $(BIN)/python

clean:
	rm -rf engines build *.egg-info
