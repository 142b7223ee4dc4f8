#!/usr/bin/env bash
# Runs on the head node of a Ray cluster that something else started (KubeRay, SkyPilot).
#   CLIPX_PAYLOAD: [VARIABLE=value …] RECIPE [override …], quoted as in a shell; NNODES: nodes of the cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=recipes/cluster/payload.sh
source recipes/cluster/payload.sh

# Takes the quotes off and, unlike eval, runs nothing.
split='import os, shlex; print("\0".join(shlex.split(os.environ["CLIPX_PAYLOAD"])), end="\0")'
mapfile -d '' words < <(python3 -c "$split")
parse_payload "$NNODES" "${words[@]}"
exec "${PAYLOAD[@]}"
