#!/usr/bin/env bash
# AR-Lopti's runs of Qwen2.5-7B-Instruct-1M on knights and knaves, and of Qwen2.5-7B on DSR-Uniform and
# Open-Reasoner-Zero's problems.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show ar_lopti/kk_7b_grpo_ar_lopti
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# kk, dsr or orz
DATA=${DATA:-kk}

# grpo (on kk also reinforce), without or with _ar, _lopti, _ar_lopti; with _script: the released script's settings
METHOD=${METHOD:-grpo_ar_lopti}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "ar_lopti/${DATA}_7b_$METHOD" "$@"
