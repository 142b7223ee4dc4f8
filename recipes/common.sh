# shellcheck shell=bash
# Sourced by the recipes: the variables that all of them share, and `launch`, which turns them into one verl command.

############################# user-adjustable #############################

# a group of configs/hardware: a100x4, a100x8, h100x8
HARDWARE=${HARDWARE:-a100x8}
# empty, or a group of configs/hardware/model or .../response, which larger models or longer responses need in addition
HARDWARE_MODEL=${HARDWARE_MODEL:-}
HARDWARE_RESPONSE=${HARDWARE_RESPONSE:-}
NNODES=${NNODES:-1}
# empty: the hardware group's value
NGPUS_PER_NODE=${NGPUS_PER_NODE:-}

# the folder of the data sets that `clipx papers data build` wrote
CLIPX_DATA=${CLIPX_DATA:-data}

# the seed of training; a run folder belongs to one seed
SEED=${SEED:-1}

# empty, here and below: the preset's value
MODEL_PATH=${MODEL_PATH:-}
TRAIN_FILE=${TRAIN_FILE:-}
TEST_FILE=${TEST_FILE:-}
ROLLOUT_N=${ROLLOUT_N:-}
ACTOR_LR=${ACTOR_LR:-}
TOTAL_STEPS=${TOTAL_STEPS:-}
SAVE_FREQ=${SAVE_FREQ:-}
TEST_FREQ=${TEST_FREQ:-}

# empty: runs/<preset>-seed<seed>; with the same folder, a run continues from its last checkpoint
RUN_FOLDER=${RUN_FOLDER:-}
# empty: the preset's
PROJECT_NAME=${PROJECT_NAME:-}
# empty: <run>-seed<seed>
EXPERIMENT_NAME=${EXPERIMENT_NAME:-}
# verl's trackers; the run folder's metrics.jsonl needs "file"
LOGGER=${LOGGER:-[console,file]}

# 1: print the command and stop
DRY_RUN=${DRY_RUN:-0}
# 0: skip the checks of the environment, of what would be trained, and of the data
PREFLIGHT=${PREFLIGHT:-1}

###########################################################################

RECIPES=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=recipes/text.sh
source "$RECIPES/text.sh"

# A name on the hub stays as it is; a path becomes absolute, because Ray's workers run in another folder.
absolute_if_there() {
    if [[ -e $1 ]]; then realpath "$1"; else printf '%s\n' "$1"; fi
}

# A file, or Hydra's list of files, which stays as it is.
files() {
    if [[ $1 == \[* ]]; then printf '%s\n' "$1"; else text "$(absolute_if_there "$1")"; fi
}

# launch PRESET [OVERRIDE ...]: checks, then trains.
#   PRESET: <paper>/<name>, as clipx papers recipe list names them
launch() {
    local preset=$1
    shift
    # Hydra itself would say so only after the checks.
    local paper=${preset%%/*} names=
    if [[ -f $RECIPES/../configs/recipe/$paper/presets.yaml ]]; then
        names=$(sed -n "/^presets:/,\$ s|^  \([a-z0-9_]*\):.*|$paper/\1|p" "$RECIPES/../configs/recipe/$paper/presets.yaml")
    fi
    if ! grep -qFx -- "$preset" <<<"$names"; then
        printf 'there is no preset %s (check METHOD, REGIME or DATA); the presets of %s are:\n%s\n' "$preset" "$paper" "$names" >&2
        return 2
    fi
    local data run_folder
    data=$(realpath -m "$CLIPX_DATA")
    run_folder=$(realpath -m "${RUN_FOLDER:-runs/$preset-seed$SEED}")

    # verl's trainer may run on any node: what it reads from the environment travels with the job.
    local environment=(
        CLIPX_DATA="$data"
        VERL_FILE_LOGGER_PATH="$run_folder/metrics.jsonl"
    )
    # The preset comes after them: a value that it sets stays.
    local machine=("+hardware=$HARDWARE")
    [[ -z $HARDWARE_MODEL ]] || machine+=("+hardware/model=$HARDWARE_MODEL")
    [[ -z $HARDWARE_RESPONSE ]] || machine+=("+hardware/response=$HARDWARE_RESPONSE")

    local changes=() variable
    for variable in "${environment[@]}"; do
        changes+=("+ray_kwargs.ray_init.runtime_env.env_vars.${variable%%=*}=$(text "${variable#*=}")")
    done

    [[ -z $NGPUS_PER_NODE ]] || changes+=(trainer.n_gpus_per_node="$NGPUS_PER_NODE")
    [[ -z $MODEL_PATH ]] || changes+=(actor_rollout_ref.model.path="$(text "$(absolute_if_there "$MODEL_PATH")")")
    [[ -z $TRAIN_FILE ]] || changes+=(data.train_files="$(files "$TRAIN_FILE")")
    [[ -z $TEST_FILE ]] || changes+=(data.val_files="$(files "$TEST_FILE")")
    [[ -z $ROLLOUT_N ]] || changes+=(actor_rollout_ref.rollout.n="$ROLLOUT_N")
    [[ -z $ACTOR_LR ]] || changes+=(actor_rollout_ref.actor.optim.lr="$ACTOR_LR")
    [[ -z $TOTAL_STEPS ]] || changes+=(trainer.total_training_steps="$TOTAL_STEPS")
    [[ -z $SAVE_FREQ ]] || changes+=(trainer.save_freq="$SAVE_FREQ")
    [[ -z $TEST_FREQ ]] || changes+=(trainer.test_freq="$TEST_FREQ")
    [[ -z $PROJECT_NAME ]] || changes+=(trainer.project_name="$(text "$PROJECT_NAME")")
    changes+=(
        trainer.nnodes="$NNODES"
        data.seed="$SEED"
        actor_rollout_ref.actor.data_loader_seed="$SEED"
        actor_rollout_ref.rollout.seed="$SEED"
        trainer.experiment_name="$(text "${EXPERIMENT_NAME:-$(basename "$preset")-seed$SEED}")"
        trainer.logger="$LOGGER"
        trainer.default_local_dir="$(text "$run_folder/checkpoints")"
        trainer.validation_data_dir="$(text "$run_folder/validation")"
        trainer.resume_mode=auto
        # Without the plugin, `+recipe` is a key that nobody reads; this one, without a plus, stops the run then.
        clipx.receipt=auto
        hydra.run.dir="$(text "$run_folder")"
        "$@"
    )
    local command=(
        env "${environment[@]}"
        python3 -m verl.trainer.main_ppo "${machine[@]}" "+recipe=$preset" "${changes[@]}"
    )

    print_command "${command[@]}"
    [[ $DRY_RUN != 1 ]] || return 0
    # Where the recipe itself is being explained, the command is.
    if [[ $PREFLIGHT == 1 && -z ${CLIPX_EXPLAIN:-} ]]; then
        # Without the check inside a Ray worker: a cluster may be running already.
        clipx doctor --no-ray
        clipx explain -- "${command[@]}"
        # A run on CPUs shows a reward of 0 sooner.
        if [[ $HARDWARE != cpu ]]; then
            # It does not know the options of Hydra's own.
            local known=("${machine[@]}") change
            for change in "${changes[@]}"; do
                [[ $change == hydra.* ]] || known+=("$change")
            done
            # Files that look unusable stop no launch.
            env "${environment[@]}" clipx papers recipe check "$preset" "${known[@]}" \
                || echo "the run starts all the same" >&2
        fi
    fi

    mkdir -p "$run_folder"
    # In this shell's place, so that a signal to the recipe is one to the training.
    exec "${command[@]}"
}
