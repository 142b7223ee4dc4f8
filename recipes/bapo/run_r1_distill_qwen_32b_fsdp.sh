#!/usr/bin/env bash
# BAPO's runs of DeepSeek-R1-Distill-Qwen-32B on Skywork-OR1's problems.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show bapo/skywork_32b_bapo
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# empty: DeepSeek-R1-Distill-Qwen; bp_math: the authors' own fine-tuned model, to be named by MODEL_PATH
INITIAL_MODEL=${INITIAL_MODEL:-}

# grpo, clip_higher or bapo
METHOD=${METHOD:-bapo}

# the model's size decides how it is laid out on the GPUs
HARDWARE_MODEL=${HARDWARE_MODEL-32b}
# at least 16 GPUs
NNODES=${NNODES:-4}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "bapo/skywork${INITIAL_MODEL:+_$INITIAL_MODEL}_32b_$METHOD" "$@"
