#!/usr/bin/env bash
# Trains the tiny policy on Countdown with the real verl on the CPU. quickstart.sh prepares what it needs and calls it.
# The same command line with another +hardware is a run on GPUs.
set -euo pipefail

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
SAVE_FREQ=${SAVE_FREQ:-$TOTAL_STEPS}
SEED=${SEED:-1}

PROJECT_NAME=${PROJECT_NAME:-verl_clipx_quickstart}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$METHOD}

###########################################################################

# shellcheck source=recipes/quickstart/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"

OWN=(
    +clipx/trace=prompts
    clipx.trace.fraction=1.0
    clipx.trace.every="$TRACE_EVERY"
    +clipx/rollout=seeded
)

train countdown "${OWN[@]}" "$@"
