# Every target does its own set-up: a fresh clone needs Python 3.11 or newer and make, nothing else.
#   PYTHON       the interpreter of the virtual environment (python3)
#   TORCH_INDEX  where no NVIDIA device is found, torch comes from this package index; with an index of
#                CPU wheels it comes without the CUDA libraries
#   UV           yes: uv, which reads no settings of pip, installs all but torch, in a third of the time
#   WORKERS      processes that run tests (4, as tests that wait would leave two cores idle)
#   ARGS         more arguments for the command that a target runs: make test ARGS='-k codec'

PYTHON ?= python3
TORCH_INDEX ?=
UV ?=
WORKERS ?= 4
ARGS ?=

BIN := .venv/bin
STAMPS := .venv/.stamps
DISTRIBUTIONS := proto kernels clients/python service
PYPROJECTS := $(DISTRIBUTIONS:%=%/pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
HAS_UV := { [ -x $(BIN)/uv ] || $(PIP) -c constraints.txt uv; }
INSTALL := $(if $(UV),$(HAS_UV) && $(BIN)/uv pip install -q --python $(BIN)/python,$(PIP))

# Two make processes must not fill one environment; without flock (macOS) that is up to the caller.
LOCKED = $(shell command -v flock >/dev/null 2>&1 && echo flock $(1).lock) $(MAKE) -s --no-print-directory
OTHER_TORCH = $(if $(and $(TORCH_INDEX),$(if $(NVIDIA),,none)),--index-url $(TORCH_INDEX))
NVIDIA = $(wildcard /dev/nvidiactl)$(shell command -v nvidia-smi 2>/dev/null)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-more test-slow lint type audit fmt release lock proto proto-check bench bench-cpu bench-gpu bench-step-gpu \
	bench-experts-gpu bench-distillation-gpu bench-families-gpu bench-ranks-gpu bench-states-gpu bench-service-gpu bench-hostile bench-floor bench-see bench-wires bench-verl bench-streams bench-scale faults test-gpu test-multigpu up down clean env env-dev env-proto env-trl env-verl env-compat env-cookbook compat

help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | awk -F '\t' '{ printf "%-16s %s\n", $$1, $$2 }'

demo: env ## train a tiny policy on this machine through the public client
	@$(BIN)/ratoon demo $(ARGS)

# How tests are shared out: tests/work_units.py. A single test is quicker with .venv/bin/pytest itself.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --no-loadscope-reorder
NO_GPU = not gpu and not multigpu

test: env-dev ## run the tests of the product, in a quarter of an hour on two cores
	@$(PYTEST) $(ARGS)

test-more: env-dev env-trl env-verl env-compat ## run outages, power cuts, broken builds, lost ranks, long fuzz; CI runs a fifth of it a commit
	@$(PYTEST) -m "more and not slow and $(NO_GPU)" $(ARGS)

compat: env-dev env-compat ## run every call of five Tinker SDKs; writes docs/tinker-compat.md
	@OMP_NUM_THREADS=1 $(BIN)/pytest -q -m more tests/compat --write-golden $(ARGS)

test-slow: env-dev ## run what CI leaves out: installs, the whole demo, all creation faults; hours
	@$(PYTEST) -m "slow and $(NO_GPU)" $(ARGS)

test-gpu: env-dev ## run the tests that need an NVIDIA GPU, and write their report; ARGS="-n 12": 12 workers over all GPUs
	@$(BIN)/pytest -m gpu --gpu-report benchmarks/results/h200/tests.json $(ARGS)

test-multigpu: env-dev ## run the tests that need two NVIDIA GPUs, and write their report
	@$(BIN)/pytest -m multigpu --gpu-report benchmarks/results/h200x2/tests.json $(ARGS)

lint: env-dev env-proto ## check format, lint, imports between layers, insecure calls, generated code
	@$(BIN)/pre-commit run --all-files
	@$(BIN)/bandit --quiet --recursive --configfile pyproject.toml $(DISTRIBUTIONS:%=%/src)
	@$(BIN)/lint-imports --no-cache
	@scripts/proto.sh --check

type: env-dev ## check types
	@$(BIN)/basedpyright $(ARGS)

audit: env-dev ## look up known vulnerabilities of what is installed; asks a service on the network
	@$(BIN)/python -m pip freeze --exclude-editable | sed 's/+[^ ]*$$//' >$(STAMPS)/installed.txt
	@$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r $(STAMPS)/installed.txt $(ARGS)

fmt: env-dev ## format and fix what can be fixed
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

release: env-dev ## build wheels and sdists into dist/ and check them; ARGS="--url URL": where the sources are
	@$(BIN)/python scripts/release.py build $(ARGS)

lock: ## resolve deploy/*.lock anew, at the versions of constraints.txt
	@PYTHON=$(PYTHON) scripts/lock.sh

proto: env-proto ## generate proto/src/ratoon_proto/v1 and types.py
	@scripts/proto.sh proto/src

proto-check: env-proto ## check that the generated code is what protoc writes
	@scripts/proto.sh --check

bench: bench-cpu $(if $(NVIDIA),bench-gpu) ## run the benchmarks of this machine

bench-cpu: env ## packed against replicated training on the CPU; milliseconds of a layout and of a plan
	@$(BIN)/python -m benchmarks.step.cpu --out benchmarks/results/cpu/step.json $(ARGS)
	@$(BIN)/python -m benchmarks.kernels.layout --out benchmarks/results/cpu/layout.json
	@$(BIN)/python -m benchmarks.step.balance --out benchmarks/results/cpu/balance.json

bench-streams: env-dev ## how fast versions leave, and what publishing them adds; 15 minutes
	@$(BIN)/python -m benchmarks.stream.main --out benchmarks/results/cpu/streams.json $(ARGS)

bench-floor: env-dev ## what a caller waits for at least, and what an idle service holds; 5 minutes
	@$(BIN)/python -m benchmarks.service.floor --out benchmarks/results/cpu/floor.json $(ARGS)

bench-see: env-dev ## what reports, the history of steps and an open page cost; 10 minutes
	@$(BIN)/python -m benchmarks.service.see --out benchmarks/results/cpu/see.json $(ARGS)

bench-wires: env-cookbook ## recipes of the Tinker cookbook, unmodified, against this service
	@$(BIN)/python -m benchmarks.service.wires --out benchmarks/results/cpu/wires.json $(ARGS)

bench-verl: env-dev env-verl ## updates of verl's actor and of the service's on the same batches; 5 minutes
	@$(BIN)/python -m benchmarks.service.verl --out benchmarks/results/cpu/verl.json $(ARGS)

bench-scale: env ## simulate an update on 8 to 4,096 GPUs, from what was measured
	@$(BIN)/python -m benchmarks.scale.main --out benchmarks/results/cpu/scale.json $(ARGS)

bench-hostile: env-dev ## memory, connections and a good caller's latency under hostile ones; half an hour
	@$(BIN)/python -m benchmarks.service.hostile_callers --out benchmarks/results/cpu/hostile_callers.json $(ARGS)

bench-gpu: env-dev ## tree attention and token log-probs on an H200; after test-gpu
	@$(BIN)/python -m benchmarks.kernels.attention --out benchmarks/results/h200/attention.json $(ARGS)
	@$(BIN)/python -m benchmarks.kernels.token_logprobs --out benchmarks/results/h200/token_logprobs.json

bench-step-gpu: env-dev ## whole steps on an H200, a section at a time; after test-gpu
	@$(BIN)/python -m benchmarks.step.main --out benchmarks/results/h200/step.json $(ARGS)

bench-experts-gpu: env-dev ## steps with routed experts on an H200; after test-gpu
	@$(BIN)/python -m benchmarks.step.experts --out benchmarks/results/h200/experts.json $(ARGS)

bench-distillation-gpu: env-dev ## a teacher's 64 likeliest tokens against GRPO on an H200; after test-gpu
	@$(BIN)/python -m benchmarks.step.distillation --out benchmarks/results/h200/distillation.json $(ARGS)

bench-families-gpu: env-dev ## families of models on an H200: operators, layers, precision; needs fla-core 0.6; after test-gpu
	@$(BIN)/python -m benchmarks.families.main --out benchmarks/results/h200/families.json $(ARGS)

bench-ranks-gpu: env-dev ## updates of one policy on two H200 and on one, through the service; after test-gpu
	@$(BIN)/python -m benchmarks.service.ranks --out benchmarks/results/h200x2/ranks.json $(ARGS)

bench-states-gpu: env-dev ## loss curves of the optimizer states on an H200; after test-gpu
	@$(BIN)/python -m benchmarks.optim.main --out benchmarks/results/h200/optimizer_states.json $(ARGS)

bench-service-gpu: env-dev ## updates through the whole service on an H200, and a killed worker; after test-gpu
	@$(BIN)/python -m benchmarks.service.main --out benchmarks/results/h200/service.json $(ARGS)

faults: env-dev env-compat ## kill, tear and load everything, in ten minutes: nothing acknowledged is lost or doubled
	@$(BIN)/python -m tests.faults.run $(ARGS)

up: ## start the service, Prometheus and Grafana in containers
	docker compose --profile $(if $(NVIDIA),gpu,cpu) --profile monitoring up --build --detach --wait

down: ## stop them
	docker compose --profile '*' down

clean: ## remove the environments and every cache
	rm -rf .venv .venv-proto .venv-trl .venv-verl .compat .pytest_cache .ruff_cache .hypothesis .import_linter_cache .schemathesis
	find $(DISTRIBUTIONS) tests benchmarks harness -name __pycache__ -prune -exec rm -rf {} +
	find $(DISTRIBUTIONS) -name '*.egg-info' -prune -exec rm -rf {} +

env: ## install the four distributions into .venv
	+@$(call LOCKED,.venv) $(STAMPS)/env

env-dev: ## the same, and the tools of test, lint and type
	+@$(call LOCKED,.venv) $(STAMPS)/env-dev

env-proto: ## install the protobuf generators into .venv-proto
	+@$(call LOCKED,.venv-proto) .venv-proto/.stamp

env-trl: env-dev ## install TRL beside .venv, whose torch and transformers it uses
	+@$(call LOCKED,.venv-trl) .venv-trl/.stamp

SDKS := 0.25.0 0.29.0 0.34.0 0.36.0 0.38.0
env-compat: env-dev ## install SDKs of the Tinker API, a folder each
	+@$(call LOCKED,.compat) $(SDKS:%=.compat/tinker-%/.stamp)

# A newer cookbook, for recipes that do without the library of renderers that it asks for.
COOKBOOK := 0.6.1
env-cookbook: env-trl env-compat ## install the cookbook of the Tinker API beside them
	+@$(call LOCKED,.compat) .compat/cookbook/.stamp .compat/cookbook-$(COOKBOOK)/.stamp

env-verl: env-dev ## install verl beside .venv, whose torch and transformers it uses
	+@$(call LOCKED,.venv-verl) .venv-verl/.stamp

define REQUIRE_PYTHON
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "make: Ratoon needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
    "say which one: make PYTHON=python3.11 TARGET" >&2; exit 1; }
endef

$(STAMPS)/venv:
	$(REQUIRE_PYTHON)
	@$(PYTHON) -m venv .venv
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/env: $(STAMPS)/venv $(PYPROJECTS) constraints.txt
	@echo "make: installing Ratoon into .venv: minutes, once (sizes: README.md)"
	@$(if $(or $(UV),$(OTHER_TORCH)),$(PIP) --no-deps $(OTHER_TORCH) -c constraints.txt torch)
	@$(INSTALL) -c constraints.txt $(DISTRIBUTIONS:%=-e ./%)
	@touch $@

$(STAMPS)/env-dev: $(STAMPS)/env requirements-dev.txt
	@$(INSTALL) -c constraints.txt -r requirements-dev.txt
	@touch $@

# Without their dependencies: those of TRL and verl are in .venv, but for those that the files name.
.venv-trl/.stamp .venv-verl/.stamp: .venv-%/.stamp: requirements-%.txt
	@$(INSTALL) --no-deps --upgrade --target .venv-$* -r $<
	@touch $@

.compat/tinker-%/.stamp: requirements-compat.txt
	@$(INSTALL) --no-deps --upgrade --target $(@D) tinker==$* -r $<
	@touch $@

.compat/cookbook/.stamp: requirements-cookbook.txt
	@$(INSTALL) --no-deps --upgrade --target $(@D) -r $<
	@touch $@

.compat/cookbook-%/.stamp:
	@$(PIP) --no-deps --upgrade --target $(@D) tinker-cookbook==$*
	@touch $@

.venv-proto/.stamp: requirements-proto.txt
	$(REQUIRE_PYTHON)
	@$(PYTHON) -m venv .venv-proto
	@.venv-proto/bin/python -m pip --disable-pip-version-check install -q -r $<
	@touch $@
