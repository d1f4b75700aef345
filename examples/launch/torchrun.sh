#!/usr/bin/env bash
# Starts this machine's ranks. Run it on each machine, with the same FIRST:
#
#     FIRST=10.0.0.1 NODES=2 RANKS=8 INTERFACE=eth0 ./torchrun.sh train.py
set -euo pipefail
: "${FIRST:?an address of the first machine, such as 10.0.0.1}"
export GLOO_SOCKET_IFNAME=${INTERFACE:-} NCCL_SOCKET_IFNAME=${INTERFACE:-} # of the network between the machines
[ -n "${INTERFACE:-}" ] || unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME
export TACIT_ALGORITHM=${TACIT_ALGORITHM:-lowbit} # where the script attaches tacit.from_env()
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${RANKS:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$FIRST:${PORT:-29500}" --rdzv-id "${RUN:-tacit}" "$@"
