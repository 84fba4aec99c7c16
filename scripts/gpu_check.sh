#!/usr/bin/env bash
# What has to be seen on a GPU: the kernels against the definition, streams and memory, then the rate
# of the codec against the device's own copy. Under 8 minutes; results go to $1, else $OUT, else
# runs/gpu_check. Runs in .venv if there is one, else with the python3 on PATH.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=${1:-${OUT:-runs/gpu_check}}
mkdir -p "$out"
python=python3
[[ -x .venv/bin/python ]] && python=.venv/bin/python
export PYTHONPATH=$PWD:$PWD/kernels${PYTHONPATH:+:$PYTHONPATH}

nvidia-smi >"$out/device.txt" 2>&1
"$python" -c "import torch; assert torch.cuda.is_available(), 'no GPU'" || exit 1
timeout 240 "$python" -m pytest tests/test_gpu.py tests/test_spikes.py tests/test_kernel_*.py \
    --junitxml "$out/tests.xml" 2>&1 | tee "$out/tests.txt"
tests=${PIPESTATUS[0]}
timeout 210 "$python" scripts/bench_codec.py --output "$out" 2>&1 | tee "$out/bench.txt"
bench=${PIPESTATUS[0]}
echo "tests: $tests, benchmark: $bench (0 is success)"
exit $((tests || bench))
