#!/bin/bash
# A job that may end at any time and goes on where it was: sbatch examples/slurm_requeue.sh
#
#SBATCH --job-name=lowdiff
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1       # torchrun, which starts the trainers
#SBATCH --cpus-per-task=32        # for all of them, their data loaders and lowdiff's writers
#SBATCH --time=04:00:00
#SBATCH --requeue                 # after a preemption or a node's failure, by Slurm itself
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120       # two minutes before the time is up, to this script

set -u
RUN=${RUN:-runs/gpt}              # a folder that all nodes see
STEPS=${STEPS:-100000}
PROCESSES_PER_NODE=${PROCESSES_PER_NODE:-8}
PORT=${PORT:-29500}

# A requeue sends SIGTERM to the trainers: lowdiff makes the last steps durable at once, and sets
# checkpointer.preempted for loops that look at it.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # workers that --max-restarts starts need a fresh store
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
  --nnodes="$SLURM_NNODES" --nproc-per-node="$PROCESSES_PER_NODE" --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-endpoint="$first_node:$PORT" \
  --rdzv-id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
  examples/ddp_gpt.py "$RUN" --steps "$STEPS" &
job=$!
wait $job # in the background, because bash runs a trap only between commands
code=$?
while kill -0 $job 2>/dev/null; do # the trap interrupted that wait
  wait $job
  code=$?
done
exit $code
