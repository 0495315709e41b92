#!/usr/bin/env bash
set -xeuo pipefail
project_name='DAPO'
exp_name='DAPO-tiny'  # a comment
use_kl_loss=False
clip_ratio_low=0.2
clip_ratio_high=0.28
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
enable_filter_groups=True
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
n_resp_per_prompt=16
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
WORKING_DIR=${WORKING_DIR:-"${PWD}"}
top_k=-1 # 0 for HF rollout

ray job submit --no-wait --runtime-env="${WORKING_DIR}/env.yaml" \
    --working-dir "${WORKING_DIR}" \
    -- python3 -m recipe.dapo.main_dapo \
    data.train_files="${RAY_DATA_HOME}/rows.parquet" \
    data.prompt_key=prompt \
    data.truncation='left' \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    data.gen_batch_size=${gen_prompt_bsz} \
    data.train_batch_size=${train_prompt_bsz} \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.actor.use_kl_loss=${use_kl_loss} \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_high} \
    actor_rollout_ref.actor.clip_ratio_c=10.0 \
    algorithm.filter_groups.enable=${enable_filter_groups} \
    algorithm.filter_groups.max_num_gen_batches=10 \
    algorithm.filter_groups.metric=acc \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \
    actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    # the lengths of all answers count
    actor_rollout_ref.actor.loss_agg_mode="token-mean" \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 \
    algorithm.rollout_correction.rollout_is=sequence \
    algorithm.rollout_correction.rollout_is_threshold=2.5 \
    algorithm.rollout_correction.rollout_is_batch_normalize=true \
    algorithm.rollout_correction.rollout_rs="seq_mean_k1" \
    algorithm.rollout_correction.rollout_rs_threshold="0.99_1.01" \
    actor_rollout_ref.rollout.calculate_log_probs=True \
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \
    actor_rollout_ref.rollout.top_k="${top_k}" \
    actor_rollout_ref.rollout.name=vllm \
    reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=$((1024 * 4)) \
    trainer.logger='["console","wandb"]' \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="${exp_name}" \
    trainer.default_local_dir="${RAY_DATA_HOME}/ckpts/${project_name}/${exp_name}" \
    trainer.max_actor_ckpt_to_keep=3 \
    trainer.total_epochs=1 \
    trainer.resume_mode=auto
