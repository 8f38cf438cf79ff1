#!/usr/bin/env bash
# Installs torch into an environment that has none: the CPU build of PyTorch's own index on Linux,
# which is a tenth of the default one with CUDA; the default index elsewhere, where TORCH_INDEX is
# empty, and where that index cannot be reached. A torch that can be imported is kept.
#   scripts/torch_env.sh .venv/bin/python
set -euo pipefail
python=$1
torch=${TORCH:-torch==2.13.0}
index=${TORCH_INDEX-https://download.pytorch.org/whl/cpu}

version() { "$python" -c 'import torch; print(torch.__version__)' 2>/dev/null; }

reachable() {
  "$python" - "$1" <<'PYTHON' 2>/dev/null
import sys
import urllib.request

urllib.request.urlopen(sys.argv[1].rstrip("/") + "/torch/", timeout=5).close()
PYTHON
}

if found=$(version); then
  echo "torch $found is installed already: kept"
  exit
fi
# The files of an interrupted installation would count as installed.
"$python" -m pip uninstall --quiet --yes --disable-pip-version-check torch 2>/dev/null

from=()
if [ -z "$index" ] || [ "$(uname -s)" != Linux ]; then
  echo "Installing $torch from the default index: on Linux up to 3 GB with CUDA, else 100 MB"
elif reachable "$index"; then
  echo "Installing $torch for the CPU: 200 MB, a minute at 30 Mbit/s (TORCH_INDEX= takes CUDA)"
  from=(--index-url "$index")
else
  echo "$index cannot be reached within 5 s: installing $torch from the default index, which on" \
    "Linux is the build with CUDA, up to 3 GB"
fi
"$python" -m pip install --disable-pip-version-check "${from[@]+"${from[@]}"}" "$torch"
echo "torch $(version) is installed"
