#!/usr/bin/env bash
# Makes the environment of one framework in `make test-frameworks`: the framework with all that it
# asks for, in the versions that it allows, and routetrace beside it. Engines for a GPU are left out.
#   scripts/framework_env.sh verl
set -euo pipefail
cd "$(dirname "$0")/.."
name=$1
venv=${VENV:-.venv-$name}
case $name in
  verl) packages=('verl[cpu]==0.9.1') ;;
  # Its extra skyrl-train, without flash-attn, which needs CUDA to be built, and the cluster's parts.
  skyrl) packages=(
    'skyrl==0.3.0' torch==2.11.0 'skyrl-gym==0.4.0' 'ray==2.56.0' 'hydra-core==1.3.2' 'peft==0.18.1'
    loguru tqdm tensorboard func_timeout accelerate torchdata omegaconf 'datasets>=4' tensordict
    jaxtyping polars fastapi uvicorn
  ) ;;
  *) echo "no such framework: $name; expected verl or skyrl" >&2 && exit 2 ;;
esac

ready=$venv/.ready
[ -f "$ready" ] && [ -z "$(find "$0" pyproject.toml -newer "$ready")" ] && exit
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# All at once, so that pip refuses what would not go together.
scripts/install.sh "$venv/bin/python" --quiet "${packages[@]}" -e '.[server]' \
  pytest pytest-asyncio pytest-timeout hypothesis
"$venv/bin/python" -m pip check || true
touch "$ready"
