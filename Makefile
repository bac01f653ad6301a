# Every entry point, for people and for CI alike. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=
TODAY := $(shell date -u +%F)
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest

# Two cores are a small machine: one build job a core, unless the caller says otherwise.
export CMAKE_BUILD_PARALLEL_LEVEL ?= $(JOBS)
export JATTN_WERROR ?= ON
export PIP_DISABLE_PIP_VERSION_CHECK := 1

NATIVE_SOURCES := pyproject.toml CMakeLists.txt $(shell find cc cmake -type f 2>/dev/null)
CXX_FILES = $$(find cc tests benchmarks tools -type f \( -name '*.h' -o -name '*.cc' -o -name '*.inl' -o -name '*.cuh' -o -name '*.cu' \))
CMAKE_FILES = $$(find CMakeLists.txt cmake -type f \( -name CMakeLists.txt -o -name '*.cmake' \))

.DEFAULT_GOAL := help
.PHONY: help setup format check test test-compile test-gpu sanitize ci demo docs tables bench bench-cpu record-cpu clean

help:  ## this table
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environment ------------------------------------------------------------------------------------------------------

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1), needs Python 3.11 or newer: set PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' || { \
	  echo "make: $(PYTHON) has no venv module: apt-get install python3-venv" >&2; exit 1; }
	@command -v "$${CXX:-c++}" >/dev/null || { \
	  echo "make: no C++ compiler: apt-get install g++ (or set CXX)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Editable, so that the tests run the sources of this checkout; built again only when something native changed. Kernels
# are compiled ahead of time only where there is a GPU to run them or where a target asks for it.
$(VENV)/.installed: $(NATIVE_SOURCES) | $(BIN)/python
	@echo "make: installing jattn and its tools into $(VENV); the first time this takes some minutes"
	JATTN_CUDA=$(if $(shell command -v nvidia-smi),AUTO,OFF) $(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

# Without the compilers of the extra there is no stamp: the next make asks for them again.
$(VENV)/.installed-kernels: $(VENV)/.installed
	JATTN_CUDA=AUTO $(BIN)/python -m pip install --quiet --editable '.[compile]' && touch $@ || { \
	  echo "make: NVRTC, cuobjdump, nvdisasm and ziglang cannot be installed; tests that need them will skip" >&2; \
	  JATTN_CUDA=AUTO $(BIN)/python -m pip install --quiet --no-deps --editable .; }

# Nothing is fetched while the site is built; only these packages are, once.
$(VENV)/.installed-docs: $(VENV)/.installed
	JATTN_CUDA=$(if $(shell command -v nvidia-smi),AUTO,OFF) $(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@

setup: $(VENV)/.installed  ## virtual environment, build, git hooks
	@if [ -d .git ]; then $(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push >/dev/null; fi

# --- checks -----------------------------------------------------------------------------------------------------------

format: $(VENV)/.installed  ## rewrite: ruff, clang-format, gersemi
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/gersemi --in-place $(CMAKE_FILES)

check: $(VENV)/.installed  ## format check, width of comments, ruff, types, generated tables, import layers: about a minute
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/python tools/check_comment_width.py
	$(BIN)/gersemi --check $(CMAKE_FILES)
	$(BIN)/mypy
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.tables --check
	$(PYTEST) -q -p no:cacheprovider tests/cpu/test_layers.py

# --- tests ------------------------------------------------------------------------------------------------------------

test: $(VENV)/.installed  ## tier cpu: Python and a C++ compiler are enough
	$(PYTEST) -n $(JOBS) tests/cpu $(ARGS)

# With the tests of the kernel cache that need NVRTC, which tier cpu does without.
test-compile: $(VENV)/.installed-kernels  ## tier compile: nvcc or NVRTC, no GPU
	$(PYTEST) -n $(JOBS) tests/compile tests/cpu/test_kernel_cache.py $(ARGS)

test-gpu: $(VENV)/.installed-kernels  ## tier gpu, on a machine that has one: 5 to 10 minutes with 16 cores
	$(PYTEST) -n $$(nproc) --maxprocesses 16 tests/gpu $(ARGS)

sanitize: $(VENV)/.installed  ## CPU kernel under ASan and UBSan, on every instruction set: ARGS="--every 4" is a sample
	PATH="$(abspath $(BIN)):$$PATH" PYTHON=$(BIN)/python tools/sanitize_cpu.sh $(ARGS)

ci: check test docs test-compile  ## what CI runs

# --- programs ---------------------------------------------------------------------------------------------------------

demo: $(VENV)/.installed  ## train a small language model, compare with other attention, draw the curves
	$(BIN)/python examples/train_lm.py --out out/demo $(ARGS)

docs: $(VENV)/.installed-docs  ## the documentation site: out/docs/index.html
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -W --keep-going -q -b html docs out/docs $(ARGS)

tables: $(VENV)/.installed  ## write the tables and figures of README and docs from benchmarks/results
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.tables
	JAX_PLATFORMS=cpu $(BIN)/python -m benchmarks.plot

bench: $(VENV)/.installed-kernels  ## benchmarks/run.py, for example ARGS="--tag bench --rivals jax-cudnn"
	$(BIN)/python -m benchmarks.run $(ARGS)

bench-cpu: $(VENV)/.installed  ## the CPU kernel against jax.nn, and PyTorch if it is installed: five minutes, eight where PyTorch is slow
	$(BIN)/python -m benchmarks.cpu $(ARGS)

# Written beside the checkout's records first, so that none of them changes the checkout that the next one names.
record-cpu: $(VENV)/.installed  ## every record of a quiet CPU machine, then tables and figures: a quarter of an hour
	mkdir -p out/records
	$(BIN)/python -m benchmarks.latency --out out/records/$(TODAY)-cpu-latency.json
	$(BIN)/python -m benchmarks.cpu_tiles --out out/records/$(TODAY)-cpu-tiles.json
	$(BIN)/python -m benchmarks.run --tag cpu_features --out out/records/$(TODAY)-cpu-features.json
	$(BIN)/python -m benchmarks.cpu --out out/records/$(TODAY)-cpu-two-cores.json
	$(BIN)/python -m benchmarks.cpu --decode --out out/records/$(TODAY)-cpu-decode.json
	$(BIN)/python -m benchmarks.cpu --short --out out/records/$(TODAY)-cpu-short.json
	$(BIN)/python -m benchmarks.accuracy --out out/records/$(TODAY)-cpu-accuracy.json
	$(BIN)/python -m benchmarks.memory --out out/records/$(TODAY)-cpu-memory.json
	mv out/records/$(TODAY)-cpu-*.json benchmarks/results/
	$(MAKE) tables

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build dist out .hypothesis .mypy_cache .ruff_cache .pytest_cache
