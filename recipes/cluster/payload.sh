# shellcheck shell=bash
# Sourced by the launchers: what a user gives them to run, [VARIABLE=value …] RECIPE [override …], as for `env`.

# The exit code of while_all_nodes_live.py where a node was lost.
# shellcheck disable=SC2034 # for those that source this
LOST_NODE=75

# parse_payload NNODES WORD ...: sets PAYLOAD, the command that the head node runs from the repository's root. It ends with
# LOST_NODE when the cluster has lost a node.
#   NNODES: of the cluster; it goes to the recipe, and so does NGPUS_PER_NODE if it is set
# Fails with 2 if there is no recipe among the words.
parse_payload() {
    local nodes=$1
    shift
    PAYLOAD=(env NNODES="$nodes" ${NGPUS_PER_NODE:+NGPUS_PER_NODE="$NGPUS_PER_NODE"})
    while [[ ${1:-} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
        PAYLOAD+=("$1")
        shift
    done
    if [[ ${1:-} != *.sh ]]; then
        printf 'no recipe: %s\nexpected [VARIABLE=value …] recipes/<paper>/run_<model>_fsdp.sh [override …]\n' "${1:-nothing left}" >&2
        return 2
    fi
    if [[ ! -f $1 ]]; then
        printf 'no such recipe: %s (seen from %s, which must be the root of the repository)\n' "$1" "$PWD" >&2
        return 2
    fi
    PAYLOAD+=(python3 recipes/cluster/while_all_nodes_live.py bash "$@")
}
