# The two commands are `make demo` and `make test`. Everything else stands beside them.
# Each target installs what it needs into .venv; nothing has to be there before but Python and make.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --quiet --disable-pip-version-check
# The CPU build; use your own torch by installing it into $(VENV) first.
TORCH  ?= torch==2.13.0

.PHONY: demo test lint bench test-exact test-mutations test-install proto clean

demo: $(VENV)/.demo
	$(PY) examples/demo.py

# One thread a worker: matrices this small leave more waiting for each other.
test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2

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

# Builds the wheel and installs it bare, with each extra, and beside old and new protobuf and grpcio.
test-install: $(VENV)/.dev
	$(PY) -m pytest -m install

bench: $(VENV)/.dev
	$(PY) benchmarks/bench.py

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

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
