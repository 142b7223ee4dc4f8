# shellcheck shell=bash
case $1 in
    recipes/cluster/wait_for_nodes.py) pwd -P ;;
    recipes/cluster/while_all_nodes_live.py) exec "${@:2}" ;;
    *) exit 9 ;;
esac
