# The two commands are `make demo` and `make test`. Everything else stands beside them.
# Each target installs what it needs into .venv; nothing has to be there before but Python and make.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
# The CPU build; use your own torch by installing it into $(VENV) first.
TORCH  ?= torch==2.13.0

.PHONY: demo test check check-full lint bench test-exact test-mutations test-install test-trainers \
	test-vllm test-vllm-scheduler test-faults test-docker test-loaded bench-vllm experts-report proto \
	clean

demo: $(VENV)/.demo
	$(PY) examples/demo.py

# One thread a worker: matrices this small leave more waiting for each other.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

# The gate: what each change passes before it lands, in at most 20 minutes on two cores.
check:
	$(PYTHON) scripts/check.py gate

# Every target, at the shares that a release is judged by; goes on after a failure, ends with a table.
check-full:
	$(PYTHON) scripts/check.py full

# The tests beside two processes that never rest: none may depend on the speed of the machine.
test-loaded: $(VENV)/.dev
	$(PY) scripts/loaded.py $(MAKE) test

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pyright --pythonpath $(PY)

# At least CELLS cells, compared one by one with what simulated engines did; see tests/oracle. Seeds
# are printed: `make test-exact SEED=17 WORLD=socket ONCE=--once` makes that run again.
SEED  ?= 1
CELLS ?= 10000000
WORLD ?= both
test-exact: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m oracle \
		$(if $(SEED),--seed $(SEED)) --cells $(CELLS) --world $(WORLD) $(ONCE)

# Breaks the code in many ways and shows that the oracle sees each one.
test-mutations: $(VENV)/.dev
	PYTHONPATH=tests $(PY) -m oracle.mutations

# Real processes on loopback, and what can happen to them: kill -9, torn files, flipped bits, cut
# networks, full disks, 10,000 readers, hostile bytes. FAULTS=full brings the figures of tests/faults;
# `make test-faults SCENARIO=kill SEED=7` makes one run again.
FAULTS ?= ci
test-faults: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m faults \
		--share $(FAULTS) $(if $(SEED),--seed $(SEED)) $(SCENARIO:%=--scenario %)

# Builds the images and runs the compose file for real, with Docker or podman. DOCKER=--where-possible
# says so, and does not fail, where a machine can not run containers at all.
DOCKER ?=
test-docker:
	$(PYTHON) tests/docker/run.py $(DOCKER)

# Builds the wheel and installs it bare, with each extra, and beside old and new protobuf and grpcio.
test-install: $(VENV)/.dev
	$(PY) -m pytest -m install

# Real vLLM engines on the CPU, with tiny models, in an environment of their own; see
# tests/vllm_runs. `make test-vllm SCENARIO=prefix VLLM=0.30.0 WAY=plugin` runs a part, SHARE=--share
# the share of `make check-full`.
VLLM      ?= 0.30.0 0.32.0
VLLM_VENV ?= .venv-vllm
SCENARIO  ?=
SHARE     ?=
WAY       ?=
test-vllm:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh $(VLLM)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m vllm_runs \
		--installed $(VLLM_VENV) $(VLLM:%=--version %) $(SCENARIO:%=--scenario %) $(SHARE) \
		$(WAY:%=--way %)

# vLLM's own scheduler with a fake model: ROWS rows for each version, each compared.
ROWS ?= 1000000
test-vllm-scheduler:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh $(VLLM)
	for version in $(VLLM); do \
		PYTHONPATH=$(VLLM_VENV)/$$version:tests OMP_NUM_THREADS=1 \
			$(VLLM_VENV)/bin/python -m vllm_runs.scheduler --rows $(ROWS) --seed $(SEED) || exit 1; \
	done

# Megatron-Core and verl as they are published, on the CPU: rows in every layout, compared with what
# they must be; see tests/trainer_runs.
TRAINERS_VENV ?= .venv-trainers
test-trainers:
	PYTHON=$(PYTHON) TRAINERS_VENV=$(TRAINERS_VENV) TORCH='$(TORCH)' scripts/trainers_env.sh
	OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m pytest -q -W ignore tests/trainer_runs
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m trainer_runs

# Everything that is measured, beside rivals and limits, in an environment of its own (it holds Ray,
# Redis' client and Arrow); redis-server is used where it is installed. BENCH=--quick shows that it
# runs; `make bench BENCH=codec` measures one area.
BENCH_VENV ?= .venv-bench
BENCH      ?=
bench: $(BENCH_VENV)/.bench
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench.py $(BENCH)

# What capture costs vLLM, beside none and vLLM's own return.
bench-vllm:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh 0.30.0
	PYTHONPATH=$(VLLM_VENV)/0.30.0 $(VLLM_VENV)/bin/python benchmarks/vllm_cost.py

# Makes the pictures and tables of docs/experts.md again, from the recordings beside the repository.
# REPORT='--quick --out DIR' shows that it runs.
REPORT ?=
experts-report: $(VENV)/.figures
	OMP_NUM_THREADS=1 $(PY) benchmarks/experts_report.py $(REPORT)

# Regenerates the committed stubs.
proto:
	scripts/gen_proto.sh

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml | $(VENV)/bin/python
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'
	$(PIP) -e '.[server]' 'transformers>=5'
	touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/bin/python
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) '$(TORCH)'
	$(PIP) -e '.[dev]'
	touch $@

$(VENV)/.figures: pyproject.toml | $(VENV)/bin/python
	$(PIP) -e '.[figures]'
	touch $@

$(BENCH_VENV)/.bench: pyproject.toml
	[ -x $(BENCH_VENV)/bin/python ] || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -c 'import torch' 2>/dev/null || \
		$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(TRAINERS_VENV) $(BENCH_VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
