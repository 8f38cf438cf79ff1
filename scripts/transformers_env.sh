#!/usr/bin/env bash
# Puts versions of transformers into folders of their own, of which PYTHONPATH chooses one, beside
# the torch of the environment of `make test`. "newest" is the newest of the index.
#   scripts/transformers_env.sh 5.17.0 newest
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${TRANSFORMERS_DIR:-.venv-transformers}
numpy=$("$python" -c 'import numpy; print(numpy.__version__)') # beside torch

for version in "$@"; do
  [ "$version" = newest ] || [ ! -d "$folder/$version" ] || continue
  rm -rf "$folder/$version" "$folder/$version.part"
  wanted=transformers==$version
  [ "$version" = newest ] && wanted=transformers
  "$python" -m pip install --quiet --disable-pip-version-check --target "$folder/$version.part" \
    "$wanted" "numpy==$numpy"
  mv "$folder/$version.part" "$folder/$version"
done
