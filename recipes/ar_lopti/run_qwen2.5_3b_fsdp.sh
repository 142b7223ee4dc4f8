#!/usr/bin/env bash
# AR-Lopti's runs of Qwen2.5-3B-Instruct on knights and knaves.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx recipe show ar_lopti/kk_3b_grpo_ar_lopti
set -xeuo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# grpo or reinforce, alone or with _ar, _lopti, _ar_lopti; with _script: the released script's settings
METHOD=${METHOD:-grpo_ar_lopti}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "ar_lopti/kk_3b_$METHOD" "$@"
