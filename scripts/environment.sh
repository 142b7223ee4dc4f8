#!/usr/bin/env bash
# Creates the project's own virtual environment, or brings it up to date. It is safe to run twice.
# Usage: bash scripts/environment.sh [EXTRA ...]    for example: bash scripts/environment.sh cpu dev
set -euo pipefail

############################ adjustable by environment variables ############################

# where the environment is made
VENV=${VENV:-.venv}

# the interpreter that it is made with; empty: the first suitable one of python3.11, python3.12, python3.10, python3
PYTHON=${PYTHON:-}

# torch for the CPU, and where its CPU build is; if that cannot be reached, pip's own sources are used
TORCH_VERSION=${TORCH_VERSION:-2.13.0}
TORCH_INDEX_URL=${TORCH_INDEX_URL:-https://download.pytorch.org/whl/cpu}

#############################################################################################

cd "$(dirname "$0")/.."
extras=("${@:-cpu}")

say() { printf '[set-up] %s\n' "$*" >&2; }
fail() { printf '[set-up] error: %s\n' "$*" >&2; exit 1; }

fits='import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 13))'
if [[ -z $PYTHON ]]; then
    for candidate in python3.11 python3.12 python3.10 python3; do
        if command -v "$candidate" >/dev/null && "$candidate" -c "$fits" 2>/dev/null; then
            PYTHON=$candidate
            break
        fi
    done
fi
[[ -n $PYTHON ]] || fail "no Python 3.10, 3.11 or 3.12 found: install one (apt-get install python3.11 python3.11-venv), or name it: PYTHON=/path/to/python3.11"
"$PYTHON" -c "$fits" || fail "PYTHON=$PYTHON is not Python 3.10, 3.11 or 3.12"

if [[ ! -x $VENV/bin/python ]]; then
    say "making a virtual environment in $VENV with $("$PYTHON" --version)"
    "$PYTHON" -m venv "$VENV" || fail "$PYTHON has no venv module: apt-get install python3-venv"
fi

# What is installed depends only on these. The stamp has their hash, then the extras that are installed.
wanted=$(printf '%s\n' "$TORCH_VERSION" | cat - pyproject.toml | sha256sum | cut -d ' ' -f 1)
stamp=$VENV/.verl-clipx-installed
installed=()
[[ -f $stamp ]] && read -ra installed <"$stamp"
[[ ${installed[0]:-} == "$wanted" ]] || installed=("$wanted")
missing=()
for extra in "${extras[@]}"; do
    [[ " ${installed[*]} " == *" $extra "* ]] || missing+=("$extra")
done
if [[ ${#missing[@]} -eq 0 ]]; then
    say "the environment in $VENV is up to date"
    exit 0
fi

pip=("$VENV/bin/python" -m pip --disable-pip-version-check --quiet)
# Most of 20,000 modules are never imported: Python compiles those that are, when they are, instead of pip all of them.
install=("${pip[@]}" install --no-compile)
if ! "$VENV/bin/python" -c "import torch, sys; sys.exit(torch.__version__.split('+')[0] != '$TORCH_VERSION')" 2>/dev/null; then
    sources=()
    if "$PYTHON" -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + '/torch/', timeout=10)" "$TORCH_INDEX_URL" 2>/dev/null; then
        sources=(--extra-index-url "$TORCH_INDEX_URL")
    else
        say "$TORCH_INDEX_URL cannot be reached; torch comes from pip's own sources (perhaps a larger build)"
    fi
    say "installing torch $TORCH_VERSION"
    "${install[@]}" "torch==$TORCH_VERSION" ${sources[@]+"${sources[@]}"} || fail "pip could not install torch $TORCH_VERSION; see its message above"
fi
list=$(IFS=,; echo "${extras[*]}")
say "installing verl-clipx[$list] and what it needs (a minute or two)"
"${install[@]}" --editable ".[$list]" || fail "pip could not install verl-clipx[$list]; see its message above"
"${pip[@]}" check >/dev/null || fail "the installed packages do not fit together: $VENV/bin/python -m pip check"
printf '%s\n' "${installed[*]} ${missing[*]}" >"$stamp"
say "done: $VENV"
