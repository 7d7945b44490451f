#!/usr/bin/env bash
# Several nodes by Slurm: Ray's head on the first, Ray's workers on the others, the trainer beside the head.
# Submit it from the root of the clone; settings: examples/launch/common.sh.
#
#   ALFWORLD_DATA=... sbatch --nodes=2 --gpus-per-node=8 examples/launch/slurm.sh [overrides]
#SBATCH --job-name=turnkey
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
set -euo pipefail
NODES="$SLURM_JOB_NUM_NODES"
GPUS="${GPUS:-8}"
PORT="${PORT:-6379}"
source "$SLURM_SUBMIT_DIR/examples/launch/common.sh" # Slurm runs a copy of this file

mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on_head=(srun --overlap --nodes=1 --ntasks=1 --nodelist="${hosts[0]}")
ip="$("${on_head[@]}" hostname --ip-address)"
ip="${ip%% *}"

"${on_head[@]}" ray start --head --node-ip-address="$ip" --port="$PORT" --num-gpus="$GPUS" --block &
if [ "$NODES" -gt 1 ]; then
  sleep "${HEAD_SECONDS:-20}"
  srun --overlap --nodes="$((NODES - 1))" --ntasks="$((NODES - 1))" --exclude="${hosts[0]}" \
    ray start --address="$ip:$PORT" --num-gpus="$GPUS" --block &
fi

export RAY_ADDRESS="$ip:$PORT" # what `ray.init` joins, here and in verl
# verl stops at once where the cluster has fewer GPUs than it asks for.
count="import ray; ray.init(log_to_driver=False); print(int(ray.cluster_resources().get('GPU', 0)))"
for _ in {1..60}; do
  found="$("${on_head[@]}" python -c "$count" 2>/dev/null | tail -n 1 || true)"
  [ "${found:-0}" -ge "$((NODES * GPUS))" ] && break
  sleep 5
done

"${on_head[@]}" python -m verl.trainer.main_ppo "${LINE[@]}" "$@"
