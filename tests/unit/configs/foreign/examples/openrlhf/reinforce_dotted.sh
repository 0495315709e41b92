MODEL_PATH="models/tiny"
REWARD_FUNC_PATH="rewards/math_reward_func.py"
python3 -m openrlhf.cli.train_ppo_ray \
   --algo.kl.init_coef 1e-4 \
   --algo.kl.use_loss \
   --algo.kl.estimator k2 \
   --algo.advantage.estimator reinforce_baseline \
   --algo.advantage.gamma 1.0 \
   --algo.dynamic_filtering_enable \
   --algo.dynamic_filtering_range 0 1 \
   --actor.eps_clip_low_high 0.2 0.27 \
   --actor.model_name_or_path ${MODEL_PATH} \
   --reward.remote_url ${REWARD_FUNC_PATH} \
   --ckpt.output_dir out/reinforce \
   --ckpt.save_steps 5 \
   --train.batch_size 256 \
   --rollout.batch_size 32 \
   --rollout.n_samples_per_prompt 16 \
   --train.num_episodes 100 \
   --rollout.max_new_tokens 64 \
   --actor.adam.lr 1e-6 \
   --data.prompt_dataset rows/prompts.jsonl \
   --data.input_key prompt \
   --data.label_key label \
   --eval.dataset rows/held_out.jsonl \
   --eval.steps 5 \
   --eval.n_samples_per_prompt 4 \
   --data.apply_chat_template
