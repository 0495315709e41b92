"""The cold start of the example: a little training on the same texts, since EBFT's features are the initial policy's.

A model from the hub needs no cold start.
"""

import rlpipe
from rlpipe.configs.compose import quoted
from rlpipe.quickstart import cold_start


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    cold_start(
        config,
        f"data.text_column={quoted(config.data.text_column)}",
        f"data.held_out.size={config.data.held_out.size}",
        "algorithm.num_steps=100",
        "algorithm.stop_loss=1.2",
        "algorithm.groups_per_step=8",
        "learner.optimizer.lr=1e-3",
    )
