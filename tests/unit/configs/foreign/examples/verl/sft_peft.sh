set -x

if [ "$#" -lt 2 ]; then
    echo "Usage: sft_peft.sh <nproc_per_node> <save_path> [other_configs...]"
    exit 1
fi

nproc_per_node=$1
save_path=$2
shift 2

torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node \
     -m verl.trainer.fsdp_sft_trainer \
    data.train_files=rows/pairs.parquet \
    data.prompt_key=question \
    data.response_key=answer \
    optim.lr=1e-4 \
    data.prompt_dict_keys=['text'] \
    +data.response_dict_keys=['text'] \
    data.micro_batch_size_per_gpu=4 \
    model.partial_pretrain=models/tiny \
    trainer.default_local_dir=$save_path \
    trainer.project_name=tiny-sft \
    trainer.experiment_name=peft \
    trainer.logger=['console'] \
    trainer.total_epochs=1 \
    trainer.default_hdfs_dir=null $@ \
    model.lora_rank=32\
    model.lora_alpha=16 \
    model.target_modules=[q_proj,v_proj]

    # Or you can do this:
    # model.target_modules=all-linear
