# One entry point for everything: `make help`. CI calls only these targets.
#
# Variables: PYTHON (a Python 3.11), PIP_ARGS (extra index or folder of wheels), NPROC (trainer ranks),
# EXPERIMENT, ARGS (passed to the command), PYTEST_ARGS, PART (of the benchmarks).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# One thread per process: trainer, engine and actors share the cores, and OpenMP barriers spin when they do.
export OMP_NUM_THREADS ?= 1
# A run has half a dozen processes that import the package: it is compiled once and kept, not compiled in each.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

find_python = $(shell for p in $(1); do "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != ($(2)))' \
	2>/dev/null && { command -v "$$p"; break; }; done)
PYTHON ?= $(call find_python,python3.11 python3,3$(comma)11)
COMPAT_PYTHON ?= $(call find_python,python3.12 python3,3$(comma)12)
comma := ,

PIP_ARGS ?=
NPROC ?= 1
EXPERIMENT ?= megatron_40step
ARGS ?=
PYTEST_ARGS ?=
PART ?= step_time refit_time whole_run logprob_memory

BIN := .venv/bin
REQUIREMENTS := requirements/cpu.txt requirements/cpu-nodeps.txt requirements/dev.txt
COMPAT_REQUIREMENTS := requirements/cpu.txt requirements/compat-nodeps.txt requirements/dev.txt
# The stamp's name carries a hash of what was installed: set-up runs again exactly when that changes, and not when a
# checkout only touches the files.
hash = $(shell cat $(1) setup.py | sha256sum | cut -c1-16)
STAMP := .venv/.setup-$(call hash,$(REQUIREMENTS))
COMPAT_STAMP := .venv-compat/.setup-$(call hash,$(COMPAT_REQUIREMENTS))

# Any free port of the loopback interface, so that two runs on one machine do not meet.
TORCHRUN = $(BIN)/python scripts/launch.py --nproc-per-node=$(NPROC) --master-port=0

# install VENV PYTHON VERSION NODEPS-FILE NAME-OF-PYTHON-VARIABLE
define install
	@if ! $(1)/bin/python -c 'import sys; sys.exit(sys.version_info[:2] != ($(3)))' 2>/dev/null; then \
		if [ -z "$(2)" ]; then \
			echo "No Python $(subst $(comma),.,$(3)) found. Install it, or name one: make $(5)=/path/to/python ..." >&2; exit 1; \
		fi; \
		echo "Creating $(1) with $(2)"; \
		"$(2)" -m venv --clear $(1) || { echo "$(2) cannot create a virtual environment; Debian and Ubuntu have that in the package python3-venv" >&2; exit 1; }; \
	fi
	@echo "Installing into $(1): about 2.4 GB, or 5.4 GB when pip finds the CUDA build of torch. This takes minutes."
	@rm -f $(1)/.setup-*
	$(1)/bin/python -m pip install --quiet $(PIP_ARGS) -r requirements/cpu.txt -r requirements/dev.txt
	$(1)/bin/python -m pip install --quiet $(PIP_ARGS) --no-deps -r $(4)
	$(1)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	@$(1)/bin/python -c 'import torch; print("torch", torch.__version__, "CUDA build" if torch.version.cuda else "CPU build")'
	@echo "$$(du -sh $(1) | cut -f1) in $(1)"
endef

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

.PHONY: setup
setup: $(STAMP) ## make .venv with the pinned CPU set (once; again when requirements/ changes)

$(STAMP):
	$(call install,.venv,$(PYTHON),3$(comma)11,requirements/cpu-nodeps.txt,PYTHON)
	@touch $@

# The check comes first by itself: torchrun would add its own traceback to the one message on bad input.
.PHONY: train
train: setup ## set up, then train: EXPERIMENT (megatron_40step), NPROC (1), ARGS for overrides
	@$(BIN)/python scripts/check_config.py +experiment=$(EXPERIMENT) $(ARGS) --world-size $(NPROC)
	@echo "torchrun --nproc-per-node=$(NPROC) scripts/train_async_ppo.py +experiment=$(EXPERIMENT) $(ARGS)"
	@$(TORCHRUN) scripts/train_async_ppo.py +experiment=$(EXPERIMENT) $(ARGS)

.PHONY: train-smollm2
train-smollm2: ## the same with SmolLM2-135M-Instruct on chain_sum, 3 steps
	@$(MAKE) --no-print-directory train EXPERIMENT=smollm2_135m_chain_sum

.PHONY: unit
unit: setup ## unit tests: no Ray, vLLM or Megatron, under 2 minutes
	$(BIN)/python -m pytest tests/unit $(PYTEST_ARGS)

.PHONY: test
test: setup ## unit and functional tests: real processes, under 25 minutes on 2 cores
	@$(BIN)/python -m pytest tests/unit tests/functional $(PYTEST_ARGS)

.PHONY: test-long
test-long: setup ## the slow tests that CI leaves out
	$(BIN)/python -m pytest -m slow tests/unit tests/functional $(PYTEST_ARGS)

.PHONY: proof
proof: setup ## seeds, variants, broken trainers, kills as real runs, into docs/runs.md; continues where it stopped
	$(BIN)/python tests/proof/run_proof.py $(ARGS)

.PHONY: lint
lint: setup ## ruff, mypy --strict on the core, import contracts, spelling, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python scripts/make_config_docs.py --check

.PHONY: format
format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: docs
docs: setup ## generate docs/configuration.md and conf/ defaults from the schema
	$(BIN)/python scripts/make_config_docs.py

.PHONY: doctor
doctor: setup ## examine this machine and the environment
	$(BIN)/python scripts/doctor.py

.PHONY: bench
bench: setup ## step time, refit time, memory of a whole run and of log-probs: PART (all), ARGS with a single PART
	@for part in $(PART); do $(BIN)/python -m benchmarks.$$part $(ARGS); done

.PHONY: compat
compat: $(COMPAT_STAMP) ## the tests under Python 3.12 and megatron-core 0.19.2, in .venv-compat
	.venv-compat/bin/python -m pytest tests/unit tests/functional $(PYTEST_ARGS)

$(COMPAT_STAMP):
	$(call install,.venv-compat,$(COMPAT_PYTHON),3$(comma)12,requirements/compat-nodeps.txt,COMPAT_PYTHON)
	@touch $@

.PHONY: clean
clean: ## remove the environments and caches; runs in outputs/ stay
	rm -rf .venv .venv-compat .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
