#!/bin/bash
ulimit -n 65535
EXPERIMENT_NAME=multiturn
torchrun --nnodes=1 --nproc_per_node=8 \
     -m verl.trainer.fsdp_sft_trainer \
    data.max_length=16384 \
    data.train_batch_size=128 \
    data.micro_batch_size_per_gpu=16 \
    data.train_files=rows/talks.parquet \
    data.multiturn.enable=true \
    data.multiturn.messages_key=talk \
    data.multiturn.tools_key=tools \
    model.partial_pretrain=models/tiny \
    model.trust_remote_code=true \
    model.fsdp_config.cpu_offload=false \
    optim.lr=1e-6 \
    trainer.default_local_dir=out/$EXPERIMENT_NAME \
    trainer.total_training_steps=30 \
    ulysses_sequence_parallel_size=4 \
    use_remove_padding=true
