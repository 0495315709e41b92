#!/bin/bash
#SBATCH -N 2
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST") # the node names
nodes_array=( $nodes )
node_1=${nodes_array[0]}
echo "$(date '+%Y') Job ${SLURM_JOB_ID} started ..." &>> log.txt
for ((i = 1; i < 2; i++)); do
  node_i=${nodes_array[$i]}
  srun --nodes=1 -w "$node_i" bash -c "ray start --address $node_1" &>> log.txt &
  sleep 1s;
done

srun --overlap --nodes=1 -w "$node_1" bash -c \
  "pip install ray[default] \
  && ray job submit --address=http://localhost:8265 \
    --runtime-env-json='{\"working_dir\": \"/openrlhf\"}' \
    -- python3 examples/train_ppo_ray.py \
    --actor_num_gpus_per_node 8 \
    --advantage_estimator rloo \
    --pretrain models/tiny \
    --save_path out/slurm \
    --train_batch_size 32 \
    --rollout_batch_size 32 \
    --n_samples_per_prompt 2 \
    --init_kl_coef 0.01 \
    --prompt_data rows/prompts.jsonl \
    --use_wandb {wandb_token}" &>> log.txt
