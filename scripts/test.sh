#!/usr/bin/env bash
# Sets up the project's environment and runs every check. Safe to run twice.
#   bash scripts/test.sh          lint, contracts, unit tests, end-to-end runs of the real verl: 12 to 30 minutes
#   bash scripts/test.sh --fast   the same without end-to-end runs and slow unit tests: about three minutes
#   bash scripts/test.sh --all    with every end-to-end run under every setting: about 150 starts of verl, some
#                                 hours, one of them on the oldest verl that is admitted, and 19 with vLLM on the CPU;
#                                 property tests draw new examples, as with pytest's --hypothesis-profile=random
#   bash scripts/test.sh --verl FOLDER   what shows whether the plugin works beside another verl, such as a checkout of
#                                 its main branch, of which FOLDER is the root: what is relied on, then the quick start,
#                                 exactness over ranks, a resume, asynchronous trainers, and the command lines of verl's
#                                 example scripts. Its packages are this project's
# Further arguments go to pytest. WORKERS tests run at a time: 2 by default, 0 for one after the other with its
# output in order. END_TO_END_VLLM=0 leaves out the runs with vLLM, which --all makes in an environment of their own in
# .venv-vllm: 2 GB (docs/dev/testing.md).
set -euo pipefail
started_in=$PWD
cd "$(dirname "$0")/.."

selection='not matrix'
vllm=
verl=
case ${1:-} in
    --fast) selection='not end_to_end and not slow'; shift ;;
    --all)
        selection=''
        if [[ ${END_TO_END_VLLM:-1} != 0 ]]; then vllm=wanted; else selection='not vllm'; fi
        shift
        # Otherwise property tests draw the same examples in every run (tests/conftest.py).
        set -- --hypothesis-profile=random "$@"
        ;;
    --verl)
        if ! verl=$(cd "$started_in" && realpath --canonicalize-existing "${2:-nowhere}/verl" 2>/dev/null); then
            echo "--verl needs the folder of a checkout of verl, which has a folder verl: ${2:-none was given}" >&2
            exit 2
        fi
        shift 2
        ;;
    --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

# Containers often set it. Each of some 150 interpreters would then compile 4,000 modules anew: 11 s of imports, not 5.
unset PYTHONDONTWRITEBYTECODE
# Another second of each is saved by a garbage collector that runs less often.
export PYTHONPATH=$PWD/tests/interpreters${PYTHONPATH:+:$PYTHONPATH}

WORKERS=${WORKERS:-2}

say() { printf '\n[test] %s: %s\n' "$(date +%T)" "$*"; }

# A test opens a report in a browser.
browser() { command -v chromium || command -v chromium-browser || command -v google-chrome; }
install_browser='apt-get install -y --no-install-recommends chromium'
installing=
if ! browser >/dev/null; then
    if [[ $(id -u) != 0 ]]; then
        say "no Chromium, and only root may install it: sudo $install_browser"
        exit 1
    fi
    say "Chromium, by Debian's package, meanwhile (log: .chromium.log)"
    { apt-get update && DEBIAN_FRONTEND=noninteractive $install_browser; } >.chromium.log 2>&1 &
    installing=$!
fi

say "environment"
bash scripts/environment.sh cpu dev docs pretrained
VENV=${VENV:-.venv}
export PATH="$PWD/$VENV/bin:$PATH"
[[ $VENV == /* ]] && export PATH="$VENV/bin:$PATH"

if [[ -n $verl ]]; then
    beside() { bash scripts/beside_verl.sh "$(dirname "$verl")" "$@"; }

    say "tests beside $verl: what is relied on"
    beside python -m pytest -m 'not slow and not matrix' -n "$WORKERS" --dist loadfile "$@" \
        tests/training/worker/test_verl_contract.py tests/common/test_verl_contract.py tests/training/cpu \
        tests/training/worker/test_declared_columns.py tests/run/test_verl_keys.py

    say "tests beside $verl: trainings, and verl's example scripts by Hydra"
    options=tests/end_to_end/test_options.py
    beside python -m pytest --durations=0 --durations-min=1 -n "$WORKERS" --dist loadfile "$@" \
        tests/end_to_end/test_quickstart.py::test_grpo_and_acpo_on_one_page \
        tests/end_to_end/test_training.py::test_a_users_own_controller_trains_on_stale_samples_of_asynchronous_ranks \
        tests/end_to_end/test_invariance.py::test_bounds_and_gradients_are_those_of_the_whole_mini_batch \
        tests/end_to_end/test_resume.py \
        "$options::test_the_older_trainer_with_reinforce_plus_plus" \
        "$options::test_a_rollout_apart_with_rloo_and_rollout_correction" \
        "$options::test_one_step_off_policy_trains_the_loss_in_its_bypass_mode" \
        "$options::test_fully_async_policy" \
        tests/claims/test_verl_examples.py::test_hydra_gives_what_is_written_down
    say "everything passed beside $verl"
    exit
fi

if [[ -n $vllm ]]; then
    say "environment with vLLM, meanwhile (log: .venv-vllm.log)"
    env BASE_VENV="$VENV" VENV="${VLLM_VENV:-.venv-vllm}" bash scripts/setup_vllm_cpu.sh >.venv-vllm.log 2>&1 &
    vllm=$!
    trap 'kill "$vllm" 2>/dev/null || true' EXIT
fi

if [[ $selection != *'not slow'* ]]; then
    # What the CUDA build of torch 2.13.0 asks for; in the environment itself, torch would use it.
    triton=${TRITON_FOLDER:-$VENV/triton}
    if [[ ! -d $triton/triton-3.7.1.dist-info ]]; then
        say "Triton, for tests of the GPU code"
        python -m pip --quiet install --no-compile --no-deps --upgrade --target "$triton" triton==3.7.1
    fi
fi

say "lint: ruff"
ruff check .
ruff format --check .

say "lint: shellcheck, hadolint"
# By ending or first line, wherever a script stands.
mapfile -t scripts < <({ git ls-files --cached --others --exclude-standard -- '*.sh'
    git grep --untracked -lE '^#!.*sh$'; } | sort -u)
shellcheck "${scripts[@]}" &
linted=$!
hadolint docker/Dockerfile.*

say "imports run one way: import-linter"
lint-imports
wait "$linted"

say "the site of docs: mkdocs, every link and anchor; meanwhile the tests"
# Its advice is to move to another generator before May 2027. Not --quiet: it hides warnings from --strict.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict &
site=$!

if [[ -n $installing ]] && ! { wait "$installing" && browser >/dev/null; }; then
    tail -n 5 .chromium.log >&2
    say "no Chromium; install it: $install_browser"
    exit 1
fi
if [[ -n $vllm ]]; then
    wait "$vllm" || { tail -n 30 .venv-vllm.log >&2; say "no environment with vLLM"; exit 1; }
    trap - EXIT
fi

say "tests: ${selection:-all}"
# A file's tests stay together: they share runs and what they compose. Files come in their order, runs of verl first
# (tests/conftest.py): by their number of tests the longest run would come last, alone.
python -m pytest tests -m "$selection" --durations=0 --durations-min=1 \
    -n "$WORKERS" --dist loadfile --no-loadscope-reorder "$@"
wait "$site"
say "everything passed"
