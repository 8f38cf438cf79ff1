# Sourced by vllm_env.sh and sglang_env.sh: makes one venv with the packages that the given versions
# of an engine have in common, and a folder for each version in it, of which PYTHONPATH chooses one.
#
# The caller sets `venv`, `package` and `list` (constraints/$list.in has the packages in common, .txt
# their versions, which PINS= leaves out), and defines two functions:
#   version_extras VERSION FOLDER   installs what this version alone needs into its folder
#   more_packages                   installs what is not in the list
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TORCH:-torch==2.13.0}
install=(scripts/install.sh "$venv/bin/python" --quiet)

install_version() {
  [ -d "$venv/$1" ] && return 0
  rm -rf "$venv/$1.part"
  "${install[@]}" --no-deps --target "$venv/$1.part" "$package==$1"
  version_extras "$1" "$venv/$1.part"
  mv "$venv/$1.part" "$venv/$1"
}

install_shared() {
  local ready=$venv/.shared lists=constraints/$list pins=constraints/$list.txt
  [ -f "$ready" ] && [ -z "$(find "$0" pyproject.toml "$lists".* -newer "$ready")" ] && return
  "$venv/bin/python" -c 'import torch' 2>/dev/null || "$venv/bin/python" -m pip install --quiet "$torch"
  # Newer packages may want another torch. A build of torch for CUDA brings its own triton.
  "$venv/bin/python" -m pip freeze | grep '^torch==' >"$venv/torch.txt"
  if "$venv/bin/python" -m pip show torch | grep -q '^Requires:.*triton'; then
    grep -v '^triton==' "$lists.txt" >"$venv/pins.txt"
    pins=$venv/pins.txt
  fi
  # Installed, not only on the path: engines find plugins by their entry points.
  "${install[@]}" -c "$venv/torch.txt" ${PINS--c "$pins"} -r "$lists.in" -e '.[server]'
  more_packages
  touch "$ready"
}

make_environment() {
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  install_shared
  for version in "$@"; do
    install_version "$version"
  done
}
