"""
Full training:
python examples/scripts/prm.py \
    --model_name_or_path models/tiny \
    --dataset_name rows/steps.jsonl \
    --output_dir out/prm \
    --per_device_train_batch_size 8 \
    --max_steps 20 \
    --gradient_checkpointing True \
    --learning_rate 1.0e-5 \
    --step_separator "<s>" \
    --max_completion_length 300
"""

from datasets import load_dataset
from transformers import AutoModelForTokenClassification
from trl.experimental.prm import PRMConfig, PRMTrainer


def main(script_args, training_args, model_args):
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, num_labels=2)
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    dataset = dataset.filter(lambda row: len(row["completions"]) > 0)
    PRMTrainer(model=model, args=training_args, train_dataset=dataset["train"]).train()
