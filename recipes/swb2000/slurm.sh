#!/bin/bash
# SWB-2000 on 8 machines of 8 GPUs:
#
#     SWB=... FISHER="F1 F2 F3 F4" CALLHOME="C1 C2" HUB5="H1 H2" OUT=/shared/swb2000 \
#         sbatch recipes/swb2000/slurm.sh
#
# OUT lies on a file system that all machines share. Two minutes before its time is up,
# SLURM sends SIGTERM: the training saves, and the job goes on where it was when it gets
# machines again.
#SBATCH --job-name=swb2000
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --distribution=block
#SBATCH --time=12:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
: "${SWB:?}" "${FISHER:?}" "${CALLHOME:?}" "${HUB5:?}" "${OUT:?}"
export OMP_NUM_THREADS=1
# The interface of the network between the machines; see docs/launching.md.
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-ib0}"

# Stages before `train` run as processes of the first task of each machine: without
# --cpu-bind=none they would have its 8 cores alone.
# shellcheck disable=SC2086  # several folders each
srun --kill-on-bad-exit=1 --cpu-bind=none \
    python -m recipes.swb2000 --nodes "$SLURM_NNODES" --cores 64 \
    --learners 8 --super-learners 8 --run "${RUN:-hadpsgd}" \
    --corpus "$SWB" --fisher $FISHER --callhome $CALLHOME --hub5 $HUB5 \
    --out "$OUT" "$@" && exit 0

# SIGTERM, a machine that failed, or an error: once more, but not for ever.
if [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit 1
