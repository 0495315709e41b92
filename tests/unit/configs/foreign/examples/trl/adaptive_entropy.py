"""
Holds the entropy up.

```
python examples/scripts/grpo.py \
    --model_name_or_path models/tiny \
    --output_dir out/entropy \
    --learning_rate 1e-6 \
    --num_generations 8 \
    --max_completion_length 40 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 4 \
    --max_steps 50 \
    --use_adaptive_entropy \
    --entropy_coef_delta 0.002 \
    --entropy_coef_max 0.05
```
"""

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser

script_args, training_args, model_args = TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args()
training_args.scale_rewards = "batch"
training_args.multi_objective_aggregation = "sum_then_normalize"
model_name = model_args.model_name_or_path or "models/tiny"
dataset = load_dataset("me/sums")["train"]
GRPOTrainer(model=model_name, args=training_args, train_dataset=dataset, reward_funcs=len).train()
