#!/usr/bin/env bash
# ACPO's runs of Qwen2.5-3B-Instruct on Countdown and of Qwen2.5-3B on HiTab.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show acpo/countdown_3b_acpo_near
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# countdown or hitab
DATA=${DATA:-countdown}

# acpo, dapo, cispo; on Countdown also the ablations clip_high, clip_average
METHOD=${METHOD:-acpo}

# near: near on-policy, 2 updates per rollout batch; off: 16 updates; near_script, off_script: the released script's
# settings where it contradicts the paper
REGIME=${REGIME:-near}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "acpo/${DATA}_3b_${METHOD}_$REGIME" "$@"
