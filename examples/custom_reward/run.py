"""The example through the Python API: the same run as run.yaml, with the rewards passed as objects."""

import sys
from pathlib import Path

from rewards import Novelty, alphabet

import rlpipe
from rlpipe.configs.compose import quoted

ROWS = Path(__file__).with_name("rows.jsonl")

if __name__ == "__main__":
    config = rlpipe.load_config(
        [
            "name=custom_reward_api",
            "model=full",
            "model.path=${output}/random",
            "model.prepare=rlpipe.quickstart:make_policy",
            "model.dtype=float32",
            "data=jsonl",
            f"data.path={quoted(ROWS)}",
            "data.max_prompt_tokens=32",
            "replay=async",
            "algorithm.num_steps=100",
            "algorithm.groups_per_step=8",
            "algorithm.group_size=16",
            "rollout.sampling.max_tokens=12",
            "learner.optimizer.lr=3e-4",
            "health.truncated.enabled=false",
            *sys.argv[1:],
        ]
    )
    summary = rlpipe.train(config, rewards=[alphabet, Novelty])
    print(f"reward {summary['reward_start']:.2f} -> {summary['reward_end']:.2f}")
