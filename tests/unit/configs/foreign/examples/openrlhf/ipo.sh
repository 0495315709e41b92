deepspeed --module openrlhf.cli.train_dpo --save_path out/ipo --pretrain models/tiny --ipo --beta 0.3 \
   --dataset rows/pairs.jsonl --train_batch_size 8 --apply_chat_template --learning_rate 1e-6
