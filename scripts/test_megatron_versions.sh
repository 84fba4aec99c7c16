#!/usr/bin/env bash
# Runs the tests of Megatron-LM with other versions of megatron-core than the pinned one, one after the other in
# an environment below .venvs/. From 0.17 on it needs Python 3.12:
#     PYTHON=python3.12 scripts/test_megatron_versions.sh 0.17.1 0.18.0 0.19.2
# Of its dependencies only those are installed that data parallel needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=.venvs/megatron
[[ -x $environment/bin/python ]] || "${PYTHON:-python3}" -m venv "$environment"
pip=("$environment/bin/python" -m pip install --quiet)
"${pip[@]}" "torch==${TORCH:-2.13.0}" pytest hypothesis numpy -e .
failed=()
for version in "$@"; do
    "${pip[@]}" --no-deps "megatron-core==$version"
    echo "== megatron-core $version"
    "$environment/bin/python" -m pytest -q tests/test_megatron.py || failed+=("$version")
done
[[ ${#failed[@]} -eq 0 ]] || { echo "failed with megatron-core ${failed[*]}"; exit 1; }
