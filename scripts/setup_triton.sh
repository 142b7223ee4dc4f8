#!/usr/bin/env bash
# Installs Triton next to the project's environment, for the GPU code that benchmarks/gpu_code.py counts without a GPU.
# Inside the environment, torch would use it. It is safe to run twice.
# Usage: bash scripts/setup_triton.sh
set -euo pipefail

############################ adjustable by environment variables ############################

# the project's environment, and the folder that Triton is installed in
VENV=${VENV:-.venv}
TRITON_FOLDER=${TRITON_FOLDER:-$VENV/triton}

# what the CUDA build of the environment's torch, 2.13.0, asks for
TRITON_VERSION=${TRITON_VERSION:-3.7.1}

#############################################################################################

cd "$(dirname "$0")/.."

if [[ ! -d $TRITON_FOLDER/triton-$TRITON_VERSION.dist-info ]]; then
    "$VENV/bin/python" -m pip --disable-pip-version-check --quiet install --no-compile --no-deps --upgrade \
        --target "$TRITON_FOLDER" "triton==$TRITON_VERSION" "$@"
fi
