#!/usr/bin/env bash
# Runs a command beside another verl, of which FOLDER is a checkout:
#   bash scripts/beside_verl.sh FOLDER python -m pytest tests/run/test_verl_keys.py
#   bash scripts/beside_verl.sh FOLDER python scripts/declared_keys.py
# With PYTHONPATH=FOLDER, verl's folders tests and scripts would hide this project's.
set -euo pipefail

if ! verl=$(realpath --canonicalize-existing "${1:-nowhere}/verl" 2>/dev/null); then
    echo "$0 needs the folder of a checkout of verl, which has a folder verl: ${1:-none was given}" >&2
    exit 2
fi
shift

beside=$(mktemp -d)
trap 'rm -rf "$beside"' EXIT
ln -s "$verl" "$beside/verl"
PYTHONPATH="$beside${PYTHONPATH:+:$PYTHONPATH}" "$@"
