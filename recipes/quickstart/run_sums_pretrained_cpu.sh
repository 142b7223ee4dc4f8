#!/usr/bin/env bash
# Trains a small pretrained model on sums with the real verl, on the CPU or on one GPU. `MODEL=smollm2 bash
# scripts/quickstart.sh` prepares what it needs and calls it.
set -euo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-acpo}

# a folder or a name on the hub: any causal language model with a chat template
MODEL_PATH=${MODEL_PATH:-runs/quickstart/smollm2/model}
TRAIN_FILE=${TRAIN_FILE:-runs/quickstart/smollm2/data/train.parquet}
TEST_FILE=${TEST_FILE:-runs/quickstart/smollm2/data/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/quickstart/smollm2/$METHOD}

# a group of configs/hardware: cpu, or gpu in an environment with verl's GPU packages
HARDWARE=${HARDWARE:-cpu}
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-1}
# of the training worker and of the CPU's rollout server, which take turns
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
# verl pads every prompt to this length: `python -m verl_clipx.papers.tasks.prompt_length` measures the longest
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-64}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-14}
# compute_score_of_last_answer scores the last number of a response, which the model earns from the first step on;
# compute_score asks for an answer and nothing else
REWARD_FUNCTION=${REWARD_FUNCTION:-compute_score_of_last_answer}
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

# shellcheck source=recipes/quickstart/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"

OWN=(
    reward.custom_reward_function.name="$REWARD_FUNCTION"
    +clipx/trace=prompts
    clipx.trace.fraction=1.0
    clipx.trace.every="$TRACE_EVERY"
    actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype="$PARAM_DTYPE"
    +clipx/rollout=seeded
)
[[ $HARDWARE != cpu ]] || OWN+=(
    # In float32, not in float64 as the group has it: a rare token may differ between two runs.
    actor_rollout_ref.rollout.dtype=float32
    actor_rollout_ref.rollout.engine_kwargs.cpu.num_threads="$THREADS"
    ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS="\"$THREADS\""
)

train sums "${OWN[@]}" "$@"
