#!/usr/bin/env bash
# Trains the tiny policy on knights and knaves with the real verl on the CPU. docs/tasks/knights_and_knaves.md shows
# the two commands that make data and policy. The same command line with another +hardware is a run on GPUs.
set -xeuo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-grpo}

# the folder that `python -m verl_clipx.tasks.knights_and_knaves.policy runs/policies` prints
MODEL_PATH=${MODEL_PATH:-runs/knights_and_knaves/policy}
TRAIN_FILE=${TRAIN_FILE:-data/kk_tiny/train.parquet}
TEST_FILE=${TEST_FILE:-data/kk_tiny/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/knights_and_knaves/$METHOD}

NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}

TOTAL_STEPS=${TOTAL_STEPS:-50}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}
ROLLOUT_N=${ROLLOUT_N:-8}
# prompts per optimizer step: two updates per rollout batch, so that clipping can act
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-8}
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-64}
ACTOR_LR=${ACTOR_LR:-3e-4}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-32}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-16}
VAL_N=${VAL_N:-4}
TEST_FREQ=${TEST_FREQ:-$TOTAL_STEPS}
SEED=${SEED:-1}

PROJECT_NAME=${PROJECT_NAME:-verl_clipx_knights_and_knaves}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$METHOD}

###########################################################################

# shellcheck source=recipes/text.sh
source "$(dirname "${BASH_SOURCE[0]}")/../text.sh"

export VERL_PLATFORM=cpu
export VERL_FILE_LOGGER_PATH=$RUN_FOLDER/metrics.jsonl
mkdir -p "$RUN_FOLDER"

LOSS=(
    +clipx="$METHOD"
)

DATA=(
    data.train_files="$(text "$TRAIN_FILE")"
    data.val_files="$(text "$TEST_FILE")"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.seed="$SEED"
    reward.custom_reward_function.path=pkg://verl_clipx.tasks.knights_and_knaves.reward
    reward.custom_reward_function.name=compute_score
)

ACTOR=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path="$(text "$MODEL_PATH")"
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.actor.data_loader_seed="$SEED"
)

ROLLOUT=(
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.seed="$SEED"
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.rollout.val_kwargs.n="$VAL_N"
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
)

TRAINER=(
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.total_training_steps="$TOTAL_STEPS"
    trainer.total_epochs=1000
    trainer.val_before_train=True
    trainer.test_freq="$TEST_FREQ"
    trainer.save_freq="$TOTAL_STEPS"
    trainer.logger='[console,file]'
    trainer.validation_data_dir="$(text "$RUN_FOLDER/validation")"
    trainer.default_local_dir="$(text "$RUN_FOLDER/checkpoints")"
    trainer.resume_mode=disable
    trainer.project_name="$(text "$PROJECT_NAME")"
    trainer.experiment_name="$(text "$EXPERIMENT_NAME")"
)

# In this shell's place, so that a signal to the recipe is one to the training.
exec python3 -m verl.trainer.main_ppo +hardware=cpu \
    "${LOSS[@]}" "${DATA[@]}" "${ACTOR[@]}" "${ROLLOUT[@]}" "${TRAINER[@]}" "$@"
