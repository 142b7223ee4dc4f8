# shellcheck shell=bash
# The address is asked for by one step; the other is the run, which lasts until it is ended if the test wants that.
[[ $* != *"hostname -I"* ]] || { echo "${ADDRESSES-10.0.0.7 192.168.1.7 fd00::7}"; exit; }
echo "$RAY_AUTH_MODE $RAY_AUTH_TOKEN" >>"$HOME/secrets"
touch "$HOME/step_started"
[[ -n ${RAY_DOES_NOT_START:-} ]] || for word in "$@"; do [[ $word != */runs/.begun-* ]] || touch "$word"; done
if [[ -n ${UNTIL_REQUEUED:-} ]]; then
    for _ in $(seq 200); do [[ ! -e $HOME/requeued ]] || exit 143; sleep 0.05; done
fi
exit "${SRUN_EXIT:-0}"
