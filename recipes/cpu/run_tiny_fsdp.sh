#!/usr/bin/env bash
# The runs of the table cpu_small: small policies on Countdown and on knights and knaves, on CPUs, through everything that
# the papers' runs go through. `clipx papers table plan cpu_small` prints the commands that make their
# data and policies.
set -euo pipefail

############################# user-adjustable #############################
# and everything at the top of recipes/common.sh: NNODES, NGPUS_PER_NODE (ranks), RUN_FOLDER, SEED, DRY_RUN, …

# countdown or kk
DATA=${DATA:-countdown}

# grpo, ar, lopti; on Countdown also dapo, cispo, gppo, ce_gppo, aspo, dgpo, acpo, bapo; on kk also ar_lopti
METHOD=${METHOD:-grpo}

# of Countdown: near, 2 updates per rollout batch; off, 16
REGIME=${REGIME:-near}

HARDWARE=${HARDWARE:-cpu}
CLIPX_DATA=${CLIPX_DATA:-data/cpu}

###########################################################################

export VERL_PLATFORM=cpu

# shellcheck source=recipes/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

# Ray refuses to be told what a cluster has that is there already.
cluster=()
[[ -z ${RAY_ADDRESS:-} ]] || cluster=(ray_kwargs.ray_init.{num_gpus,num_cpus,object_store_memory}"=null")

preset=cpu/${DATA}_$METHOD
[[ $DATA == kk ]] || preset+=_$REGIME
launch "$preset" ${cluster[@]+"${cluster[@]}"} "$@"
