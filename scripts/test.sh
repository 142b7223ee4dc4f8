#!/usr/bin/env bash
# Sets up the project's environment and runs every check. Safe to run twice.
#   bash scripts/test.sh          lint, contracts, unit tests, end-to-end runs by pairwise cover
#   bash scripts/test.sh --fast   the same without the end-to-end runs
#   bash scripts/test.sh --all    the end-to-end runs of the full matrix (hours)
# Further arguments go to the last pytest. WORKERS tests run at a time: 2 by default, 0 for one after the other with its
# output in order. END_TO_END_VLLM=0 leaves out the runs with vLLM on the CPU, which make an environment of their own in
# .venv-vllm: 4 GB (docs/vllm_cpu.md).
set -euo pipefail
cd "$(dirname "$0")/.."

END_TO_END=cover
case ${1:-} in
    --fast) END_TO_END=none; shift ;;
    --all) END_TO_END=all; shift ;;
    --help | -h) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

WORKERS=${WORKERS:-2}

say() { printf '\n[test] %s\n' "$*"; }

bash scripts/environment.sh cpu dev
VENV=${VENV:-.venv}
export PATH="$PWD/$VENV/bin:$PATH"
[[ $VENV == /* ]] && export PATH="$VENV/bin:$PATH"

say "lint: ruff"
ruff check .
ruff format --check .

say "lint: shellcheck"
mapfile -t scripts < <(find scripts recipes .ci docker -type f \( -name '*.sh' -o -path '.ci/run' \) | sort)
shellcheck "${scripts[@]}"

say "lint: hadolint"
hadolint docker/Dockerfile.*

say "imports run one way: import-linter"
lint-imports

say "unit tests"
python -m pytest tests -m 'not end_to_end' --durations=5 -n "$WORKERS"

if [[ $END_TO_END != none ]]; then
    say "end-to-end runs of the real verl ($END_TO_END)"
    export END_TO_END END_TO_END_VLLM=${END_TO_END_VLLM:-1}
    # A file's tests stay together: they share runs.
    python -m pytest tests/end_to_end -m end_to_end --durations=0 -n "$WORKERS" --dist loadfile "$@"
fi
say "everything passed"
