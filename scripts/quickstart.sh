#!/usr/bin/env bash
# Trains a small policy with a real verl GRPO run on the CPU under one of the plugin's losses, and shows what came of it.
#   bash scripts/quickstart.sh [METHOD]     METHOD: a group of configs/clipx (default bapo)
# About ten minutes on two cores, the installation included; up to 8 GB of memory. Safe to run twice.
# Adjustable by environment variables: RUNS (where runs are kept), SEED, and those of scripts/environment.sh and
# recipes/quickstart/run_countdown_tiny_cpu.sh (TOTAL_STEPS, ACTOR_LR, …). Further arguments are Hydra overrides.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    --help | -h) sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
METHOD=${1:-bapo}
[[ $# -gt 0 ]] && shift

# The values that a group leaves to the user: marked ??? in its file.
asked() { sed -n 's/^ *\([a-z_]*\): ???$/clipx.\1/p' "configs/clipx/$1.yaml"; }

[[ -f configs/clipx/$METHOD.yaml && $METHOD != base ]] || {
    printf 'no method %s; there are:' "$METHOD" >&2
    for group in configs/clipx/*.yaml; do
        name=$(basename "$group" .yaml)
        [[ $name == base || -n $(asked "$name") ]] || printf ' %s' "$name" >&2
    done
    printf '\n' >&2
    exit 2
}
for key in $(asked "$METHOD"); do
    [[ " $* " == *" $key="* ]] || {
        printf '%s needs a value that only you know: add %s=… (configs/clipx/%s.yaml says which)\n' \
            "$METHOD" "$key" "$METHOD" >&2
        exit 2
    }
done

# Containers often set it. Each of a run's processes would then compile 4,000 modules anew: 11 s of imports, not 5.
unset PYTHONDONTWRITEBYTECODE

RUNS=${RUNS:-runs/quickstart}
mkdir -p "$RUNS"
RUNS=$(cd "$RUNS" && pwd)
export SEED=${SEED:-1}
export METHOD
export TOTAL_STEPS=${TOTAL_STEPS:-50}
export RUN_FOLDER=${RUN_FOLDER:-$RUNS/$METHOD-seed$SEED}
export TRAIN_FILE=$RUNS/data/train.parquet
export TEST_FILE=$RUNS/data/test.parquet

say() { printf '\n[quickstart] %s\n' "$*"; }

# Runs a step with its noise in a log; says which step failed and where its log is.
step() {
    local name=$1 log=$RUNS/$2.log
    shift 2
    say "$name"
    if ! "$@" >"$log" 2>&1; then
        printf '[quickstart] error: %s failed. Its log: %s. The end of it:\n' "$name" "$log" >&2
        tail -n 15 "$log" >&2
        exit 1
    fi
}

say "1/5 environment"
bash scripts/environment.sh cpu
VENV=${VENV:-.venv}
[[ $VENV == /* ]] || VENV=$PWD/$VENV
export PATH="$VENV/bin:$PATH"

step "2/5 data: Countdown problems" data python -m verl_clipx.tasks.countdown "$RUNS/data"

step "3/5 policy: about a million parameters, a short supervised warm start (cached in $RUNS/policies)" policy \
    python -m verl_clipx.tasks.countdown.policy "$RUNS/policies" --num-threads 1
MODEL_PATH=$(tail -n 1 "$RUNS/policy.log")
export MODEL_PATH
grep 'held-out reward' "$RUNS/policy.log" || true

say "4/5 training: verl with +clipx=$METHOD, $TOTAL_STEPS steps (log: $RUN_FOLDER/run.log)"
rm -rf "$RUN_FOLDER"
clipx watch "$RUN_FOLDER" --steps "$TOTAL_STEPS" --label "$METHOD" -- \
    bash recipes/quickstart/run_countdown_tiny_cpu.sh "$@"

say "5/5 report"
clipx report "$RUN_FOLDER" --out "$RUN_FOLDER/report" --title "Countdown with +clipx=$METHOD, seed $SEED"
cat <<END
What next:
  open the page                $RUN_FOLDER/report/report.html
  two runs on one page         $VENV/bin/clipx report $RUN_FOLDER OTHER_FOLDER --out report
  another method               bash scripts/quickstart.sh dgpo
  another parameter            bash scripts/quickstart.sh acpo clipx.alpha=2
  the methods                  $VENV/bin/clipx methods
  your own verl run            add +clipx=$METHOD to its command line (README.md)
END
