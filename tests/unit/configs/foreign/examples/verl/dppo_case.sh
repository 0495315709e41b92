set -euo pipefail
LOSS_MODE=${LOSS_MODE:-dppo_kl}
case $LOSS_MODE in
    dppo_tv)  CLIP_DEFAULT=0.15 ;;
    dppo_kl)  CLIP_DEFAULT=0.05 ;;
    *) echo "Unknown LOSS_MODE: $LOSS_MODE"; exit 1 ;;
esac
clip_ratio_low=${CLIP_LOW:-$CLIP_DEFAULT}
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="['$HOME/rows/train.parquet']" \
    data.train_batch_size=16 \
    actor_rollout_ref.model.path=models/tiny \
    actor_rollout_ref.actor.policy_loss.loss_mode=${LOSS_MODE} \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \
    actor_rollout_ref.actor.clip_ratio_low=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_high=${clip_ratio_low} \
    actor_rollout_ref.actor.clip_ratio_c=10000.0 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=4 \
    model_engine=megatron \
    trainer.total_training_steps=20
