#!/usr/bin/env bash
# Runs the suite on other versions of torch than the pinned one, each in an environment of its own
# below .venvs/, and says at the end which failed: scripts/test_versions.sh 2.9.0 2.14.1
# Each version may take several GB, with CUDA. What follows "--" goes to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

versions=()
while [[ $# -gt 0 && $1 != -- ]]; do
    versions+=("$1")
    shift
done
[[ $# -eq 0 ]] || shift

mkdir -p .venvs
grep -vE '^(torch|triton)==' constraints.txt >.venvs/constraints.txt # torch brings its own triton
failed=()
for version in "${versions[@]:-2.9.0}"; do
    environment=.venvs/$version
    [[ -x $environment/bin/python ]] || python3 -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet -c .venvs/constraints.txt \
        "torch==$version" -e ".[dev,train,plot]"
    echo "== torch $version"
    "$environment/bin/python" -m pytest -q "$@" || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed on torch ${failed[*]}"; exit 1; }
