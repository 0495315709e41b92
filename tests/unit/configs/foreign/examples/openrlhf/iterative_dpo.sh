set -x
checkSuccess() {
   if [[ $? != 0 ]]; then
      echo "FAILED $1"
      exit 1
   fi
}
mkdir -p ./out/iter
RM_OUTPUT=./out/iter/rm.jsonl
POLICY_MODEL_PATH=models/tiny
iter=0
while (($iter < 5)); do
   if ((iter > 0)); then
      POLICY_MODEL_PATH=./out/iter/checkpoint
   fi
   read -r -d '' generate_commands <<EOF
openrlhf.cli.batch_inference
   --eval_task generate_vllm \
   --model_name_or_path $POLICY_MODEL_PATH
EOF
   python -m $generate_commands
   checkSuccess "GENERATE"
   read -r -d '' dpo_commands <<EOF
openrlhf.cli.train_dpo \
   --max_len 4096 \
   --dataset $RM_OUTPUT \
   --dataset_probs 1.0 \
   --prompt_key prompt \
   --train_batch_size 128 \
   --pretrain $POLICY_MODEL_PATH \
   --apply_chat_template \
   --learning_rate 5e-7
EOF
   torchrun --standalone --nproc-per-node ${NPROC_PER_NODE:-8} -m $dpo_commands
   checkSuccess "DPO"
   iter=$((iter + 1))
done
