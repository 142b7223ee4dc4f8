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
# a PersistentVolumeClaim with access mode ReadWriteMany, and its folders for runs and for data sets
CLAIM=${CLAIM:-clipx}
RUNS_IN_CLAIM=${RUNS_IN_CLAIM:-runs}
DATA_IN_CLAIM=${DATA_IN_CLAIM:-data}
# further claims and where to mount them, such as models:/models (MODEL_PATH=/models/…), separated by spaces
MOUNTS=${MOUNTS:-}
# what each node asks for, and the size of its /dev/shm, which counts as memory
CPUS=${CPUS:-64}
MEMORY=${MEMORY:-512Gi}
SHARED_MEMORY=${SHARED_MEMORY:-128Gi}
# labels of the nodes to run on, such as gpu=h100, separated by spaces
NODE_SELECTOR=${NODE_SELECTOR:-}
# taints that the pods tolerate, as YAML, such as [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
TOLERATIONS=${TOLERATIONS:-[]}
# a local queue of Kueue's; empty: none
QUEUE=${QUEUE:-}
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
    --gpus "$NGPUS_PER_NODE" --claim "$CLAIM" --runs "$RUNS_IN_CLAIM" --data "$DATA_IN_CLAIM" --mounts "$MOUNTS" \
    --cpus "$CPUS" --memory "$MEMORY" --shared-memory "$SHARED_MEMORY" --node-selector "$NODE_SELECTOR" \
    --tolerations "$TOLERATIONS" --queue "$QUEUE" --retries "$RETRIES" --payload "${payload% }")
if [[ $DRY_RUN == 1 ]]; then
    printf '%s\n' "$job"
    exit
fi
exec kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} create -f - <<<"$job"
