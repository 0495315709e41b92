"""
Run it with the commands below. It's like DPO.

# QLoRA:
python examples/scripts/kto.py \
    --model_name_or_path=models/tiny \
    --per_device_train_batch_size 8 \
    --max_steps 20 \
    --learning_rate 1e-6 \
    --lr_scheduler_type=cosine \
    --gradient_accumulation_steps 1 \
    --desirable_weight 1.2 \
    --output_dir=out/kto \
    --warmup_ratio 0.1 \
    --report_to wandb \
    --bf16 \
    --logging_first_step \
    --use_peft \
    --load_in_4bit \
    --lora_target_modules=all-linear \
    --lora_r=8 \
    --lora_alpha=16
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import KTOConfig, KTOTrainer


@dataclass
class ScriptArguments:
    dataset_name: str = "me/labels"


def main(script_args, training_args, model_args):
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, trust_remote_code=model_args.trust_remote_code
    )
    ref_model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    dataset = load_dataset("me/labels")
    KTOTrainer(model, ref_model, args=training_args, train_dataset=dataset["train"]).train()
