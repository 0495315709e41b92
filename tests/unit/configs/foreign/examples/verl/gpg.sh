a=$HOME/rows/a.parquet
b=$HOME/rows/b.parquet
train_files="['$a', '$b']"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gpg \
    data.train_files="$train_files" \
    data.val_files="$train_files" \
    data.train_batch_size=64 \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_kl_loss=False \
    actor_rollout_ref.actor.use_gpg_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.n=5 \
    trainer.total_epochs=15
