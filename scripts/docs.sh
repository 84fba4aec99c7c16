#!/usr/bin/env bash
# Builds the documentation into build/docs. A warning is an error, and so is a broken internal link.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
use_venv docs

python -m sphinx --fail-on-warning --keep-going --fresh-env --quiet -b html docs build/docs
