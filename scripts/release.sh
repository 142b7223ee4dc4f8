#!/usr/bin/env bash
# Builds the wheel and the sdist into dist/ and checks them: content, metadata, installations beside verl.
# docs/dev/release.md has the steps of a release.
# Usage: bash scripts/release.sh [ARGUMENT OF PYTEST ...]
set -euo pipefail

############################ adjustable by environment variables ############################

# where both are written; what is in it of an earlier build goes
DIST=${DIST:-dist}

# the environment whose tools build and check
VENV=${VENV:-.venv}

#############################################################################################

cd "$(dirname "$0")/.."
VENV=$VENV bash scripts/environment.sh cpu dev
python=$VENV/bin/python
mkdir -p "$DIST"
rm -f "$DIST"/verl_clipx-*.whl "$DIST"/verl_clipx-*.tar.gz
"$python" -m build --no-isolation --outdir "$DIST" .
ARTEFACTS=$(cd "$DIST" && pwd) "$python" -m pytest -q tests/end_to_end/test_wheel.py "$@"
printf '[release] built and checked: %s\n' "$DIST"/verl_clipx-*
