# shellcheck shell=bash
# Finds interpreters for .venv/. Sourced by setup.sh, from the root of the repository.

# Prints candidate commands: the preferred version first, then in the order of PATH.
list_interpreters() {
    local name
    for name in python3.11 python3.12 python3.13 python3; do
        PATH=$PATH:/usr/bin:/usr/local/bin type -aP "$name" || true
    done | awk '!seen[$0]++'
}

# Prints rank, executable, version and traits of one interpreter; fails if it cannot be used.
describe_interpreter() {
    "$1" -I deploy/interpreter.py 2>/dev/null </dev/null
}

# Prints the description of each usable interpreter once, best first.
rank_interpreters() {
    local command
    for command in "$@"; do
        describe_interpreter "$command" || true
    done | awk -F '\t' '!seen[$2]++' | sort -s -n -k 1,1
}

# Prints the first interpreter that has pip, which is a separate package in Debian.
find_pip() {
    local command
    for command in "$@"; do
        if "$command" -c 'import pip' >/dev/null 2>&1 </dev/null; then
            echo "$command"
            return
        fi
    done
    return 1
}
