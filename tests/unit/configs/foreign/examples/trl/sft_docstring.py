"""
# Full training
```
python trl/scripts/sft.py \
    --model_name_or_path models/tiny \
    --dataset_name rows/talks.jsonl \
    --learning_rate 2.0e-4 \
    --max_steps 30 \
    --packing \
    --per_device_train_batch_size 2 \
    --output_dir out/full \
    --no_remove_unused_columns
    --report_to none
```

It doesn't need a GPU's memory, isn't slow, and that's it.

# LoRA
```
python trl/scripts/sft.py \
    --model_name_or_path models/tiny \
    --dataset_name rows/talks.jsonl \
    --use_peft \
    --lora_r 32 \
    --output_dir out/lora
```
"""

from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser, get_peft_config

if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, dtype=model_args.dtype)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    trainer = SFTTrainer(
        model=model,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()
