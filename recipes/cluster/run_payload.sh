#!/usr/bin/env bash
# Runs on the head node of a Ray cluster that something else started (KubeRay, SkyPilot).
#   CLIPX_PAYLOAD: [VARIABLE=value …] RECIPE [override …], quoted as in a shell; NNODES: nodes of the cluster
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=recipes/cluster/payload.sh
source recipes/cluster/payload.sh

# xargs takes the quotes off and, unlike eval, runs nothing.
mapfile -t words < <(xargs -n 1 printf '%s\n' <<<"$CLIPX_PAYLOAD")
parse_payload "$NNODES" "${words[@]}"
exec "${PAYLOAD[@]}"
