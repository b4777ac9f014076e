# Every heavy environment is a venv of its own, made by one target, and never needed by the others.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.10 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
ENGINE := .venv-engine
ASCEND := .venv-ascend
BACKENDS := .venv-backends

.PHONY: help venv lint test fault bench engine soak bench-engine backends backends-packages bench-mooncake ascend ascend-check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

$(VENV)/.done: requirements-dev.txt pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

venv: $(VENV)/.done ## the development environment in .venv

lint: venv ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

# The fault tier waits for deadlines most of the time, so it runs on more workers than there are cores; one item is up to
# a few hundred runs, each with a watchdog of its own.
PYTEST := -m pytest
CPU_TIER := not (fault or engine or backend or ascend or cuda or npu)
FAULT := -m fault -n 8 --timeout 900 --fault-fail-unreached --fault-target vllm_ascend_ext.kv_pool
# Only the pool's tests are traced.
test: venv ## the whole CPU tier, with the pool's coverage
	$(BIN)/coverage erase
	$(BIN)/python $(PYTEST) -m "$(CPU_TIER)" -n 2 --ignore tests/ut/distributed
	$(BIN)/coverage run $(PYTEST) -m "$(CPU_TIER)" -n 2 tests/ut/distributed
	$(BIN)/coverage run $(PYTEST) $(FAULT)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/python tests/check_coverage.py < build/coverage.json

fault: venv ## the pool driven through its failure paths: build/fault-matrix.json and .html
	$(BIN)/python $(PYTEST) $(FAULT)

bench: venv ## the pool's figures as ratios: build/bench-pool.json
	$(BIN)/python -m benchmarks.pool

$(ENGINE)/.done: requirements-engine.txt pyproject.toml
	$(PYTHON) -m venv $(ENGINE)
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-engine.txt
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

engine: $(ENGINE)/.done ## the connector in a real vLLM engine on the CPU, in .venv-engine
	$(ENGINE)/bin/python -m pytest -m engine tests/e2e/engine

# SOAK_SECONDS, SOAK_SEED and SOAK_MODE (sync, async, layerwise) choose another one.
soak: $(ENGINE)/.done ## ten minutes of mixed requests and seeded faults against the API server: build/soak.json
	$(ENGINE)/bin/python -m tests.e2e.engine.soak

bench-engine: $(ENGINE)/.done ## time to the first token in a real engine, as ratios: build/bench-engine.json
	$(ENGINE)/bin/python -m benchmarks.engine

# Mooncake's wheel links the first four; the last one brings loopback up.
BACKENDS_DEBIAN := libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200 iproute2

backends-packages:
	@missing=$$(for package in $(BACKENDS_DEBIAN); do dpkg -s $$package >/dev/null 2>&1 || echo $$package; done); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ]; then echo "make backends needs the Debian packages:" $$missing >&2; exit 1; fi; \
	apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -qy $$missing

$(BACKENDS)/.done: requirements-backends.txt pyproject.toml
	$(PYTHON) -m venv $(BACKENDS)
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-backends.txt
	$(BACKENDS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

# The engines' clients listen on all addresses: their tests see loopback only, and no process outlives them.
ONLY_LOOPBACK = unshare $(if $(filter 0,$(shell id -u)),,--map-root-user) --net --pid --fork --kill-child --mount-proc \
	sh -c 'ip link set lo up && exec "$$@"' sh

$(ENGINE)/.mooncake: $(ENGINE)/.done requirements-backends.txt
	$(ENGINE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep ^mooncake requirements-backends.txt)
	touch $@

# The first line stops here if the tests would all be skipped. They wait most of the time, so there are more workers than cores.
backends: backends-packages $(BACKENDS)/.done $(ENGINE)/.mooncake ## the pool, then vLLM with it, on a real Mooncake Store
	$(ONLY_LOOPBACK) $(BACKENDS)/bin/python -c 'import fixtures.mooncake as it, sys; sys.exit(it.MISSING or 0)'
	$(ONLY_LOOPBACK) $(BACKENDS)/bin/python -m pytest -m backend -n 3 tests/ut/distributed/ascend_store/backend tests/e2e/backends
	$(ONLY_LOOPBACK) $(ENGINE)/bin/python -m pytest -m backend tests/e2e/engine/test_mooncake.py

bench-mooncake: backends-packages $(ENGINE)/.mooncake ## the same on a real Mooncake Store: build/bench-mooncake.json
	$(ONLY_LOOPBACK) $(ENGINE)/bin/python -m benchmarks.engine --mooncake

$(ASCEND)/.done: requirements-ascend.txt requirements-ascend-compiler.txt pyproject.toml
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-ascend.txt
	$(ASCEND)/bin/python -m pip uninstall --quiet --yes triton # torch for GPUs brings it, and they share files
	$(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-ascend-compiler.txt
	$(ASCEND)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

ascend: $(ASCEND)/.done ## the Ascend lowering check: its own tests, then our kernels, in .venv-ascend
	$(ASCEND)/bin/python -m pytest -m ascend tests/ut/kernels/lowering
	$(MAKE) ascend-check

ascend-check: $(ASCEND)/.done ## our kernels through the Ascend compiler; report in build/ascend-lowering.json
	$(ASCEND)/bin/python -m vllm_ascend_ext.kernels.lowering check --strict vllm_ascend_ext/kernels

clean: ## remove what the targets made
	rm -rf .venv .venv-* build
