# Everything here needs only Python (>= 3.11) and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
CPU8   := JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
# A training step on CPU devices asks for the same memory as the last; the kernel need not clear it each time (glibc).
KEEP   := MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184

.PHONY: help demo demo-memorization demo-generate demo-serve demo-sft demo-train demo-needle test test-newest test-all test-sources test-aot test-aot-ci golden golden-compiled docs lint lint-quick quick clean soak fuzz

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

$(BIN)/.core: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -U pip
	$(BIN)/python -m pip install -q -e .
	@touch $@

$(BIN)/.dev: pyproject.toml $(BIN)/.core
	$(BIN)/python -m pip install -q -e '.[test,judges,clients,lint,plan,plan-gpu,tensorboard,serve,remote]'
	@touch $@

demo: $(BIN)/.core  ## score real text with a real model on 8 virtual CPU devices
	$(CPU8) $(BIN)/python -m levanter.main.eval_lm --config_path config/eval/demo.yaml
	@echo "The environment is $(VENV). To use it: source $(BIN)/activate"

demo-memorization: $(BIN)/.core  ## a model learns half a text; the report shows which half (<= 5 minutes)
	JAX_PLATFORMS=cpu $(BIN)/python -m levanter.main.demo_memorization

demo-generate: $(BIN)/.core  ## a model answers three questions, greedy and sampled, with its plan and as int8 (<= 90 s)
	JAX_PLATFORMS=cpu $(BIN)/python -m levanter.main.demo_generate --config_path config/generate/demo.yaml --inference.max_rows 1

$(BIN)/.serve: pyproject.toml $(BIN)/.core
	$(BIN)/python -m pip install -q -e '.[serve]' openai
	@touch $@

demo-serve: $(BIN)/.serve  ## a model over HTTP, asked by curl and by the openai package, then stopped (<= 60 s)
	JAX_PLATFORMS=cpu $(BIN)/python -m levanter.main.demo_serve --config_path config/serve/demo.yaml

demo-sft: $(BIN)/.core  ## a model learns from conversations, by adapters; it answers before and after (<= 4 minutes)
	rm -rf logs/demo_sft
	$(KEEP) JAX_PLATFORMS=cpu $(BIN)/python -m levanter.main.demo_sft --config_path config/lora/demo.yaml

demo-train: $(BIN)/.dev  ## train a small model on 8 virtual CPU devices, export it, let transformers write (<= 5 minutes)
	rm -rf logs/demo_train
	$(KEEP) $(CPU8) $(BIN)/python -m levanter.main.demo_train --config_path config/train/demo.yaml
	$(CPU8) $(BIN)/python tests/parity/generate_from_export.py logs/demo_train/hf/demo/step-*

demo-needle: $(BIN)/.core  ## a model that finds needles in 512 tokens learns to find them in 2,048 (<= 4 minutes)
	rm -rf logs/demo_needle
	$(KEEP) JAX_PLATFORMS=cpu $(BIN)/python -m levanter.main.demo_needle --config_path config/needles/demo.yaml

QUICK = $$(grep -rlE 'mark\.quick' tests --include='test_*.py')
quick: $(BIN)/.dev  ## tests marked `quick`, of every package (<= 90 CPU seconds)
	$(BIN)/python -m pytest -q -m 'quick and not slow' $(QUICK)

test: $(BIN)/.dev  ## everything that needs no accelerator (<= 20 minutes on 2 cores)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not slow and not aot and not sources'

# The newest Python that is installed, by its name or by pyenv; without one of 3.12 or newer there is nothing to test.
NEWEST_PYTHON ?= $(shell for minor in 13 12; do for python in python3.$$minor $$HOME/.pyenv/versions/3.$$minor.*/bin/python3; do \
	$$python -c "import ensurepip, sys; assert sys.version_info[:2] == (3, $$minor)" 2>/dev/null && echo $$python && exit; done; done)
NEWEST := $(VENV)-newest
$(NEWEST)/.core: pyproject.toml
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q -U pip
	$(NEWEST)/bin/python -m pip install -q -e '.[test-core,plan,plan-gpu,tensorboard,serve,harness,remote]'
	@touch $@

test-newest: $(BIN)/.dev  ## the newest Python and JAX: `quick`, transformers' results, plans, the demo (<= 9 minutes)
ifeq ($(NEWEST_PYTHON),)
	@echo "SKIPPED test-newest: no Python 3.12 or 3.13 is installed"
else
	$(MAKE) $(NEWEST)/.core VENV=$(VENV)
	$(NEWEST)/bin/python -c "import jax, sys; print('Python', sys.version.split()[0], 'and jax', jax.__version__)"
	references=$$(mktemp -d) && \
	JAX_PLATFORMS=cpu $(BIN)/python tests/parity/write_references.py $$references && \
	REFERENCES=$$references $(NEWEST)/bin/python -m pytest -q -n $(JOBS) -m 'not slow' tests/parity/check_references.py && \
	rm -r $$references
	$(NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m 'quick and not slow' $(QUICK)
	JAX_PLATFORMS=cpu $(NEWEST)/bin/python -m levanter.main.plan train_lm --config_path config/train/llama_100m_v6e-8.yaml --target v6e-8,h100x8
	$(CPU8) $(NEWEST)/bin/python -m levanter.main.eval_lm --config_path config/eval/demo.yaml
endif

test-all: $(BIN)/.dev  ## with the sweeps (<= 60 minutes)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m 'not aot and not sources'

test-sources: $(BIN)/.dev  ## what reads the source code of transformers; for a new version of it
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m sources tests/parity/test_every_field.py

test-aot: $(BIN)/.dev  ## what compiles with the real compilers of TPUs and GPUs, without either (80 CPU minutes)
	$(BIN)/python -m pytest -q -m aot

test-aot-ci: $(BIN)/.dev  ## about fifteen of these compiles, at full depth (<= 10 minutes)
	$(BIN)/python -m pytest -q -m 'aot and ci'

golden: $(BIN)/.dev  ## write tests/golden and pasted output in docs anew; review the diff (<= 5 minutes)
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q -m 'golden and not aot and not slow'

golden-compiled: $(BIN)/.dev  ## the same for what takes the TPU compiler, or minutes (25 CPU minutes)
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q -m 'golden and (aot or slow)'
	$(BIN)/python tests/aot/make_golden_hlo.py

$(BIN)/.docs: pyproject.toml $(BIN)/.core
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

SOAK_MINUTES ?= 30
soak: $(BIN)/.dev  ## runs under signals, full and slow disks, damage, lost peers; the report goes to docs (30 minutes)
	cd tests && PYTHONPATH=$(CURDIR)/tests:$(CURDIR) $(abspath $(BIN))/python -m soak --minutes $(SOAK_MINUTES) --report $(CURDIR)/docs/reliability.md

docs: $(BIN)/.docs  ## the documents as a site, in site/; a broken link or a page that nothing lists is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --clean

lint: $(BIN)/.dev  ## ruff, pyright, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

lint-quick: $(BIN)/.dev  ## ruff and import contracts, without pyright (<= 15 s)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache

fuzz: $(BIN)/.dev  ## damaged and senseless input of every kind, by a seed (SEED=… COUNT=… KINDS=records,templates; 300 in <= 10 minutes)
	JAX_PLATFORMS=cpu $(BIN)/python tests/attacks/fuzz.py --seed $(or $(SEED),0) --count $(or $(COUNT),300) $(if $(KINDS),--kinds $(KINDS))
