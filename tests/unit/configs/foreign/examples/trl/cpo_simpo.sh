set -e
RATE=8e-6
ARGS="--loss_type simpo --cpo_alpha 0.5"
trl cpo --model_name_or_path models/tiny $ARGS --dataset_name rows/pairs.jsonl \
    --per_device_train_batch_size 2 --max_steps 10 --learning_rate $RATE --simpo_gamma 0.8 --output_dir out/simpo
