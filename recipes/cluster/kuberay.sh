#!/usr/bin/env bash
# One run as a KubeRay RayJob, from rayjob.yaml beside this file.
#   NNODES=4 IMAGE=… bash recipes/cluster/kuberay.sh [VARIABLE=value …] RECIPE [override …]
# DRY_RUN=1 prints the job instead of creating it. docs/launch.md says more.
set -euo pipefail

############################# user-adjustable #############################

NNODES=${NNODES:-1}
NGPUS_PER_NODE=${NGPUS_PER_NODE:-8}
# docker/Dockerfile.gpu, in a registry that the cluster reads
IMAGE=${IMAGE:-verl-clipx:gpu}
# a PersistentVolumeClaim with access mode ReadWriteMany
CLAIM=${CLAIM:-clipx}
JOB_NAME=${JOB_NAME:-clipx}
# new attempts after a lost pod
RETRIES=${RETRIES:-10}
# empty: kubectl's current one
NAMESPACE=${NAMESPACE:-}
DRY_RUN=${DRY_RUN:-0}

###########################################################################

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=recipes/cluster/payload.sh
source recipes/cluster/payload.sh

# Here for its errors only.
parse_payload "$NNODES" "$@"
payload=
for word in "$@"; do
    payload+="$(quoted "$word") "
done
job=$(python3 recipes/cluster/render_rayjob.py --name "$JOB_NAME" --image "$IMAGE" --nodes "$NNODES" \
    --gpus "$NGPUS_PER_NODE" --claim "$CLAIM" --retries "$RETRIES" --payload "${payload% }")
if [[ $DRY_RUN == 1 ]]; then
    printf '%s\n' "$job"
    exit
fi
exec kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} create -f - <<<"$job"
