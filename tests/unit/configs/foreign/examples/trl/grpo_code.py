"""Rewards short answers."""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer

dataset = load_dataset("parquet", data_files="rows/prompts.parquet")["train"]


def short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


extra = dict(top_p=0.9, min_p=0.02)
training_args = GRPOConfig(
    output_dir="out/grpo",
    per_device_train_batch_size=6,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_generations=3,
    num_iterations=2,
    max_completion_length=77,
    max_steps=80,
    save_steps=16,
    beta=0.01,
    loss_type="cispo",
    epsilon_high=5.0,
    scale_rewards="batch",
    use_vllm=True,
    vllm_mode="colocate",
    vllm_importance_sampling_mode="token_mask",
    vllm_importance_sampling_cap=4.0,
    chat_template_kwargs={"enable_thinking": False},
    learning_rate=float("2e-6"),
    **extra,
)
training_args.temperature = 0.8
trainer = GRPOTrainer(model="models/tiny", reward_funcs=[short], args=training_args, train_dataset=dataset)
trainer.train()
