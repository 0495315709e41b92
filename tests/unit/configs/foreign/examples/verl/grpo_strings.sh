#!/bin/bash
set -x
backend=megatron # fsdp, megatron
adv_estimator=grpo
kl_coef=0.001
max_prompt_length=$((1024 / 4))
max_response_length=$((1024))
train_batch_size=32
actor_max_token_len_per_gpu=$(((max_prompt_length + max_response_length) * 4))
default_local_dir="$HOME/results"
experiment_name=strings-$backend

ACTOR_FSDP_CONFIG="
    actor_rollout_ref.actor.fsdp_config.strategy=$backend \
    actor_rollout_ref.actor.fsdp_config.param_offload=True"

ACTOR_MEGATRON_CONFIG="
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
    +actor_rollout_ref.actor.megatron.override_transformer_config.apply_rope_fusion=True"

ACTOR_CONFIG="
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$actor_max_token_len_per_gpu"
CRITIC_CONFIG="
    critic.model.path=models/critic"
CRITIC_MEGATRON_CONFIG="${ACTOR_MEGATRON_CONFIG//actor_rollout_ref.actor/critic}"

if [[ $backend == "megatron" ]]; then
    CONFIG_NAME=ppo_megatron_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_MEGATRON_CONFIG"
    if [[ $adv_estimator == "gae" ]]; then
        CRITIC_CONFIG="$CRITIC_CONFIG $CRITIC_MEGATRON_CONFIG"
    else
        CRITIC_CONFIG=""
    fi
else # fsdp
    CONFIG_NAME=ppo_trainer
    ACTOR_CONFIG="$ACTOR_CONFIG $ACTOR_FSDP_CONFIG"
fi

ROLLOUT_CONFIG="
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7"
REWARD_CONFIG="
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.max_resp_len=${max_response_length}"

export VLLM_ATTENTION_BACKEND=FLASH_ATTN
cd /tmp

python -m verl.trainer.main_ppo \
    --config-path=./config \
    --config-name=$CONFIG_NAME \
    algorithm.adv_estimator=$adv_estimator \
    algorithm.kl_ctrl.kl_coef=$kl_coef \
    algorithm.gamma=$gae_gamma \
    data.train_files="$HOME/rows/train.parquet" \
    data.train_batch_size=$train_batch_size \
    data.max_prompt_length=$max_prompt_length \
    data.max_response_length=$max_response_length \
    trainer.use_legacy_worker_impl=disable \
    trainer.logger=['console','tensorboard'] \
    trainer.experiment_name=$experiment_name \
    trainer.default_local_dir=$default_local_dir \
    trainer.n_gpus_per_node=$SLURM_GPUS_PER_NODE \
    trainer.total_epochs=100 \
    $ACTOR_CONFIG \
    $CRITIC_CONFIG \
    $ROLLOUT_CONFIG \
    $REWARD_CONFIG 2>&1 | tee log.txt
