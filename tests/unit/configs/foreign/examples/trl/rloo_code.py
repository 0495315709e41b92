"""
An example of RLOO with everything in the code.

  pip install math_verify
  accelerate launch --config_file examples/accelerate_configs/deepspeed_zero3.yaml examples/scripts/rloo_code.py
"""

import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import RLOOConfig, RLOOTrainer
from trl.rewards import accuracy_reward


def main():
    train_dataset, eval_dataset = load_dataset("me/sums", split=["train[:5%]", "test[:5%]"])
    train_dataset = train_dataset.map(lambda row: {"prompt": row["question"]}, remove_columns=["question"])
    training_args = RLOOConfig(
        output_dir="out/rloo",
        model_init_kwargs={"dtype": torch.bfloat16},
        learning_rate=1e-5,
        max_completion_length=60,
        gradient_accumulation_steps=2,
        steps_per_generation=8,
        use_vllm=True,
        vllm_gpu_memory_utilization=0.5,
        run_name="tiny-rloo",
    )
    trainer = RLOOTrainer(
        model="models/tiny",
        args=training_args,
        reward_funcs=[accuracy_reward],
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        peft_config=LoraConfig(),
    )
    trainer.train()


main()
