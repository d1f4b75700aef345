#!/usr/bin/env bash
# One Slurm task for each rank, and no torchrun. Submit it with the script and its arguments:
#
#     sbatch --nodes 2 --ntasks-per-node 8 slurm_tasks.sh train.py
#
#SBATCH --job-name=train
#SBATCH --output=%x-%j.log
#
# On GPUs also: #SBATCH --gpus-per-node=8
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR=${FIRST:-$first} MASTER_PORT=${PORT:-29500} WORLD_SIZE=$SLURM_NTASKS
export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / SLURM_NNODES))
export TACIT_ALGORITHM=${TACIT_ALGORITHM:-lowbit} # where the script attaches tacit.from_env()
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
srun bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec python "$@"' task "$@"
