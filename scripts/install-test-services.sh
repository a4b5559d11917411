#!/usr/bin/env bash
# Install what tests talk to, Prometheus (with promtool), PostgreSQL and the browser Chromium, from
# Debian's packages.
# Where that cannot be done the tests that need them skip; with CI set this fails instead.
set -euo pipefail

# Debian starts a daemon when it installs one; the tests start their own on free ports.
no_daemons() {
  local policy=/usr/sbin/policy-rc.d
  [ -e "$policy" ] && return
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f /usr/sbin/policy-rc.d' EXIT
}

# The program that says whether a package is there, the newest one first; nothing where it is not.
program() {
  case $1 in
    prometheus | chromium) command -v "$1" || true ;;
    # Debian keeps PostgreSQL's programs out of PATH, in a folder for each major version.
    postgresql) { ls /usr/lib/postgresql/*/bin/postgres 2>/dev/null || command -v postgres || true; } | sort -rV | head -n 1 ;;
  esac
}

missing=()
for package in prometheus postgresql chromium; do
  [ -n "$(program "$package")" ] || missing+=("$package")
done

if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test services: installing ${missing[*]}"
    no_daemons
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends "${missing[@]}"; } >/dev/null ||
      echo "test services: apt-get could not install ${missing[*]}" >&2
  else
    echo "test services: missing; on Debian, as root: apt-get install ${missing[*]}" >&2
  fi
fi

for package in prometheus postgresql chromium; do
  found=$(program "$package")
  if [ -n "$found" ]; then
    echo "test services: $("$found" --version 2>&1 | grep -m 1 '[0-9]\.[0-9]')"
  elif [ -n "${CI:-}" ]; then
    echo "test services: $package is required in CI" >&2
    exit 1
  else
    echo "test services: tests that need $package will skip"
  fi
done
