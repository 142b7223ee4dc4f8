#!/usr/bin/env bash
# Adds verl and this project to an environment that already has torch, vLLM and flash-attn (verl's CUDA image), and
# leaves those as they are: each is compiled against one build of torch. Run from the root of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."

VERL_VERSION=${VERL_VERSION:-0.9.1}

constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
python3 - >"$constraints" <<'END'
import importlib.metadata
import sys

for name in ("torch", "torchvision", "torchaudio", "vllm", "flash-attn"):
    try:
        print(f"{name}=={importlib.metadata.version(name)}")
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"{name} is not installed: this script needs verl's CUDA image, or another with torch, vLLM, flash-attn")
END
printf 'kept as they are: %s\n' "$(paste -sd ' ' "$constraints")"

python3 -m pip install --no-cache-dir --constraint "$constraints" "verl==$VERL_VERSION" --editable ".[gpu]"
