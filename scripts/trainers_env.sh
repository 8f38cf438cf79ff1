#!/usr/bin/env bash
# Makes the environment of `make test-trainers`: torch for the CPU and the trainers' packages,
# without those for a GPU or a cluster. PINS= leaves the versions of constraints/ out.
#   scripts/trainers_env.sh
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${TRAINERS_VENV:-.venv-trainers}
torch=${TORCH:-torch==2.13.0}
install=(scripts/install.sh "$venv/bin/python" --quiet)

ready=$venv/.ready
[ -f "$ready" ] && [ -z "$(find "$0" pyproject.toml constraints/trainers.* -newer "$ready")" ] && exit
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/python" -m pip install --quiet "$torch"
"${install[@]}" ${PINS--c constraints/trainers.txt} -r constraints/trainers.in -e '.[server]'
"${install[@]}" --no-deps 'megatron-core==0.16.1' 'verl==0.9.1' 'skyrl==0.3.0'
touch "$ready"
