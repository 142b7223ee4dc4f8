#!/usr/bin/env bash
# BAPO's runs of DeepSeek-R1-Distill-Qwen-7B on Skywork-OR1's problems.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show bapo/skywork_7b_bapo
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# empty: DeepSeek-R1-Distill-Qwen; bp_math: the authors' own fine-tuned model, to be named by MODEL_PATH
INITIAL_MODEL=${INITIAL_MODEL:-}

# grpo, clip_higher or bapo; without REGIME also clip_lower (Figure 7)
METHOD=${METHOD:-bapo}

# empty, or how stale the data are: epochs_1, epochs_2, epochs_4, partial_rollout, separate_async;
# script: the released script's settings; with grpo also epochs_1_8k, epochs_4_8k and on_policy (Figure 2)
REGIME=${REGIME:-}

# responses have up to 64k tokens with bp_math, 32k with epochs_1, 2 or 4
if [[ $INITIAL_MODEL == bp_math || $REGIME == epochs_[124] ]]; then
    HARDWARE_RESPONSE=${HARDWARE_RESPONSE-64k}
fi

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "bapo/skywork${INITIAL_MODEL:+_$INITIAL_MODEL}_7b_$METHOD${REGIME:+_$REGIME}" "$@"
