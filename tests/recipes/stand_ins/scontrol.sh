# shellcheck shell=bash
case $1 in
    show) range=${3#*[}; range=${range%]}; for n in $(seq -w "${range%-*}" "${range#*-}"); do echo "gpu$n"; done ;;
    # The step ends before this does.
    requeue) touch "$HOME/requeued"; sleep 0.5; exit "${REQUEUE_EXIT:-0}" ;;
esac
