#!/usr/bin/env bash
# Makes the environment of `make test-sglang`. SGLang's wheel is built for CUDA: its kernels are left
# out, and tests/sglang_runs/shim stands in for them.
#   scripts/sglang_env.sh 0.5.23
venv=${SGLANG_VENV:-.venv-sglang}
package=sglang
. "$(dirname "$0")/engine_env.sh"

# Packages that one version needs in another release than the shared one.
version_extras() {
  case $1 in
    0.5.15) "${pip[@]}" --no-deps --target "$2" \
      'transformers==5.12.1' 'tokenizers==0.22.2' 'xgrammar==0.2.1' 'llguidance==0.7.30' 'openai==2.6.1' ;;
  esac
}

shared_packages() {
  "${pip[@]}" -c "$venv/torch.txt" \
    'transformers==5.19.0' 'tokenizers==0.23.2' 'compressed-tensors==0.18.0' 'xgrammar==0.2.7' \
    'llguidance>=1.7.6,<2' 'openai==2.8.0' 'openai-harmony==0.0.4' 'outlines==0.1.11' \
    'apache-tvm-ffi==0.1.11' 'numba==0.65.1' 'soundfile==0.13.1' 'blobfile==3.0.0' 'anthropic' \
    'aiohttp' 'datasets' 'distro' 'easydict' 'einops' 'fastapi' 'gguf' 'interegular' 'IPython' \
    'msgspec' 'ninja' 'numpy' 'nvidia-ml-py' 'orjson' 'packaging' 'partial_json_parser' 'pillow' \
    'prometheus-client' 'psutil' 'py-spy' 'pybase64' 'pydantic' 'python-dateutil' \
    'python-multipart' 'pyzmq>=25.1.2' 'regex' 'requests' 'scipy' 'sentencepiece' 'setproctitle' \
    'tiktoken' 'tqdm' 'uvicorn' 'uvloop' 'watchfiles' 'xxhash' 'zstandard'
  "${pip[@]}" --no-deps 'torchvision==0.28.*'
}

make_environment "$@"
