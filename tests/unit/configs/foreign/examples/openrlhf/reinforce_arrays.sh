#!/bin/bash

SCRIPT_DIR="$(dirname "$0")"
WORK_DIR=$(cd "$SCRIPT_DIR/../.." && pwd)

set -x
MODEL_PATH="models/tiny"
SAVE_PATH="${WORK_DIR}/exp/tiny"
AGENT_FUNC_PATH="agent_func.py"

CKPT_ARGS=(
   --pretrain ${MODEL_PATH}
   # --reward_pretrain ${REWARD_MODEL}
   --load_checkpoint

   --save_path ${SAVE_PATH}
   --ckpt_path "${SAVE_PATH}/ckpt"
   --max_ckpt_num 3
   --save_steps 10
)
ROLLOUT_ARGS=(
   --agent_func_path ${AGENT_FUNC_PATH}
   --prompt_data me/prompts
   --prompt_split test
   --input_key prompt
   --label_key label
   --prompt_max_len 10240
   --generate_max_len 64000
   --apply_chat_template
   --rollout_batch_size 128
   --n_samples_per_prompt 8
   --train_batch_size 1024
   --rollout_max_tokens_per_gpu 32768
   --max_epochs 1
   --num_episodes 1
)
OPTIMIZER_ARGS=(
   --advantage_estimator reinforce
   --actor_learning_rate 5e-7
   --entropy_loss_coef 0.001
   --init_kl_coef 1e-5
   --vllm_enable_is_correction
   --vllm_is_correction_type tis
   --vllm_is_truncated_threshold 2
)
LOG_ARGS=(
   --use_tensorboard ${SAVE_PATH}/runs
   --logging_steps 1
   --eval_steps -1
)

ray job submit --address="http://127.0.0.1:8265" \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   ${CKPT_ARGS[@]} \
   ${ROLLOUT_ARGS[@]} \
   ${OPTIMIZER_ARGS[@]} \
   ${LOG_ARGS[@]}
