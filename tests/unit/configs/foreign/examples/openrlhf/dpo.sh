set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --save_path ./out/dpo \
   --save_steps 50 \
   --eval_steps -1 \
   --train_batch_size 256 \
   --micro_train_batch_size 1 \
   --pretrain models/tiny \
   --ref_pretrain models/tiny \
   --param_dtype bf16 \
   --max_epochs 1 \
   --max_len 8192 \
   --learning_rate 5e-7 \
   --beta 0.25 \
   --label_smoothing 0.1 \
   --nll_loss_coef 0.2 \
   --dataset rows/pairs.jsonl \
   --apply_chat_template \
   --prompt_key question \
   --chosen_key good \
   --rejected_key bad \
   --attn_implementation flash_attention_2 \
   --load_checkpoint \
   --packing_samples \
   --ref_offload \
   --gradient_checkpointing
EOF
if [[ ${1} != "slurm" ]]; then
    torchrun --standalone --nproc-per-node ${NPROC_PER_NODE:-8} -m $training_commands
fi
