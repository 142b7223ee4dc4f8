#!/usr/bin/env bash
# A Ray cluster of hosts that are reached by SSH, without a scheduler. The first host is the head.
#   HOSTS="node1 node2" bash recipes/cluster/ssh.sh start
#   HOSTS="node1 node2" bash recipes/cluster/ssh.sh run [VARIABLE=value …] RECIPE [override …]
#   HOSTS="node1 node2" bash recipes/cluster/ssh.sh status
#   HOSTS="node1 node2" bash recipes/cluster/ssh.sh stop
# All hosts must see the repository, the models and the data at the same path. docs/launch.md says more.
set -euo pipefail

############################# user-adjustable #############################

# names or addresses, the head first
HOSTS=${HOSTS:-}
# the repository on the hosts
WORKDIR=${WORKDIR:-$PWD}
# sourced on each host first, for example .venv/bin/activate; empty: nothing
ACTIVATE=${ACTIVATE:-}
# of the head, on the network that the hosts share; empty: its first one
HEAD_ADDRESS=${HEAD_ADDRESS:-}
RAY_PORT=${RAY_PORT:-6379}
# empty: Ray counts them
NGPUS_PER_NODE=${NGPUS_PER_NODE:-}
# seconds that `start` waits for all hosts
WAIT_SECONDS=${WAIT_SECONDS:-300}

###########################################################################

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=recipes/cluster/payload.sh
source recipes/cluster/payload.sh

# Whoever reaches a Ray cluster's port can run code in it, unless the hosts share a secret. Ray from 2.52 on reads it.
token=$WORKDIR/runs/.ray_auth_token
secret=(env RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$token")

# A host file's lines, and commas, separate as blanks do.
read -ra hosts <<<"${HOSTS//[,[:space:]]/ }"
for host in "${hosts[@]}"; do
    if [[ ! $host =~ ^[A-Za-z0-9_.:@%][A-Za-z0-9_.:@%-]*$ ]]; then
        printf 'HOSTS: %s is no name of a host; give names or addresses alone, without options or comments\n' "$host" >&2
        exit 2
    fi
done
if [[ ${#hosts[@]} == 0 ]]; then
    echo 'HOSTS is empty: HOSTS="node1 node2" bash recipes/cluster/ssh.sh start' >&2
    exit 2
fi
head=${hosts[0]}

# over HOST WORD ...: runs a command in the repository on a host, its words as they are, with this standard input.
over() {
    local host=$1
    shift
    local line
    printf -v line '%q ' "$@"
    line="cd $(printf %q "$WORKDIR") && ${ACTIVATE:+. $(printf %q "$ACTIVATE") && }$line"
    # %q writes for bash, and the login shell may be another one: it only takes the single quotes off.
    ssh -o BatchMode=yes "$host" "exec bash -c $(quoted "$line")"
}

# The same without standard input: ssh would swallow that of a loop.
on() { over "$@" </dev/null; }

head_address() {
    if [[ -z $HEAD_ADDRESS ]]; then
        local addresses
        addresses=$(on "$head" hostname -I)
        # shellcheck disable=SC2086 # one word an address
        HEAD_ADDRESS=$(ipv4_of "$head" $addresses)
    fi
}

case ${1:-} in
    start)
        head_address
        options=(--disable-usage-stats ${NGPUS_PER_NODE:+--num-gpus="$NGPUS_PER_NODE"})
        # shellcheck disable=SC2016 # $1 is the host's
        on "$head" bash -c 'mkdir -p "${1%/*}"; umask 077; od -An -N 32 -t x1 /dev/urandom | tr -d " \n" >"$1"' bash "$token"
        on "$head" "${secret[@]}" ray start --head --node-ip-address="$HEAD_ADDRESS" --port="$RAY_PORT" "${options[@]}"
        for host in "${hosts[@]:1}"; do
            on "$host" "${secret[@]}" ray start --address="$HEAD_ADDRESS:$RAY_PORT" "${options[@]}"
        done
        on "$head" "${secret[@]}" \
            python3 recipes/cluster/wait_for_nodes.py "$HEAD_ADDRESS:$RAY_PORT" "${#hosts[@]}" "$WAIT_SECONDS"
        ;;
    run)
        shift
        parse_payload "${#hosts[@]}" "$@"
        head_address
        # The end of ssh is not the end of what runs on the host: a signal goes there by a second one.
        running=$WORKDIR/runs/.running-$HOSTNAME-$$
        # shellcheck disable=SC2016,SC2329 # $1 is the host's; called by the trap
        end_run() { on "$head" bash -c 'kill -TERM "$(<"$1")"' bash "$running" || true; }
        signals=0
        trap 'signals=$((signals + 1)); end_run' HUP INT TERM
        # Where this script is killed, its end of the pipe closes, and so does the run's standard input on the host.
        pipe=$(mktemp -d)
        mkfifo "$pipe/input"
        over "$head" bash recipes/cluster/while_connected.sh "$running" \
            "${secret[@]}" RAY_ADDRESS="$HEAD_ADDRESS:$RAY_PORT" "${PAYLOAD[@]}" <"$pipe/input" &
        pid=$!
        exec 3>"$pipe/input"
        rm -r "$pipe"
        while true; do
            before=$signals
            code=0
            wait "$pid" || code=$?
            # A trapped signal ends `wait`, not the run.
            ((signals > before)) || break
        done
        on "$head" rm -f "$running" || true
        exit "$code"
        ;;
    status)
        head_address
        on "$head" "${secret[@]}" ray status --address="$HEAD_ADDRESS:$RAY_PORT"
        ;;
    stop)
        # Every Ray process of this user on these hosts. One host that is gone does not keep the others.
        code=0
        for host in "${hosts[@]:1}" "$head"; do
            on "$host" ray stop || {
                echo "$host: ray stop failed" >&2
                code=1
            }
        done
        exit "$code"
        ;;
    *)
        sed -n '2,7s/^# \{0,1\}//p' recipes/cluster/ssh.sh >&2
        exit 2
        ;;
esac
