#!/bin/bash
# Trains on several nodes: sbatch examples/slurm_train.sh FILE.toml [KEY=VALUE ...]
#
# One torchrun a node; they meet at the first node's port. Two minutes before the time is over Slurm sends SIGTERM: the
# run saves and ends, and the next job with the same command goes on, on as many nodes as it gets. All nodes need the
# same output.folder (NFS, Lustre).
#SBATCH --job-name=antiphon-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
set -euo pipefail

config=${1:?name the TOML file of the run}
shift
changes=()
for change in "$@"; do changes+=(--set "$change"); done

ranks_per_node=${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first_node=${nodes%%$'\n'*}
export OMP_NUM_THREADS=$(( ${SLURM_CPUS_PER_TASK:-1} / ranks_per_node > 0 ? ${SLURM_CPUS_PER_TASK:-1} / ranks_per_node : 1 ))

exec srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks_per_node" --max-restarts 3 \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$first_node:${MASTER_PORT:-29500}" \
  -m antiphon.cli.main train "$config" "${changes[@]}"
