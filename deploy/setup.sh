#!/usr/bin/env bash
# Makes .venv/ from nothing but Python 3.11+; a later run that has nothing to do takes no time.
#   deploy/setup.sh        the gateway and vLLM (CUDA build where nvidia-smi finds a GPU)
#   deploy/setup.sh dev    the same and what the tests need
#   deploy/setup.sh uv     only finds or installs uv, and prints where it is
set -euo pipefail
cd "$(dirname "$0")/.."
want=${1:-run}

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
fail() {
    printf '\nSet-up failed while %s.\n  What to do: %s\n' "$1" "$2" >&2
    exit 1
}

find_python() {
    for candidate in "${PYTHON:-}" python3.11 python3.12 python3.13 python3; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "looking for Python" "install Python 3.11, 3.12 or 3.13, or name one: PYTHON=/path/to/python3.11 make setup"
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
    elif [ -x .tools/bin/uv ]; then
        echo "$PWD/.tools/bin/uv"
    else
        say "installing uv into .tools/"
        "$python" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
            --target .tools --upgrade uv >&2 2>.tools.log || {
            cat .tools.log >&2; rm -f .tools.log
            fail "installing uv with pip" "check the network (pip must reach its index), or install uv yourself: https://docs.astral.sh/uv/"
        }
        rm -f .tools.log
        echo "$PWD/.tools/bin/uv"
    fi
}

python=$(find_python)
uv=$(find_uv)
if [ "$want" = uv ]; then echo "$uv"; exit; fi

# uv does not read pip's settings; a machine that has wheels of its own names them there.
find_links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null || true)}}
[ -z "$find_links" ] || export UV_FIND_LINKS=${find_links// /,}

if nvidia-smi >/dev/null 2>&1; then build=gpu; else build=cpu; fi

files=("requirements/$build.txt")
[ "$want" != dev ] || files+=("requirements/dev.txt")

stamp_of() { cat pyproject.toml "$@" | sha256sum | cut -d' ' -f1; }
stamp="$build $(stamp_of "${files[@]}")"
stamp_file=.venv/.setup-$want
# A tree with the tests' packages has everything that `serve` needs.
if [ -x .venv/bin/vllm-gateway ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

started=$SECONDS
if [ ! -x .venv/bin/python ]; then
    say "making .venv/ with $("$python" --version)"
    "$uv" venv --quiet --python "$python" .venv ||
        fail "making the virtual environment" "see the message above; remove .venv/ and try again"
fi

say "installing vLLM ($build build) and the gateway, about $([ $build = cpu ] && echo 3 || echo 10) GB"
install() { "$uv" pip install --quiet --python .venv/bin/python --no-deps "$@"; }
sources=()
for file in "${files[@]}"; do sources+=(-r "$file"); done
if [ $build = cpu ]; then
    # PyTorch's CPU build: from where this machine keeps wheels, else from PyTorch's own index.
    torch=$(grep -E '^torch==' requirements/cpu.txt)
    install "$torch" 2>/dev/null ||
        install --torch-backend cpu "$torch" ||
        fail "installing $torch" "this machine must reach PyTorch's CPU index, or name a directory that holds the wheel: UV_FIND_LINKS=/path make setup"
fi
install "${sources[@]}" ||
    fail "installing the packages of ${files[*]}" "check the network and the free disk space (df -h .), then run the same command again"
install --editable . ||
    fail "installing the gateway itself" "see the message above; this is a bug of ours if pyproject.toml is unchanged"
echo "$stamp" >"$stamp_file"
say "ready in $((SECONDS - started)) s"
