#!/usr/bin/env bash
# ACPO's runs of Qwen2.5-7B on HiTab and Open-Reasoner-Zero's problems.
# FSDP actor, vLLM rollouts. The run's settings are the preset's: clipx papers recipe show acpo/orz_7b_acpo_near
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: HARDWARE, NNODES, MODEL_PATH, RUN_FOLDER, SEED, DRY_RUN, …

# hitab or orz
DATA=${DATA:-orz}

# acpo, dapo, cispo; on orz also ar, lopti, ar_lopti, high_entropy, low_entropy
METHOD=${METHOD:-acpo}

# near: near on-policy, 2 updates per rollout batch; off: 16 updates; near_script, off_script: the released script's
# settings where it contradicts the paper
REGIME=${REGIME:-near}

###########################################################################

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

launch "acpo/${DATA}_7b_${METHOD}_$REGIME" "$@"
