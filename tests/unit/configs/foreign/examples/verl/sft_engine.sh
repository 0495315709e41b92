#!/usr/bin/env bash
set -xeuo pipefail
ENTRYPOINT=${ENTRYPOINT:-"-m verl.trainer.sft_trainer"}
NUM_GPUS=${NUM_GPUS:-8}
TRAIN_FILES=~/rows/talks.parquet
backend=${BACKEND:-fsdp}
ckpts_home=${ckpts_home:-~/out/sft-${backend}}
ENGINE_CONFIG="\
    engine=${backend} \
    optim=${backend} \
    optim.lr=1e-5 \
    optim.lr_warmup_steps_ratio=0.2 \
    optim.weight_decay=0.1 \
    optim.betas="[0.9,0.98]" \
    optim.clip_grad=2.0 \
    optim.lr_scheduler_type=cosine \
    optim.min_lr_ratio=0.1 \
    engine.ulysses_sequence_parallel_size=2"
mkdir -p "${ckpts_home}"
torchrun --standalone --nnodes=1 --nproc_per_node=${NUM_GPUS} ${ENTRYPOINT} \
    data.train_files="${TRAIN_FILES}" \
    data.train_batch_size=32 \
    data.max_length=1024 \
    data.pad_mode=left_right \
    data.use_dynamic_bsz=True \
    data.max_token_len_per_gpu=2048 \
    data.messages_key=talk \
    model.path=models/tiny \
    ${ENGINE_CONFIG} \
    trainer.test_freq=after_each_epoch \
    trainer.save_freq=-1 \
    trainer.logger=['console','file'] \
    trainer.experiment_name="engine" \
    trainer.total_training_steps=200 \
    trainer.default_local_dir="${ckpts_home}" \
    trainer.resume_mode=disable \

    # trainer.max_ckpt_to_keep=1 \

rm -rf "${ckpts_home:?}/*"
