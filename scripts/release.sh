#!/usr/bin/env bash
# Builds the wheel and the sdist into dist/ and checks what is in them. docs/dev/release.md has the steps of a release.
# Usage: bash scripts/release.sh
set -euo pipefail

############################ adjustable by environment variables ############################

# where both are written; emptied first
DIST=${DIST:-dist}

# the environment whose tools build and check
VENV=${VENV:-.venv}

#############################################################################################

cd "$(dirname "$0")/.."
bash scripts/environment.sh dev
rm -rf "$DIST"
"$VENV/bin/python" -m build --outdir "$DIST" .
"$VENV/bin/python" -m twine check --strict "$DIST"/*
"$VENV/bin/python" -m pytest -q tests/test_artefacts.py --artefacts "$DIST" "$@"
printf '\n[release] built and checked: %s\n' "$DIST"/*
