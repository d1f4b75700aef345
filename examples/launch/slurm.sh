#!/usr/bin/env bash
# One torchrun on each node, which starts the node's ranks. Submit it with the script and its arguments:
#
#     sbatch --nodes 2 slurm.sh train.py
#
#SBATCH --job-name=train
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.log
#
# On GPUs also: #SBATCH --gpus-per-node=8
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
first=${FIRST:-$first}        # an address, where nodes do not know each other by name
export TACIT_ALGORITHM=${TACIT_ALGORITHM:-lowbit} # where the script attaches tacit.from_env()
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0    # where there are several interfaces
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${RANKS:-${SLURM_GPUS_ON_NODE:-1}}" \
  --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID" "$@"
