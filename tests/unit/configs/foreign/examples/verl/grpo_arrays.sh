#!/usr/bin/env bash
set -xeuo pipefail

MODEL_PATH=${MODEL_PATH:-models/tiny}
NNODES=${NNODES:-1}
DATA_DIR=${DATA_DIR:-$HOME/rows}
train_batch_size=${TRAIN_BATCH_SIZE:-128}
ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE:-32}
unused_setting=7

REPO_ROOT=$(cd -- "$(dirname "${BASH_SOURCE[0]}")/../.." >/dev/null 2>&1 && pwd)

DATA=(
    # the algorithm's, too
    algorithm.adv_estimator=gdpo
    +algorithm.gdpo_reward_keys='["right", "tidy"]'
    algorithm.kl_ctrl.kl_coef=0.001
    data.train_files="['$DATA_DIR/a.parquet', '$DATA_DIR/b.parquet']"
    data.val_files=$DATA_DIR/test.parquet
    data.train_batch_size=${train_batch_size}
    data.max_prompt_length=${MAX_PROMPT_LENGTH:-300}
    data.max_response_length=${MAX_RESPONSE_LENGTH:-150}
)
MODEL=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.model.use_remove_padding=True
)
ACTOR=(
    actor_rollout_ref.actor.optim.lr=${ACTOR_LR:-2e-6}
    actor_rollout_ref.actor.ppo_mini_batch_size=${ppo_mini_batch_size}
    actor_rollout_ref.actor.use_dynamic_bsz=True
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${PPO_MAX_TOKEN_LEN_PER_GPU:-4096}
    actor_rollout_ref.actor.use_kl_loss=False
    actor_rollout_ref.actor.kl_loss_coef=0.001
)
ROLLOUT=(
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=${ROLLOUT_N:-4}
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
    actor_rollout_ref.rollout.agent.num_workers=2
)
REWARD=(
    reward.custom_reward_function.path="$REPO_ROOT/rewards.py"
    reward.custom_reward_function.name=score
    reward.reward_manager.name=gdpo
)
TRAINER=(
    trainer.logger='["console","wandb"]'
    trainer.project_name=${PROJECT_NAME:-tiny}
    trainer.experiment_name=arrays
    trainer.n_gpus_per_node=${NGPUS_PER_NODE:-8}
    trainer.nnodes=${NNODES}
    trainer.val_before_train=False
    trainer.save_freq=20
    trainer.total_training_steps=50
    trainer.default_local_dir=$OUTPUT_DIR/arrays
)
EXTRA=(
)
LAUNCH=(python3)
if [ "${USE_UV:-1}" != 0 ]; then
    uv sync --extra vllm --frozen
    LAUNCH=(uv run --frozen --no-sync python3)
fi
"${LAUNCH[@]}" -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${MODEL[@]}" \
    "${ACTOR[@]}" \
    "${ROLLOUT[@]}" \
    "${REWARD[@]}" \
    "${TRAINER[@]}" \
    "${EXTRA[@]}" \
    "$@"
