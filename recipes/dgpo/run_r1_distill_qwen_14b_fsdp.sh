#!/usr/bin/env bash
# DGPO's runs of DeepSeek-R1-Distill-Qwen-14B on DAPO-Math-17k.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show dgpo/dapo17k_14b_dgpo
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# grpo, cispo, gppo, ce_gppo, aspo, dgpo
METHOD=${METHOD:-dgpo}

# the model's size decides how it is laid out on the GPUs
HARDWARE_MODEL=${HARDWARE_MODEL-14b}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "dgpo/dapo17k_14b_$METHOD" "$@"
