"""The cold start of the example: a little supervised training on the same rows, until some of the answers are right.

Reinforcement learning can only amplify what the policy does already; a model from the hub needs no cold start.
"""

from pathlib import Path

import rlpipe


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    output = Path(config.model.path).parent
    rlpipe.train(
        rlpipe.load_config(
            [
                "name=images_warm_up",
                f"output={output}",
                "algorithm.stop_loss=0.4",
                f"data.path={config.data.path}",
                f"data.held_out.size={config.data.held_out.size}",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ],
            file="examples/images/sft.yaml",
        )
    )
