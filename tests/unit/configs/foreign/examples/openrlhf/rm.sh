set -x
export PATH=$HOME/.local/bin/:$PATH

deepspeed ../train_rm.py \
     --save_path "./out/rm" \
     --train_batch_size 32 \
     --micro_train_batch_size 1 \
     --pretrain "models/tiny" \
     --bf16 \
     --max_len 1536 \
     --zero_stage 3 \
     --learning_rate 9e-6 \
     --loss sigmoid \
     --apply_chat_template \
     --dataset 'rows/pairs.jsonl,me/pairs,rows/more.parquet' \
     --dataset_probs '0.7,0.1,0.2'
     # --load_model './out/sft_model.pt'
