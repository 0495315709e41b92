clip=0.4
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=$HOME/rows/train.parquet \
    data.train_batch_size=16 \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean \
    actor_rollout_ref.actor.clip_ratio_low=$clip \
    actor_rollout_ref.actor.clip_ratio_high=$clip \
    actor_rollout_ref.actor.ppo_mini_batch_size=5 \
    actor_rollout_ref.rollout.n=4 \
    trainer.total_training_steps=20
