#!/usr/bin/env bash
# DGPO's runs of DeepSeek-R1-Distill-Qwen-7B on DAPO-Math-17k.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show dgpo/dapo17k_7b_dgpo
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# grpo, cispo, gppo, ce_gppo, aspo, dgpo; dgpo_n1_m1 and the like: its grid
METHOD=${METHOD:-dgpo}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "dgpo/dapo17k_7b_$METHOD" "$@"
