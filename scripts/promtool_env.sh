#!/usr/bin/env bash
# Checks that a promtool runs; .promtool/promtool is unpacked from Debian's package prometheus, which
# needs no root and starts no service.
set -euo pipefail
cd "$(dirname "$0")/.."
promtool=$1
[ -x "$promtool" ] || if [ "$promtool" = .promtool/promtool ] && command -v apt-get dpkg-deb >/dev/null; then
  rm -rf .promtool
  mkdir .promtool
  # Without root, the lists are used as they are.
  [ "$(id -u)" != 0 ] || apt-get update -qq || true
  (cd .promtool && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb package) &&
    mv .promtool/package/usr/bin/promtool .promtool/ || true
  rm -rf .promtool/package .promtool/*.deb
fi
"$promtool" --version >/dev/null || {
  echo "$promtool does not run: install Prometheus (apt-get install --no-install-recommends" \
    "prometheus, brew install prometheus), or name one: make test-alerts PROMTOOL=/path/to/promtool" >&2
  exit 2
}
