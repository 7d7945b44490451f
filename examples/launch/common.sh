# What the launch scripts share, to be sourced: writes the tasks where they are missing, and puts the overrides of verl
# into the array LINE. From the environment, with these defaults:
#
# METHOD=gigpo ENVIRONMENT=alfworld      names of +turnkey and +turnkey/env
# PRESET=gigpo_alfworld_1.5b      published settings (`turnkey list presets`); empty for verl's defaults and your own overrides
# MODEL=Qwen/Qwen2.5-1.5B-Instruct      a name or a folder that all nodes see
# TASKS=data/alfworld OUT=runs/$PRESET      folders that all nodes see
# NODES=1 GPUS=2 TP=1      nodes, GPUs of each, and GPUs that share a model while it generates
# URL=http://127.0.0.1:8020 GOALS=...      WebShop's server, and the number of its goals (docs/envs/webshop.md)
METHOD="${METHOD:-gigpo}"
ENVIRONMENT="${ENVIRONMENT:-alfworld}"
PRESET="${PRESET-gigpo_alfworld_1.5b}"
MODEL="${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}"
TASKS="${TASKS:-$PWD/data/$ENVIRONMENT}"
OUT="${OUT:-$PWD/runs/${PRESET:-$METHOD-$ENVIRONMENT}}"
NODES="${NODES:-1}"
GPUS="${GPUS:-2}"

if [ ! -f "$TASKS/train.parquet" ]; then
  case "$ENVIRONMENT" in
    alfworld)
      turnkey tasks "$TASKS" --env turnkey/ALFWorld-v0 --val-kwargs '{"split": "valid_unseen"}' \
        --train 4096 --val 128 --data-source alfworld
      ;;
    webshop)
      : "${GOALS:?set it to the number of goals that your shop has: curl -d '{}' $URL/info}"
      turnkey tasks "$TASKS" --env turnkey/WebShop-v0 --kwargs "{\"goals\": [500, $GOALS]}" \
        --val-kwargs '{"goals": [0, 500]}' --train 4096 --val 128 --data-source webshop
      ;;
    *)
      echo "there is no $TASKS/train.parquet: write it with \`turnkey tasks\`" >&2
      exit 1
      ;;
  esac
fi

# Quoted twice: the inner quotes are for Hydra, whatever a path holds.
LINE=(
  "+turnkey=$METHOD" "+turnkey/env=$ENVIRONMENT" ${PRESET:+"+turnkey/preset=$PRESET"}
  ${URL:+turnkey.env.kwargs.url="$URL"}
  "data.train_files=\"$TASKS/train.parquet\""
  "data.val_files=\"$TASKS/val.parquet\""
  "actor_rollout_ref.model.path=\"$MODEL\""
  actor_rollout_ref.model.enable_gradient_checkpointing=true
  actor_rollout_ref.model.use_remove_padding=true
  actor_rollout_ref.rollout.name=vllm
  "actor_rollout_ref.rollout.tensor_model_parallel_size=${TP:-1}"
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6
  "trainer.n_gpus_per_node=$GPUS"
  "trainer.nnodes=$NODES"
  trainer.save_freq=25
  "trainer.default_local_dir=\"$OUT/checkpoints\""
  "trainer.project_name=$ENVIRONMENT"
  "trainer.experiment_name=${PRESET:-$METHOD}"
  "turnkey.log.trajectories=\"$OUT/turnkey_log\""
  "hydra.run.dir=\"$OUT/hydra\""
)
