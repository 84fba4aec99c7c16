#!/usr/bin/env bash
#SBATCH --job-name=loco
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#
# Trains on several nodes as a Slurm job, one torchrun a node; arguments go to scripts/train.py:
#
#   sbatch --nodes 4 scripts/launch_slurm.sh --config configs/bf16.toml
#
# Submit it from the root of the repository. The job resumes if it is requeued and the arguments
# name a folder for checkpoints: --train.checkpoints /shared/run
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export RANKS_PER_NODE=${SLURM_GPUS_ON_NODE:-8}
# Slurm copies this script elsewhere: call the other one by where the job was submitted.
srun "$SLURM_SUBMIT_DIR/scripts/launch_torchrun.sh" "$SLURM_JOB_NUM_NODES" "$first_node" "$@"
