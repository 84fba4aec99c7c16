#!/usr/bin/env bash
# Runs the test suite; arguments go to pytest: scripts/test.sh -k moe -x
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
use_venv dev,train,plot,megatron

python -m pytest "$@"
