# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard coherence/*.[ch] allocator/*.[ch] native/*.[ch])

.PHONY: demo test lint build clean

demo: $(VENV)/demo-ready
	$(BIN)/kvpool demo

test: $(VENV)/dev-ready
	$(BIN)/python -P -m pytest -q

lint: $(VENV)/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

build: $(VENV)/demo-ready

# One environment; `demo` has the base install and the demo's extras, `dev` adds what the tests need.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-ready: $(BIN)/python pyproject.toml setup.py bindings/build.py $(C_SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[demo]'
	touch $@

$(VENV)/dev-ready: $(VENV)/demo-ready
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[demo,dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist bindings/_native.c *.egg-info
	find . -name '*.so' -delete -o -name __pycache__ -type d -prune -exec rm -rf {} +
