"""The cold start of the example: supervised training on the column ``worked``, until some of the products are right.

A model from the hub needs no cold start.
"""

import rlpipe
from rlpipe.quickstart import cold_start


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    cold_start(
        config,
        f"seed={config.seed}",
        "data.completion_column=worked",
        f"data.held_out.size={config.data.held_out.size}",
        "algorithm.num_steps=300",
        "algorithm.stop_loss=0.2",
        "algorithm.groups_per_step=64",
        "learner.num_cpus=2",
        "learner.optimizer.lr=1e-3",
        "learner.schedule.warmup_steps=10",
    )
