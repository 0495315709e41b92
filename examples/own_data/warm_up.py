"""The cold start of the example: a little supervised training on the same rows, until some of the answers are right.

Reinforcement learning can only amplify what the policy does already; a model from the hub needs no cold start.
"""

import rlpipe
from rlpipe.quickstart import cold_start


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    cold_start(
        config,
        "data.completion_column=answer",
        "algorithm.num_steps=100",
        "algorithm.stop_loss=1.0",
        "algorithm.groups_per_step=32",
        "learner.optimizer.lr=1e-3",
    )
