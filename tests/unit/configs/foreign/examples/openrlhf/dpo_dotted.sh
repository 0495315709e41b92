read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \
   --ckpt.output_dir ./out/dpo \
   --ckpt.save_steps -1 \
   --logger.logging_steps 1 \
   --eval.steps -1 \
   --train.batch_size 48 \
   --train.micro_batch_size 1 \
   --model.model_name_or_path models/tiny \
   --ds.param_dtype bf16 \
   --data.max_len 8192 \
   --adam.lr 5e-7 \
   --model.beta 0.1 \
   --data.dataset rows/pairs.jsonl \
   --data.apply_chat_template \
   --data.chosen_key good \
   --data.rejected_key bad \
   --ds.attn_implementation flash_attention_2 \
   --ckpt.load_enable \
   --model.gradient_checkpointing_enable
EOF
deepspeed --module $training_commands
