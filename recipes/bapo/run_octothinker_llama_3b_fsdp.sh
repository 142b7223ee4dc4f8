#!/usr/bin/env bash
# BAPO's runs of OctoThinker-Llama-3B.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show bapo/octothinker_3b_bapo
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# grpo, clip_higher or bapo
METHOD=${METHOD:-bapo}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "bapo/octothinker_3b_$METHOD" "$@"
