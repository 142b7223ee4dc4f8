#!/usr/bin/env bash
# Optional: recipes/cluster/slurm.sh under a real Slurm, whose two nodes are namespaces of this machine.
#   bash scripts/rehearse_slurm.sh [end | lost_node | power | time_limit ...]     all four by default
# end: trains to the end. lost_node: a node's Ray is killed in the middle of a step. power: a node leaves the network with
# all its processes, and returns. time_limit: the job reaches its time limit. Each time, the same job must finish the run.
# It needs root on Debian or Ubuntu with slurmctld, slurmd, slurm-client, munge and iproute2, 8 GB of memory and half an
# hour. docs/dev/launching.md shows the results.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    --help | -h) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

############################# user-adjustable #############################

# the environment; scripts/environment.sh makes it
VENV=${VENV:-.venv}
# emptied first; not below /tmp, of which each node has its own
FOLDER=${FOLDER:-/var/tmp/verl-clipx-slurm}
# the first three numbers of the nodes' addresses
NETWORK=${NETWORK:-10.77.0}
# what a node tells Slurm and Ray it has
CPUS=${CPUS:-8}
# rollout batches of a run, which is saved after every second one
STEPS=${STEPS:-20}
# seconds that one job may take, with its restarts
DEADLINE=${DEADLINE:-1800}

###########################################################################

say() { printf '[slurm] %s\n' "$*" >&2; }
fail() { printf '[slurm] error: %s\n' "$*" >&2; exit 1; }

[[ $EUID == 0 ]] || fail "namespaces and slurmctld need root"
for command in slurmctld slurmd sbatch munged ip nsenter unshare; do
    command -v "$command" >/dev/null || fail "no $command: apt-get install slurmctld slurmd slurm-client munge iproute2"
done
[[ $VENV == /* ]] || VENV=$PWD/$VENV
[[ -x $VENV/bin/clipx ]] || fail "no environment in $VENV: bash scripts/environment.sh cpu"
# Each has a /tmp of its own.
[[ $PWD != /tmp/* && $VENV != /tmp/* && $FOLDER != /tmp/* ]] || fail "repository, VENV and FOLDER may not be below /tmp"

bridge=clipx-slurm
declare -A node_process

# Ends what this script has started, and nothing else.
clean_up() {
    local node
    for node in "${!node_process[@]}"; do
        stop_node "$node"
    done
    [[ ! -f $FOLDER/slurmctld.pid ]] || kill "$(<"$FOLDER/slurmctld.pid")" 2>/dev/null || true
    [[ -z ${munge_process:-} ]] || kill "$munge_process" 2>/dev/null || true
    for node in 1 2; do
        ip netns delete "clipx-n$node" 2>/dev/null || true
    done
    ip link delete "$bridge" 2>/dev/null || true
}
trap clean_up EXIT

# start_node N: network, processes, /tmp, /dev/shm, host name of its own.
start_node() {
    local node=$1 name=clipx-n$1
    if ! ip netns list | grep -qw "$name"; then
        ip netns add "$name"
        ip link add "clipx-veth$node" type veth peer name eth0 netns "$name"
        ip link set "clipx-veth$node" master "$bridge" up
        ip -n "$name" address add "$NETWORK.1$node/24" dev eth0
        ip -n "$name" link set eth0 up
        ip -n "$name" link set lo up
    fi
    mkdir -p "$FOLDER/tmp-n$node" "$FOLDER/spool-n$node"
    # The first process of a namespace has to wait for orphans, which a shell does and slurmd does not.
    # shellcheck disable=SC2016 # the variables are the inner shell's
    local inside='
        hostname "$1"
        mount --bind "$2/hosts" /etc/hosts
        mount --bind "$2/tmp-$3" /tmp
        mount -t tmpfs -o size=2g tmpfs /dev/shm
        slurmd -D -N "$3"
        exit'
    setsid nsenter --net="/run/netns/$name" \
        unshare --pid --fork --kill-child --mount-proc --mount --uts bash -c "$inside" bash "$name" "$FOLDER" "n$node" \
        </dev/null >"$FOLDER/log/n$node.out" 2>&1 &
    node_process[$node]=$!
}

# stop_node N: ends all its processes at once.
stop_node() {
    kill -KILL "${node_process[$1]}" 2>/dev/null || true
    wait "${node_process[$1]}" 2>/dev/null || true
}

# until_true SECONDS WHAT COMMAND ...: waits until the command succeeds.
until_true() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@"; do
        ((SECONDS < end)) || fail "$what: not in time; logs in $FOLDER"
        sleep 1
    done
}

nodes_are_idle() { [[ $(sinfo --noheader --states=idle --format=%D) == 2 ]]; }
of_job() { scontrol --oneliner show job "$1" | grep -oP "(?<= $2=)\S+"; }
is_in_state() { [[ $(of_job "$1" JobState) =~ ^($2)$ ]]; }
lines_of() { [[ -f $1 ]] && (($(wc -l <"$1") >= $2)); }

start_slurm() {
    rm -rf "$FOLDER"
    mkdir -p "$FOLDER"/{log,state,runs,munge}
    chmod 755 "$FOLDER" "$FOLDER/munge"
    printf '127.0.0.1 localhost\n%s\n' "$NETWORK.11 clipx-n1
$NETWORK.12 clipx-n2" >"$FOLDER/hosts"

    (umask 077 && head -c 1024 /dev/urandom >"$FOLDER/munge/key")
    munged --foreground --force --key-file="$FOLDER/munge/key" --socket="$FOLDER/munge/socket" \
        --pid-file="$FOLDER/munge/pid" --seed-file="$FOLDER/munge/seed" >"$FOLDER/log/munged.log" 2>&1 &
    munge_process=$!

    export SLURM_CONF=$FOLDER/slurm.conf
    cat >"$SLURM_CONF" <<END
ClusterName=clipx
SlurmctldHost=$(hostname --short)($NETWORK.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge/socket
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool-%n
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd-%n.pid
SlurmctldLogFile=$FOLDER/log/slurmctld.log
SlurmdLogFile=$FOLDER/log/slurmd-%n.log
SlurmctldPort=16817
SlurmdPort=16818
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
MpiDefault=none
GresTypes=gpu
ReturnToService=2
# Seconds until a silent node is down; Slurm's default is 300.
SlurmdTimeout=60
KillWait=10
NodeName=n[1-2] NodeAddr=$NETWORK.1[1-2] CPUs=$CPUS Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES State=UP
END
    # A worker slot of verl's; Slurm wants a device for it.
    echo "Name=gpu File=/dev/zero" >"$FOLDER/gres.conf"

    ip link add "$bridge" type bridge
    ip address add "$NETWORK.1/24" dev "$bridge"
    ip link set "$bridge" up
    until_true 30 "munged" test -S "$FOLDER/munge/socket"
    slurmctld
    start_node 1
    start_node 2
    until_true 60 "both nodes" nodes_are_idle
    say "$(slurmctld -V): two nodes"
}

prepare() {
    export PATH=$VENV/bin:$PATH
    data=$FOLDER/data
    say "data and policy"
    clipx data build countdown --out "$data/countdown" >"$FOLDER/log/data.log" 2>&1
    mkdir -p "$data/policies"
    python -m verl_clipx.papers.tasks.countdown.policy "$FOLDER/policies" --num-threads 1 >"$FOLDER/log/policy.log" 2>&1
    ln -s "$(tail -n 1 "$FOLDER/log/policy.log")" "$data/policies/countdown"
    echo "export PATH=$VENV/bin:\$PATH" >"$FOLDER/activate.sh"
}

# submit NAME [sbatch option ...]: sets `job`.
submit() {
    local name=$1
    shift
    job=$(ACTIVATE=$FOLDER/activate.sh sbatch --parsable --nodes=2 --gpus-per-node=1 \
        --output="$FOLDER/log/$name.log" "$@" recipes/cluster/slurm.sh \
        METHOD=acpo CLIPX_DATA="$data" RUN_FOLDER="$FOLDER/runs/$name" TOTAL_STEPS="$STEPS" SAVE_FREQ=2 TEST_FREQ=-1 \
        recipes/cpu/run_tiny_fsdp.sh clipx.scope=lagged)
    say "$name: job $job, log $FOLDER/log/$name.log"
}

# check NAME RESTARTS: the job has come to its end, after so many restarts, and the run has all its steps.
check() {
    local name=$1 restarts steps
    until_true "$DEADLINE" "$name" is_in_state "$job" "COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY"
    restarts=$(of_job "$job" Restarts)
    is_in_state "$job" COMPLETED || fail "$name: $(of_job "$job" JobState), exit code $(of_job "$job" ExitCode)"
    [[ $restarts == "$2" ]] || fail "$name: $restarts restarts, expected $2"
    lines_of "$FOLDER/runs/$name/metrics.jsonl" 1 || fail "$name: no metrics"
    steps=$(grep -oP '"step": ?\K\d+' "$FOLDER/runs/$name/metrics.jsonl" | tr '\n' ' ')
    [[ $steps == "$(seq -s ' ' "$STEPS") " ]] || fail "$name: steps $steps"
    [[ $restarts == 0 ]] || grep -q "Resuming from" "$FOLDER/log/$name.log" || fail "$name: started afresh"
    say "$name: passed in $SECONDS s, $restarts restarts, $(grep -c 'Resuming from' "$FOLDER/log/$name.log") resumptions"
}

rehearse_end() {
    submit end
    check end 0
}

rehearse_lost_node() {
    submit lost_node
    until_true "$DEADLINE" "step 3" lines_of "$FOLDER/runs/lost_node/metrics.jsonl" 3
    say "lost_node: killing the raylet of n2"
    pkill -KILL -f "raylet/raylet .*--node_ip_address=$NETWORK.12 "
    check lost_node 1
    grep "lost: $NETWORK.12" "$FOLDER/log/lost_node.log" >&2
}

rehearse_power() {
    submit power
    until_true "$DEADLINE" "step 3" lines_of "$FOLDER/runs/power/metrics.jsonl" 3
    say "power: n2 goes"
    # So that nothing tells the others.
    ip link set clipx-veth2 down
    stop_node 2
    until_true 300 "back in the queue" is_in_state "$job" PENDING
    say "power: n2 comes back"
    ip link set clipx-veth2 up
    start_node 2
    check power 1
}

rehearse_time_limit() {
    submit time_limit
    until_true "$DEADLINE" "step 3" lines_of "$FOLDER/runs/time_limit/metrics.jsonl" 3
    say "time_limit: its limit is three minutes away now, less than the five of --signal"
    scontrol update jobid="$job" timelimit=$((SECONDS / 60 + 3))
    until_true 300 "back in the queue" is_in_state "$job" PENDING
    scontrol update jobid="$job" timelimit=60
    check time_limit 1
}

rehearsals=("${@:-end}")
[[ $# -gt 0 ]] || rehearsals=(end lost_node power time_limit)
for name in "${rehearsals[@]}"; do
    declare -F "rehearse_$name" >/dev/null || fail "no rehearsal $name: end, lost_node, power, time_limit"
done
start_slurm
prepare
for name in "${rehearsals[@]}"; do
    SECONDS=0
    until_true 60 "both nodes" nodes_are_idle
    "rehearse_$name"
done
say "everything passed"
