#!/usr/bin/env bash
# Writes constraints/*.txt: the newest versions that the wide ranges allow, for Python 3.10 to 3.13,
# but torch, which TORCH chooses. Needs uv in the environment of $1.
#   scripts/lock.sh .venv/bin/python
set -euo pipefail
cd "$(dirname "$0")/.."
uv=("$1" -m uv --quiet pip compile --universal --upgrade --no-header --no-annotate --no-emit-index-url)
torch=$(mktemp)
trap 'rm -f "$torch"' EXIT
echo "${TORCH:-torch==2.13.0}" >"$torch"

lock() { # NAME EXTRA...
  local name=$1 extras=()
  shift
  for extra in "$@"; do extras+=(--extra "$extra"); done
  local sources=(pyproject.toml)
  [ -f "constraints/$name.in" ] && sources+=("constraints/$name.in")
  "${uv[@]}" --python-version "$python" --constraint "$torch" --no-emit-package torch \
    "${extras[@]}" "${sources[@]}" -o "constraints/$name.txt"
  # Packages of CUDA come with torch alone, whose version is not pinned here.
  sed -i -E '/^(nvidia-(cu|nccl|nvs|nvj)|cuda-)/d' "constraints/$name.txt"
  echo "constraints/$name.txt: $(grep -c == "constraints/$name.txt") pins"
}

python=3.10
lock dev dev
lock bench bench
lock trainers server
lock vllm server
lock sglang server
