"""
pip install math_verify

# For several GPUs
accelerate launch \
    --config_file examples/accelerate_configs/deepspeed_zero3.yaml \
    --num_processes=4 \
    examples/scripts/gspo.py \
    --model_name_or_path models/tiny \
    --output_dir out/gspo \
    --learning_rate 1e-5 \
    --torch_dtype bfloat16 \
    --max_prompt_length 200 \
    --max_completion_length 100 \
    --use_peft \
    --lora_target_modules "q_proj", "v_proj" \
    --log_completions \
    --per_device_train_batch_size 2 \
    --num_generations 4 \
    --importance_sampling_level sequence \
    --epsilon 3e-4 \
    --epsilon_high 4e-4 \
    --beta 0.0 \
    --loss_type grpo \
    --gradient_accumulation_steps 2 \
    --steps_per_generation 8
"""

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser
from trl.rewards import think_format_reward

if __name__ == "__main__":
    script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args()
    training_args.model_init_kwargs = dict(revision=model_args.model_revision, torch_dtype=torch.bfloat16)
    train_dataset, eval_dataset = load_dataset("me/sums", split=["train[:5%]", "test[:5%]"])
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        reward_funcs=[think_format_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
    )
    trainer.train()
