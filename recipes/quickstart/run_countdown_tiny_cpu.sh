#!/usr/bin/env bash
# Trains the tiny policy on Countdown with the real verl on the CPU. quickstart.sh prepares what it needs and calls it.
# The same command line with another +hardware is a run on GPUs.
set -xeuo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-acpo}

MODEL_PATH=${MODEL_PATH:-runs/quickstart/policy}
TRAIN_FILE=${TRAIN_FILE:-runs/quickstart/data/train.parquet}
TEST_FILE=${TEST_FILE:-runs/quickstart/data/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/quickstart/$METHOD}

NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}

TOTAL_STEPS=${TOTAL_STEPS:-8}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-80}
ROLLOUT_N=${ROLLOUT_N:-8}
# prompts per optimizer step: eight updates per rollout batch, so that clipping can act
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-10}
# responses a rank passes at once: its share of an optimizer step
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-$((MINI_BATCH_SIZE * ROLLOUT_N / (NNODES * NGPUS_PER_NODE)))}
ACTOR_LR=${ACTOR_LR:-3e-4}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-24}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-20}
VAL_N=${VAL_N:-1}
# one of so many rollout batches leaves traces of all its tokens
TRACE_EVERY=${TRACE_EVERY:-7}
TEST_FREQ=${TEST_FREQ:-$TOTAL_STEPS}
SEED=${SEED:-1}

PROJECT_NAME=${PROJECT_NAME:-verl_clipx_quickstart}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$METHOD}

###########################################################################

# shellcheck source=recipes/text.sh
source "$(dirname "${BASH_SOURCE[0]}")/../text.sh"

export VERL_PLATFORM=cpu
export VERL_FILE_LOGGER_PATH=$RUN_FOLDER/metrics.jsonl
mkdir -p "$RUN_FOLDER"

LOSS=(
    +clipx="$METHOD"
    +clipx/trace=prompts
    clipx.trace.fraction=1.0
    clipx.trace.every="$TRACE_EVERY"
)

DATA=(
    data.train_files="$(text "$TRAIN_FILE")"
    data.val_files="$(text "$TEST_FILE")"
    data.train_batch_size="$TRAIN_BATCH_SIZE"
    data.max_prompt_length="$MAX_PROMPT_LENGTH"
    data.max_response_length="$MAX_RESPONSE_LENGTH"
    data.seed="$SEED"
    reward.custom_reward_function.path=pkg://verl_clipx.tasks.countdown.reward
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
    +clipx/rollout=seeded
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
