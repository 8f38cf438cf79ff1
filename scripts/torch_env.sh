#!/usr/bin/env bash
# Installs torch into an environment that has none: on Linux the CPU build, a tenth of the default one
# with CUDA, by uv's --torch-backend; the build of the default index elsewhere, where TORCH_BACKEND is
# empty, and where the index of CPU builds cannot be reached. A torch that can be imported is kept.
#   scripts/torch_env.sh .venv/bin/python
set -euo pipefail
python=$1
torch=${TORCH:-torch==2.13.0}
backend=${TORCH_BACKEND-cpu}
pip=("$python" -m pip --disable-pip-version-check)

version() { "$python" -c 'import torch; print(torch.__version__)' 2>/dev/null; }

if found=$(version); then
  echo "torch $found is installed already: kept"
  exit
fi
# The files of an interrupted installation would count as installed.
"${pip[@]}" uninstall --quiet --yes torch 2>/dev/null

if [ -n "$backend" ] && [ "$(uname -s)" = Linux ] && "${pip[@]}" install --quiet uv; then
  echo "Installing $torch for the CPU: 200 MB, a minute at 30 Mbit/s (TORCH_BACKEND= takes CUDA)"
  if UV_HTTP_RETRIES=0 "$python" -m uv pip install --python "$python" \
    --torch-backend "$backend" "$torch"; then
    echo "torch $(version) is installed"
    exit
  fi
  echo "The index of builds for $backend cannot be reached"
fi
size='100 MB'
[ "$(uname -s)" != Linux ] || size='up to 3 GB, with CUDA'
echo "Installing $torch from the default index: $size"
"${pip[@]}" install "$torch"
echo "torch $(version) is installed"
