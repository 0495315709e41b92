"""
Usage:

python examples/scripts/dpo_online.py \
    --model_name_or_path models/tiny  \
    --reward_model_path models/reward \
    --dataset_name rows/prompts.jsonl \
    --learning_rate 5.0e-7 \
    --output_dir out/online \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 2 \
    --max_new_tokens 53 \
    --warmup_ratio 0.1 \
    --missing_eos_penalty 1.0

With LoRA:
python examples/scripts/dpo_online.py \
    --model_name_or_path models/tiny  \
    --use_peft
"""

from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import OnlineDPOConfig, OnlineDPOTrainer


def main(script_args, training_args, model_config):
    model = AutoModelForCausalLM.from_pretrained(model_config.model_name_or_path)
    reward_model = AutoModelForSequenceClassification.from_pretrained(training_args.reward_model_path, num_labels=1)
    OnlineDPOTrainer(model=model, reward_model=reward_model, args=training_args).train()
