#!/usr/bin/env bash
# One run as a Slurm job on any number of nodes, submitted from the root of the repository:
#   sbatch --nodes=4 recipes/cluster/slurm.sh [VARIABLE=value …] RECIPE [override …]
# A preempted job, one that lost a node, and one at its time limit are put back into the queue and go on from the last
# checkpoint. docs/launch.md says more.
# The cluster's own options (--partition, --account, --qos, --gres for GPUs of a type) go on sbatch's command line.

#SBATCH --job-name=clipx
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# The signal goes only to this script, five minutes before the time limit.
#SBATCH --signal=B:USR1@300
set -euo pipefail

############################# user-adjustable #############################

# empty: no container; with pyxis an image's name or a .sqsh file, with apptainer a .sif file
CONTAINER_IMAGE=${CONTAINER_IMAGE:-}
# pyxis or apptainer
CONTAINER_RUNTIME=${CONTAINER_RUNTIME:-pyxis}
# beside this folder: host:container,host:container
CONTAINER_MOUNTS=${CONTAINER_MOUNTS:-}

# sourced on every node before anything else, for example .venv/bin/activate; empty: the environment of sbatch
ACTIVATE=${ACTIVATE:-}

# empty: the first address of the first node; set it where that is not on the network that the nodes share
HEAD_ADDRESS=${HEAD_ADDRESS:-}
# one of its own, so that another job's Ray cannot be meant
RAY_PORT=${RAY_PORT:-$((20000 + ${SLURM_JOB_ID:-0} % 10000))}

# Whoever reaches a Ray cluster's port can run code in it, unless the nodes share a secret. srun hands it on. Ray from
# 2.52 on reads it; newer ones make one for each host if they are not told.
export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N 32 -t x1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN

# seconds that Ray waits for all nodes; containers may take minutes to start
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=${RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT:-900}

# a job that lost a node is put back into the queue unless it has been started this often, for whatever reason
MAX_STARTS=${MAX_STARTS:-20}

###########################################################################

if [[ -z ${SLURM_JOB_ID:-} ]]; then
    echo "this script runs as a job: sbatch --nodes=N recipes/cluster/slurm.sh RECIPE" >&2
    exit 2
fi
# Slurm runs a copy of this file from another folder.
cd "$SLURM_SUBMIT_DIR"
if [[ ! -f recipes/cluster/payload.sh ]]; then
    echo "$SLURM_SUBMIT_DIR is not the root of the repository; submit the job from its root" >&2
    exit 2
fi
# shellcheck source=recipes/cluster/payload.sh
source recipes/cluster/payload.sh

# SLURM_JOB_NODELIST is one word, like node[1-3,7]: only scontrol can expand it.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
parse_payload "${#nodes[@]}" "$@"

if [[ -z $HEAD_ADDRESS ]]; then
    # Not the host's name: many a host resolves its own name to a loopback address, and then no node is the head.
    addresses=$(srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname -I)
    # shellcheck disable=SC2086 # one word an address
    HEAD_ADDRESS=$(ipv4_of "${nodes[0]}" $addresses)
fi
starts=$((${SLURM_RESTART_COUNT:-0} + 1))
printf 'nodes: %s; head: %s (%s); start %d of this job\n' "${nodes[*]}" "${nodes[0]}" "$HEAD_ADDRESS" "$starts"

# There once Ray runs on all nodes and the run begins: symmetric-run ends with 0 also where Ray did not start.
begun=$PWD/runs/.begun-$SLURM_JOB_ID
mkdir -p runs
rm -f "$begun"

step=(
    srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --cpu-bind=none
    # The head's exit code is the run's: no other task may end this step before it, nor is one left behind for long.
    --kill-on-bad-exit=0 --wait=300
)
if [[ -n $CONTAINER_IMAGE ]]; then
    mounts=$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    case $CONTAINER_RUNTIME in
        pyxis) step+=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD") ;;
        apptainer) step+=(apptainer exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER_IMAGE") ;;
        *)
            echo "CONTAINER_RUNTIME=$CONTAINER_RUNTIME: must be pyxis or apptainer" >&2
            exit 2
            ;;
    esac
fi
# On each node. Where Slurm does not know whose GPUs it has, it names them to all makers' software, and verl refuses to
# start with ROCR_VISIBLE_DEVICES beside CUDA_VISIBLE_DEVICES.
# shellcheck disable=SC2016 # the variables are the inner shell's
prepare='[[ -z $1 ]] || source "$1"; [[ -z ${CUDA_VISIBLE_DEVICES:-} ]] || unset ROCR_VISIBLE_DEVICES; shift; exec "$@"'
# shellcheck disable=SC2016 # as above
step+=(
    bash -c "$prepare" bash "$ACTIVATE"
    ray symmetric-run --address "$HEAD_ADDRESS:$RAY_PORT" --min-nodes "${#nodes[@]}"
    --num-gpus="${SLURM_GPUS_ON_NODE:-8}" --num-cpus="${SLURM_CPUS_ON_NODE:-8}" --disable-usage-stats
    -- bash -c 'touch "$1"; shift; exec "$@"' bash "$begun" env RAY_ADDRESS="$HEAD_ADDRESS:$RAY_PORT" "${PAYLOAD[@]}"
)

# requeue REASON: ends this job, with its steps, and puts it back into the queue.
requeue() {
    echo "$1: the job is requeued; its next start continues from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID" ||
        echo "this cluster does not requeue jobs; submit the same command again" >&2
}
signals=0
trap 'signals=$((signals + 1)); requeue "time limit near"' USR1

# Where this script is killed, it can end nothing: then Linux sends the signal (util-linux).
! command -v setpriv >/dev/null || step=(setpriv --pdeathsig TERM "${step[@]}")
"${step[@]}" &
pid=$!
# Somebody ends the job: without this bash would end at once, or wait, and the step would go on.
trap 'signals=$((signals + 1)); kill -TERM "$pid" 2>/dev/null || true' HUP INT TERM
while true; do
    before=$signals
    code=0
    wait "$pid" || code=$?
    # A trapped signal ends `wait`, not the step.
    ((signals > before)) || break
done
again=
if [[ ! -e $begun ]]; then
    echo "the run did not begin: Ray did not start on all nodes; the reason is above, or in /tmp/ray on the nodes" >&2
    [[ $code != 0 ]] || code=1
    # A first start more likely has a wrong set-up than bad luck.
    ((starts == 1)) || again="Ray did not start"
elif [[ $code == "$LOST_NODE" ]]; then
    again="a node was lost"
fi
rm -f "$begun"
# After a signal it is on its way back anyway, or was ended.
if [[ -n $again && $signals == 0 ]]; then
    if ((starts < MAX_STARTS)); then
        requeue "$again"
    else
        echo "$again: not requeued, because the job has been started MAX_STARTS=$MAX_STARTS times" >&2
    fi
fi
exit "$code"
