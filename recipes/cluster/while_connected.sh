#!/usr/bin/env bash
# Becomes a command that ends with its standard input: while_connected.sh FILE COMMAND …
# ssh.sh runs this on the head: where ssh.sh itself is killed, or the connection ends, the input ends too, and the
# command gets a SIGTERM. Its process id is in FILE meanwhile.
set -euo pipefail

running=$1
shift
mkdir -p "${running%/*}"
echo $$ >"$running"
exec 3<&0 </dev/null
# Without the run's output, which would keep ssh from ending with the run.
{
    cat
    read -r _ _ _ parent _ <"/proc/$BASHPID/stat"
    rm -f "$running"
    # Otherwise the command has ended, and its number may be another's.
    [[ $parent != "$$" ]] || kill -TERM "$$"
} <&3 >/dev/null 2>&1 &
exec "$@" 3<&-
