# shellcheck shell=bash
# What bash reads before each script of a command that is explained, in a folder with `answers` and `notes`.
#
# Once there is an answer, a shell ends before its next command, of which it only looks up the name. It notes for
# `explain.py`, in bash's words, that an override stands where a command should. With a file `all` in the folder it goes
# on. Before the answer, `last` has the command that bash began last.

clipx_explain_folder=${BASH_ENV%/*}

# Arguments: the number of the next command's line, then the parameters of the script or function.
clipx_explain() {
    if [[ ! -s $clipx_explain_folder/answers ]]; then
        [[ ${BASH_SOURCE[1]-} == "$BASH_ENV" ]] ||
            printf '%s\n' "${BASH_SOURCE[1]:-$0}: line $1: $BASH_COMMAND" >"$clipx_explain_folder/last"
        return 0
    fi
    local left=$BASH_COMMAND line=$1
    local part='"[^"]*"|'"'[^']*'"'|\$\(+[^()]*\)+|[^][:space:]()"<>&|;'"'"']|]'
    local assigned="^[A-Za-z_][A-Za-z0-9_]*=($part)*([[:space:]]+(.*))?$" word="^($part)+"
    shift
    while [[ $left =~ $assigned ]]; do left=${BASH_REMATCH[3]-}; done
    [[ $left =~ $word ]] && left=${BASH_REMATCH[0]} || left=:
    # Nothing runs to find its name out.
    if [[ $left == *['`(']* ]]; then set -- "$left"; else eval "set -- $left"; fi
    # Another program that is missing is nothing that verl should have got.
    if [[ ${1-} == ?*=* || ${1-} == [-+~]?* ]] && [[ -z $(type -t -- "$1") ]]; then
        printf '%s\n' "${BASH_SOURCE[1]:-$0}: line $line: $1: command not found" >>"$clipx_explain_folder/notes"
    fi
    [[ -e $clipx_explain_folder/all ]] || exit 0
}

# In functions and subshells too. Nothing of it shows under `set -x`.
set -T
trap '{ clipx_explain "$LINENO" "$@"; } 2>/dev/null' DEBUG
