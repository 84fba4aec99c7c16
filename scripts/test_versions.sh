#!/usr/bin/env bash
# Runs the suite on other versions of torch than the pinned one, each in an environment of its own
# below .venvs/: scripts/test_versions.sh 2.9.0 2.14.1. Their packages with CUDA take several GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

for version in "${@:-2.9.0}"; do
    environment=.venvs/$version
    [[ -x $environment/bin/python ]] || python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet "torch==$version" -e ".[dev,train,plot]"
    echo "== torch $version"
    "$environment/bin/python" -m pytest -q
done
