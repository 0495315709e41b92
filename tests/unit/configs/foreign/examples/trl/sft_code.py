"""Trains a tiny model on prompts and completions; everything is set in the code."""

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

MODEL = "models/tiny"
RATE = 5e-4

quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.bfloat16, quantization_config=quantization)
tokenizer = AutoTokenizer.from_pretrained(MODEL)
train = load_dataset("json", data_files="rows/pairs.jsonl", split="train")
held_out = load_dataset("me/chats", split="test")

config = SFTConfig(
    output_dir="out/code",
    learning_rate=RATE,
    max_steps=45,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    completion_only_loss=True,
    warmup_ratio=0.1,
    lr_scheduler_type="constant",
    logging_steps=len(train) // 10,
    model_init_kwargs={"use_cache": False},
    optim="adamw_torch",
)
trainer = SFTTrainer(
    model=model,
    args=config,
    train_dataset=train,
    eval_dataset=held_out,
    processing_class=tokenizer,
    peft_config=LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", bias="none"),
)
trainer.train()
