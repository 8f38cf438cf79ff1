#!/usr/bin/env bash
# Makes the environment of `make test-trainers`: torch for the CPU and the trainers' packages,
# without those for a GPU or a cluster.
#   scripts/trainers_env.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${TRAINERS_VENV:-.venv-trainers}
torch=${TORCH:-torch==2.13.0}
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

ready=$venv/.ready
[ "$ready" -nt "$0" ] && [ "$ready" -nt pyproject.toml ] && exit
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import torch' 2>/dev/null || "${pip[@]}" "$torch"
"${pip[@]}" -e '.[server]' pytest pytest-asyncio pytest-timeout hypothesis 'transformers>=5.17' \
  numpy packaging ray tensordict omegaconf hydra-core codetiming orjson pillow datasets cachetools \
  uvicorn fastapi jaxtyping loguru
# Their own lists of dependencies are several times as long, and contradict each other: above are the
# packages that the tested modules import.
"${pip[@]}" --no-deps 'megatron-core==0.16.1' 'verl==0.9.1' 'skyrl==0.3.0'
touch "$ready"
