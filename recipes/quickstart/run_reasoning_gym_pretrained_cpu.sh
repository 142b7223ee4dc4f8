#!/usr/bin/env bash
# Trains a small pretrained model on a task of reasoning-gym with the real verl on the CPU. `MODEL=smollm2 bash
# scripts/quickstart.sh` prepares what it needs and calls it.
set -xeuo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-acpo}

# a folder or a name on the hub: any causal language model with a chat template
MODEL_PATH=${MODEL_PATH:-runs/quickstart/smollm2/model}
TRAIN_FILE=${TRAIN_FILE:-runs/quickstart/smollm2/data/train.parquet}
TEST_FILE=${TEST_FILE:-runs/quickstart/smollm2/data/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/quickstart/smollm2/$METHOD}

NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
# of the training worker and of the rollout server, which take turns
THREADS=${THREADS:-$(nproc)}
# what forward and backward compute in: fp32, or bf16 where the CPU has it; parameters and Adam's states stay float32
PARAM_DTYPE=${PARAM_DTYPE:-fp32}

TOTAL_STEPS=${TOTAL_STEPS:-6}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-16}
ROLLOUT_N=${ROLLOUT_N:-8}
# prompts per optimizer step: four updates per rollout batch, so that clipping can act
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-4}
# responses a rank passes at once: its share of an optimizer step
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-$((MINI_BATCH_SIZE * ROLLOUT_N / (NNODES * NGPUS_PER_NODE)))}
ACTOR_LR=${ACTOR_LR:-1e-5}
# verl pads every prompt to this length: `python -m verl_clipx.tasks.prompt_length` measures the longest
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-64}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-10}
VAL_N=${VAL_N:-1}
# one of so many rollout batches leaves traces of all its tokens
TRACE_EVERY=${TRACE_EVERY:-5}
TEST_FREQ=${TEST_FREQ:-$TOTAL_STEPS}
# a checkpoint of SmolLM2-135M takes 1.6 GB; -1: none
SAVE_FREQ=${SAVE_FREQ:--1}
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
    reward.custom_reward_function.path=pkg://verl_clipx.tasks.reasoning_gym.reward
    reward.custom_reward_function.name=compute_score
)

ACTOR=(
    algorithm.adv_estimator=grpo
    actor_rollout_ref.model.path="$(text "$MODEL_PATH")"
    actor_rollout_ref.actor.optim.lr="$ACTOR_LR"
    actor_rollout_ref.actor.ppo_mini_batch_size="$MINI_BATCH_SIZE"
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.actor.data_loader_seed="$SEED"
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PARAM_DTYPE"
)

# The rollout in float32, not in float64 as +clipx/rollout=seeded has it: a rare token may differ between two runs.
ROLLOUT=(
    +clipx/rollout=seeded
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.n="$ROLLOUT_N"
    actor_rollout_ref.rollout.seed="$SEED"
    actor_rollout_ref.rollout.engine_kwargs.cpu.num_threads="$THREADS"
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$MICRO_BATCH_SIZE"
    actor_rollout_ref.rollout.val_kwargs.n="$VAL_N"
    actor_rollout_ref.rollout.val_kwargs.do_sample=True
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
)

TRAINER=(
    ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS="\"$THREADS\""
    trainer.nnodes="$NNODES"
    trainer.n_gpus_per_node="$NGPUS_PER_NODE"
    trainer.total_training_steps="$TOTAL_STEPS"
    trainer.total_epochs=1000
    trainer.val_before_train=True
    trainer.test_freq="$TEST_FREQ"
    trainer.save_freq="$SAVE_FREQ"
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
