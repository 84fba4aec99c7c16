#!/usr/bin/env bash
# Trains on several nodes. Call it on each of them with the same arguments, the first node's name
# among them; what comes after the two goes to scripts/train.py:
#
#   scripts/launch_torchrun.sh 4 node0 --config configs/bf16.toml
#
# RANKS_PER_NODE: 8, unless it is set. NCCL_SOCKET_IFNAME chooses the network.
set -euo pipefail

if (($# < 2)); then
    echo "usage: $0 NODES FIRST_NODE [arguments of scripts/train.py]" >&2
    exit 2
fi
nodes=$1 first_node=$2
shift 2
cd "$(dirname "$0")/.."

# torchrun numbers ranks node by node and sets LOCAL_WORLD_SIZE, from which LoCo knows the nodes.
exec torchrun --nnodes "$nodes" --nproc-per-node "${RANKS_PER_NODE:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$first_node:29400" --rdzv-id loco \
    scripts/train.py "$@"
