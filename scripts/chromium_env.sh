#!/usr/bin/env bash
# Runs a command with the path of a Chromium in CHROMIUM: the one that CHROMIUM names already, one in
# PATH, or Debian's package, which root installs. Without a command, it only installs. Exits with 2
# where there is none, or, after --where-possible, says that the command is left out and exits with 0.
#   CHROMIUM=PATH scripts/chromium_env.sh [--where-possible] [COMMAND...]
set -euo pipefail
where_possible=
[ "${1-}" != --where-possible ] || { where_possible=yes; shift; }

installed() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

# Give up on an unreachable mirror after 10 s.
get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=0 -o Acquire::http::Timeout=10 \
    -o Acquire::https::Timeout=10 -o DPkg::Lock::Timeout=60 "$@" >/dev/null
}

chromium=${CHROMIUM:-$(installed || true)}
if [ -z "$chromium" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  get update || true # the lists that are there may do
  get install -y --no-install-recommends chromium || true
  chromium=$(installed || true)
fi
if [ -z "$chromium" ]; then
  if [ -n "$where_possible" ]; then
    echo "Chromium is not there and cannot be installed here${1+: the tests of the page did not run}"
    exit
  fi
  echo "Chromium is not there and cannot be installed here: expected chromium in PATH;" \
    "apt-get install chromium as root, or make CHROMIUM=PATH" >&2
  exit 2
fi
"$chromium" --version >/dev/null || {
  echo "$chromium does not run: name another one with make CHROMIUM=PATH" >&2
  exit 2
}
[ $# != 0 ] || exit 0
CHROMIUM=$chromium exec "$@"
