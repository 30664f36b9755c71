#!/usr/bin/env bash
# Installs the servers that the tests start on free ports, from Debian's packages, where missing.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
[ ${#missing[@]} -gt 0 ] || exit 0
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
printf '\033[2m[setup]\033[0m installing %s\n' "${missing[*]}" >&2
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || {
    echo "The tests need ${missing[*]}: install them with this machine's package manager." >&2
    exit 1
}
