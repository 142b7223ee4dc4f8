# shellcheck shell=bash
[[ $1 == -o ]] && shift 2
host=$1; shift
[[ $host != "${GONE:-}" ]] || exit 255
exec "${LOGIN_SHELL:-sh}" -c "$*"
