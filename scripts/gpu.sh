#!/usr/bin/env bash
# The first minutes on a GPU: how much of the clipping is rounding (docs/floor.md), losses and updates against verl's
# vanilla, and tests/gpu; nothing needs the network. Each part has its own limit of time. It writes
# docs/results/gpu/CARD.json and prints a table: docs/dev/testing.md.
#   bash scripts/gpu.sh               about five minutes; on several GPUs the tests on 2 and 4 ranks too
#   bash scripts/gpu.sh --rollout     verl with Ray, FSDP2 and vLLM as well
#   bash scripts/gpu.sh --train       HARDWARE=gpu MODEL=smollm2 bash scripts/quickstart.sh as well; MODEL may be a folder
#   bash scripts/gpu.sh --only 'tests on 1'      that part alone, by its name in the table
#   bash scripts/gpu.sh --rehearse --out FOLDER     all parts with tiny shapes, about a minute, on a CPU if there is no GPU
# PYTHON is the interpreter of an environment with verl (python3 by default).
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$(command -v "${PYTHON:-python3}")
PATH=$(dirname "$PYTHON"):$PATH
export PATH PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
exec "$PYTHON" benchmarks/gpu.py "$@"
