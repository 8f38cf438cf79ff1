#!/usr/bin/env bash
# Installs packages into the environment of a Python: with uv, which takes a tenth of pip's time; with
# pip where uv cannot be installed or cannot reach what pip is configured to reach.
#   scripts/install.sh .venv/bin/python --quiet -c constraints/dev.txt -e '.[dev]'
set -euo pipefail
python=$1
shift
pip=("$python" -m pip --disable-pip-version-check install)
pins=() # of uv itself
[ -z "${PINS-yes}" ] || pins=(-c "$(dirname "$0")/../constraints/dev.txt")

if "$python" -m uv --version >/dev/null 2>&1 || "${pip[@]}" --quiet "${pins[@]+"${pins[@]}"}" uv; then
  "$python" -m uv pip install --python "$python" "$@" && exit
  echo "uv failed: installing with pip" >&2
fi
exec "${pip[@]}" "$@"
