# The daily commands. `make help` lists them; CMakePresets.json has the builds behind them.
# Variables: PYTHON=python3.12 (which Python makes .venv), ARGS='--steps 20' (passed to the demo or to pytest),
# CUDA=OFF (leave the CUDA backend out; AUTO: it is built where nvcc is found, which takes minutes on a few cores),
# CUDA_ARCHITECTURES=80-virtual (kernels for every GPU compile in half the time; the driver does the rest at their first call).

PYTHON ?= python3
ARGS ?=
CUDA ?= AUTO
CUDA_ARCHITECTURES ?=
export PYTHON
# .venv first: its cmake is used where the system's is too old.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
export CCACHE_BASEDIR ?= $(CURDIR)
python := .venv/bin/python
build := build/release
# Said at every configure, or a build folder would keep what an earlier one was told.
kernels := '-DCMAKE_CUDA_FLAGS=$(CUDAFLAGS)' \
    $(if $(CUDA_ARCHITECTURES),'-DMOIRE_CUDA_ARCHITECTURES=$(CUDA_ARCHITECTURES)',-UMOIRE_CUDA_ARCHITECTURES)
cuda := -DMOIRE_CUDA=$(CUDA) $(kernels)

.DEFAULT_GOAL := help
.PHONY: help demo test fuzz check bench build lib format clean tidy
.DELETE_ON_ERROR:

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo.stamp $(build)/build.ninja ## train a small MoE language model five ways; report in build/demo/report.html
	cmake --build --preset release --target moire
	$(python) examples/train_moe.py $(ARGS)

test: .venv/test.stamp build ## every test that needs no GPU: C++ (CTest) and Python (pytest)
	ctest --preset release --parallel 2
	$(python) -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --max-worker-restart 0 $(ARGS)

fuzz: .venv/demo.stamp ## random calls of the C ABI under the sanitizers, half a minute; hours with ARGS='--seconds 7200'
	cmake --preset dev
	cmake --build --preset dev --target fuzz
	build/dev/bin/fuzz $(or $(ARGS),--seconds 30)

check: .venv/check.stamp $(build)/build.ninja ## clang-format, the include lint, ruff, clang-tidy
	scripts/check.sh
	@$(MAKE) --no-print-directory --jobs=$(shell nproc) tidy

bench: .venv/demo.stamp $(build)/build.ninja ## time the CPU problems; JSON lines and a chart in build/bench/
	cmake --build --preset release --target moire_cli
	@mkdir -p build/bench
	$(build)/bin/moire bench cpu --json --svg build/bench/cpu.svg > build/bench/cpu.jsonl
	@echo "wrote build/bench/cpu.jsonl and cpu.svg; for a table: $(build)/bin/moire bench cpu"

build: .venv/demo.stamp ## compile library, command line and tests
	cmake --preset release $(cuda)
	cmake --build --preset release

lib: ## compile library and command line only: needs CMake and Ninja, no Python
	cmake --preset release -DMOIRE_BUILD_TESTS=OFF $(cuda) -B build/lib
	cmake --build build/lib

format: .venv/check.stamp ## rewrite the sources with clang-format and ruff
	scripts/check.sh --fix

clean: ## remove build/ (not .venv)
	rm -rf build

# The demo does not wait for kernels that this machine could not run; `make build` adds them.
gpu := $(wildcard /dev/nvidiactl /dev/dxg)
$(build)/build.ninja: .venv/demo.stamp CMakePresets.json
	cmake --preset release -DMOIRE_CUDA=$(if $(gpu),$(CUDA),OFF) $(kernels)

# clang-tidy of what is compiled here, one stamp per source; a header that changes asks for all of
# them. CUDA's are left to its own compiler, and of SIMD one instruction set is read.
tidy_sources := $(filter-out src/backend/cuda/%,$(sort $(shell sed -ns \
    's!.*"file": "$(CURDIR)/\(\(src\|reference\|tools\|python\)/.*[.]cpp\)".*!\1!p' \
    $(build)/compile_commands.json)))
tidy: $(tidy_sources:%=build/tidy/%.stamp)
	@echo "clang-tidy: $(words $^) files are clean"
build/tidy/%.stamp: % .clang-tidy $(shell git ls-files '*.h')
	@mkdir -p $(@D)
	@echo "clang-tidy $<"
	@clang-tidy-14 --quiet -p $(build) --extra-arg=-DHWY_COMPILE_ONLY_STATIC $< 2> $@.log || { cat $@.log; exit 1; }
	@mv $@.log $@

# Each level includes those before it.
.venv/demo.stamp: scripts/setup.sh
	scripts/setup.sh demo && touch $@
.venv/test.stamp: scripts/setup.sh .venv/demo.stamp
	scripts/setup.sh test && touch $@
.venv/check.stamp: scripts/setup.sh .venv/test.stamp
	scripts/setup.sh check && touch $@
