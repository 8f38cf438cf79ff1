#!/usr/bin/env bash
# Puts versions of transformers into folders of their own, of which PYTHONPATH chooses one, beside
# the torch of the environment of `make test`.
#   scripts/transformers_env.sh 5.17.0
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=${TRANSFORMERS_DIR:-.venv-transformers}
numpy=$("$python" -c 'import numpy; print(numpy.__version__)') # beside torch

for version in "$@"; do
  [ ! -d "$folder/$version" ] || continue
  rm -rf "$folder/$version.part"
  scripts/install.sh "$python" --quiet --target "$folder/$version.part" \
    "transformers==$version" "numpy==$numpy"
  mv "$folder/$version.part" "$folder/$version"
done
