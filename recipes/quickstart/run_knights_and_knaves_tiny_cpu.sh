#!/usr/bin/env bash
# Trains the tiny policy on knights and knaves with the real verl on the CPU. docs/tasks/knights_and_knaves.md shows
# the two commands that make data and policy. The same command line with another +hardware is a run on GPUs.
set -euo pipefail

############################# user-adjustable #############################

# a group of configs/clipx
METHOD=${METHOD:-grpo}

# the folder that `python -m verl_clipx.papers.tasks.knights_and_knaves.policy runs/policies` prints
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
SAVE_FREQ=${SAVE_FREQ:-$TOTAL_STEPS}
SEED=${SEED:-1}

PROJECT_NAME=${PROJECT_NAME:-verl_clipx_knights_and_knaves}
EXPERIMENT_NAME=${EXPERIMENT_NAME:-$METHOD}

###########################################################################

# shellcheck source=recipes/quickstart/train.sh
source "$(dirname "${BASH_SOURCE[0]}")/train.sh"

train knights_and_knaves "$@"
