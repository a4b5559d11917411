#!/usr/bin/env bash
# Install the services that tests talk to: Prometheus, from Debian's package.
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

if ! command -v prometheus >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "test services: installing prometheus"
    no_daemons
    export DEBIAN_FRONTEND=noninteractive
    { apt-get -qq update && apt-get -qq install -y --no-install-recommends prometheus; } >/dev/null ||
      echo "test services: apt-get could not install prometheus" >&2
  else
    echo "test services: prometheus is missing; on Debian, as root: apt-get install prometheus" >&2
  fi
fi

if command -v prometheus >/dev/null; then
  echo "test services: $(prometheus --version 2>&1 | head -n 1)"
elif [ -n "${CI:-}" ]; then
  echo "test services: prometheus is required in CI" >&2
  exit 1
else
  echo "test services: tests that need prometheus will skip"
fi
