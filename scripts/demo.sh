#!/usr/bin/env bash
# Trains one small model twice from the same seed on 2 ranks, its gradients reduced in fp32 by stock
# FSDP2 and in 4 bits by loco-fsdp, and compares the two in a table and a picture.
# Takes about 2 minutes on 2 CPU cores once everything is installed.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
use_venv train,plot

runs=runs/demo
# Two ranks share the cores; more threads than cores would slow both down.
export OMP_NUM_THREADS=1

for reduce in stock loco; do
    torchrun --standalone --nproc-per-node 2 scripts/train.py --config configs/demo.toml \
        --train.reduce "$reduce" --train.metrics "$runs/$reduce.jsonl"
done
python scripts/demo_report.py "$runs/stock.jsonl" "$runs/loco.jsonl" "$runs/demo.png"
