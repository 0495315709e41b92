read -r -d '' training_commands <<'EOF'
openrlhf.cli.train_kto
   --save_path ./out/kto
   --train_batch_size 64
   --pretrain models/tiny
   --param_dtype bf16
   --max_epochs 1
   --max_len 512
   --learning_rate 5e-7
   --dataset rows/labels.jsonl
   --input_key instruction
   --output_key response
   --label_key score
   --beta 0.1
   --desirable_loss_weight 1.5
   --max_samples 1024
   --gradient_checkpointing
EOF
deepspeed --module $training_commands
