# shellcheck shell=bash
# Sourced by the launchers: what a user gives them to run, [VARIABLE=value …] RECIPE [override …], as for `env`.

# The exit code of while_all_nodes_live.py where a node was lost.
# shellcheck disable=SC2034 # for those that source this
LOST_NODE=75

# quoted WORD: prints it in single quotes, as every shell takes it (%q writes $'…', which only some do).
quoted() { printf "'%s'" "${1//\'/\'\\\'\'}"; }

# parse_payload NNODES WORD ...: sets PAYLOAD, the command that the head node runs from the repository's root. It ends with
# LOST_NODE when the cluster has lost a node.
#   NNODES: of the cluster; it goes to the recipe, and so does NGPUS_PER_NODE if it is set
# Fails with 2 if there is no recipe among the words.
parse_payload() {
    local nodes=$1
    shift
    PAYLOAD=(env NNODES="$nodes" ${NGPUS_PER_NODE:+NGPUS_PER_NODE="$NGPUS_PER_NODE"})
    while [[ ${1:-} =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; do
        if [[ $1 == NNODES=* && $1 != "NNODES=$nodes" ]]; then
            printf '%s: the cluster has %s nodes; give both the same number\n' "$1" "$nodes" >&2
            return 2
        fi
        PAYLOAD+=("$1")
        shift
    done
    # The lines of `clipx papers table plan`: a training sources the recipes' common.sh itself, an evaluation needs no
    # recipe.
    if [[ ${1:-} == bash && ${2:-} == -c && ${3:-} == *"; launch "* && $# == 3 ||
        "${*:1:4}" == "clipx papers eval run" ]]; then
        PAYLOAD+=(python3 recipes/cluster/while_all_nodes_live.py "$@")
        return
    fi
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

# ipv4_of HOST ADDRESS ...: prints the first IPv4 address of those that `hostname -I` named on a host.
# Fails with 2 if there is none: Ray's addresses are HOST:PORT, which an IPv6 address cannot be part of.
ipv4_of() {
    local host=$1 address
    shift
    for address in "$@"; do
        if [[ $address =~ ^([0-9]{1,3}\.){3}[0-9]{1,3}$ ]]; then
            printf '%s\n' "$address"
            return
        fi
    done
    printf '%s: hostname -I names no IPv4 address (%s); set HEAD_ADDRESS to one that the nodes reach\n' "$host" "${*:-nothing}" >&2
    return 2
}
