#!/bin/bash
# One process for each of two GPUs.
export WANDB_API_KEY=abcdef0123456789
MODEL=${MODEL:-models/tiny}
accelerate launch --config_file accelerate/fsdp2.yaml --num_processes 2 \
    trl/scripts/sft.py \
    --model_name_or_path "$MODEL" \
    --dataset_name me/chats --dataset_config small --dataset_train_split train \
    --learning_rate 3.0e-5 \
    --num_train_epochs 2 \
    --per_device_train_batch_size 4 \
    --gradient_accumulation_steps 2 \
    --gradient_checkpointing \
    --eos_token '<|end|>' \
    --eval_strategy steps \
    --eval_steps 25 \
    --assistant_only_loss True \
    --max_length 2048 \
    --lr_scheduler_type cosine_with_min_lr \
    --lr_scheduler_kwargs '{"min_lr_rate": 0.2}' \
    --attn_implementation kernels-community/vllm-flash-attn3 \
    --report_to wandb \
    --output_dir out/sft \
    --push_to_hub
