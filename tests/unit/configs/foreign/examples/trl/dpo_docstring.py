"""
Full training:
python trl/scripts/dpo.py \
    --dataset_name rows/pairs.jsonl \
    --dataset_streaming \
    --model_name_or_path models/tiny \
    --learning_rate 5.0e-7 \
    --max_steps 24 \
    --per_device_train_batch_size 3 \
    --gradient_accumulation_steps 2 \
    --beta 0.05 \
    --loss_type ipo \
    --label_smoothing 0.0 \
    --precompute_ref_log_probs \
    --eval_strategy no \
    --output_dir out/dpo \
    --no_remove_unused_columns
"""

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser


def main(script_args, training_args, model_args):
    dataset = load_dataset(script_args.dataset_name, streaming=script_args.dataset_streaming)
    trainer = DPOTrainer(model_args.model_name_or_path, args=training_args, train_dataset=dataset["train"])
    trainer.train()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, DPOConfig, ModelConfig)).parse_args_and_config())
