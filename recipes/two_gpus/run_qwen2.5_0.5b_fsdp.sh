#!/usr/bin/env bash
# Trains Qwen2.5-0.5B-Instruct on Countdown on two GPUs of 24 GB or more, with FSDP2 and vLLM. The data are made by
#   clipx papers data build countdown --prompt countdown_qwen_instruct --out data/countdown_qwen
set -euo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-acpo}

MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-0.5B-Instruct}
TRAIN_FILE=${TRAIN_FILE:-data/countdown_qwen/train.parquet}
TEST_FILE=${TEST_FILE:-data/countdown_qwen/test.parquet}
RUN_FOLDER=${RUN_FOLDER:-runs/two_gpus/$METHOD}

HARDWARE=gpu
NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-2}

TOTAL_STEPS=${TOTAL_STEPS:-100}
TRAIN_BATCH_SIZE=${TRAIN_BATCH_SIZE:-128}
ROLLOUT_N=${ROLLOUT_N:-8}
# prompts per optimizer step: four updates per rollout batch, so that clipping can act
MINI_BATCH_SIZE=${MINI_BATCH_SIZE:-32}
# responses a rank passes at once; the bounds don't depend on it
MICRO_BATCH_SIZE=${MICRO_BATCH_SIZE:-16}
ACTOR_LR=${ACTOR_LR:-1e-6}
MAX_PROMPT_LENGTH=${MAX_PROMPT_LENGTH:-256}
MAX_RESPONSE_LENGTH=${MAX_RESPONSE_LENGTH:-1024}
VAL_N=${VAL_N:-1}
TEST_FREQ=${TEST_FREQ:-10}
SAVE_FREQ=${SAVE_FREQ:-50}
SEED=${SEED:-1}

PROJECT_NAME=${PROJECT_NAME:-verl_clipx_two_gpus}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$METHOD}

###########################################################################

# shellcheck source=recipes/quickstart/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/../quickstart/train.sh"

OWN=(
    # The prompts' text already has the chat markers.
    actor_rollout_ref.model.custom_chat_template="\"{% for message in messages %}{{ message['content'] }}{% endfor %}\""
    actor_rollout_ref.model.use_remove_padding=False
    actor_rollout_ref.model.enable_gradient_checkpointing=True
)

train countdown "${OWN[@]}" "$@"
