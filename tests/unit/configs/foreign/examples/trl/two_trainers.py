from datasets import load_dataset
from trl import SFTConfig, SFTTrainer, GRPOConfig, GRPOTrainer
warm = load_dataset("me/warm", split="train")
SFTTrainer("models/a", args=SFTConfig(learning_rate=1e-3, output_dir="a"), train_dataset=warm).train()
rows = load_dataset("me/rows")
rows = rows.map(lambda row: row)
args = GRPOConfig(learning_rate=1e-5, output_dir="b", beta=0.1)
args.beta = 0.2
GRPOTrainer("models/tiny", args=args, train_dataset=rows["train"], reward_funcs=[len]).train()
