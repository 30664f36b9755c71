#!/usr/bin/env bash
# Installs the servers and the browser that the tests start, and packages that are named, from Debian's
# packages, where missing.
set -euo pipefail
missing=()
command -v redis-server >/dev/null || missing+=(redis-server)
compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || missing+=(postgresql)
command -v dnsmasq >/dev/null || missing+=(dnsmasq-base)
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v systemd-analyze >/dev/null || missing+=(systemd)
command -v chromium-headless-shell >/dev/null || missing+=(chromium-headless-shell)
command -v nginx >/dev/null || missing+=(nginx-light)
command -v caddy >/dev/null || missing+=(caddy)
command -v podman >/dev/null || missing+=(podman runc conmon netavark uidmap)
command -v docker-registry >/dev/null || missing+=(docker-registry)
# The smallest font with Chinese, for screenshots.
compgen -G '/usr/share/fonts/truetype/wqy/*' >/dev/null || missing+=(fonts-wqy-microhei)
# The collector of traces, which is in .venv/, loads the interpreter's library; Debian's Python has
# that in a package of its own.
libdir=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_config_var("LIBDIR"))')
LD_LIBRARY_PATH=$libdir "$(echo .venv/lib/python3.*/site-packages/rotel/rotel-agent)" version >/dev/null 2>&1 ||
    missing+=("lib$(basename .venv/lib/python3.*)")
# The image's first step is pip's, and its Python is that of .venv/ in the tests.
"$(readlink -f .venv/bin/python)" -c 'import pip' 2>/dev/null || missing+=(python3-pip)
for package in "$@"; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
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
