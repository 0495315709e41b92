python3 -m openrlhf.cli.train_ppo_ray \
   --vllm_num_engines 4 \
   --init_kl_coef 0 \
   --advantage_estimator reinforce_baseline \
   --dynamic_filtering \
   --dynamic_filtering_reward_range 0 1 \
   --eps_clip_low_high 0.2 0.27 \
   --pretrain models/tiny \
   --remote_rm_url rewards/reward_func.py \
   --save_path out/dapo \
   --save_steps 20 \
   --train_batch_size 64 \
   --rollout_batch_size 16 \
   --n_samples_per_prompt 4 \
   --prompt_max_len 100 \
   --generate_max_len 100 \
   --actor_learning_rate 5e-7 \
   --prompt_data rows/prompts.jsonl \
   --input_key prompt \
   --label_key answer \
   --apply_chat_template \
   --use_dynamic_batch \
   --train_max_tokens_per_gpu 3000 \
   --enable_vllm_is_correction \
   --vllm_is_truncated_threshold 0.5 5.0 \
   --use_icepop \
   --stop_properly_penalty_coef 0.0 \
   --eval_dataset rows/held_out.jsonl \
   --eval_steps 5 \
   --eval_temperature 1.0

# You could also try
#   --kl_estimator k2 \
