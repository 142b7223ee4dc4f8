#!/usr/bin/env bash
# AR-Lopti's runs of Qwen2.5-3B-Instruct on knights and knaves.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show ar_lopti/kk_3b_grpo_ar_lopti
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# grpo or reinforce, without or with _ar, _lopti, _ar_lopti; with _script: the released script's settings;
# grpo_low_only, grpo_lopti_high_first, grpo_ar_alpha_0_{1,2,4}, grpo_lopti_eta_0_{1,3,7}: the runs of Figure 6
METHOD=${METHOD:-grpo_ar_lopti}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "ar_lopti/kk_3b_$METHOD" "$@"
