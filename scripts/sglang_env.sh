#!/usr/bin/env bash
# Makes the environment of `make test-sglang`. SGLang's wheel is built for CUDA: its kernels are left
# out, and tests/sglang_runs/shim stands in for them.
#   scripts/sglang_env.sh 0.5.23
venv=${SGLANG_VENV:-.venv-sglang}
package=sglang list=sglang
. "$(dirname "$0")/engine_env.sh"

# Packages that one version needs in another release than the shared one.
version_extras() {
  case $1 in
    0.5.12) "${install[@]}" --no-deps --target "$2" 'transformers==5.6.0' 'tokenizers==0.22.2' \
      'xgrammar==0.2.0' 'llguidance==0.7.30' 'openai==2.6.1' 'apache-tvm-ffi==0.1.9' ;;
    0.5.15*) "${install[@]}" --no-deps --target "$2" 'transformers==5.12.1' 'tokenizers==0.22.2' \
      'xgrammar==0.2.1' 'llguidance==0.7.30' 'openai==2.6.1' ;;
    0.5.16) "${install[@]}" --no-deps --target "$2" 'transformers==5.12.1' 'tokenizers==0.22.2' \
      'xgrammar==0.2.1' 'openai==2.6.1' ;;
  esac
}

# NIXL moves KV between a prefill and a decode engine.
more_packages() { "${install[@]}" --no-deps 'torchvision==0.28.*' 'nixl==1.5.*' 'nixl-cu12==1.5.*'; }

make_environment "$@"
