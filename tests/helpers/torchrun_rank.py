"""A rank started by torchrun, without Ray, that trains some steps with the given strategy and writes its results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from learner_cases import make_learner, parameters_of, train_steps

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.learner.checkpoints import export_policy


def main(policy: Path, strategy: str, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = LearnerConfig(
        strategy=strategy, num_ranks=dist.get_world_size(), optimizer=OptimizerConfig(lr=1e-4), max_grad_norm=0.05
    )
    learner = make_learner(policy, learner=settings, algorithm=AlgorithmConfig(num_steps=10))
    losses = [step["loss"] for step in train_steps(learner, 0, 3)]
    export_policy(learner.policy, output / "policy")
    torch.save((losses, parameters_of(learner)), output / f"rank{dist.get_rank()}.pt")
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo threads that are still running sometimes abort an orderly exit


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
