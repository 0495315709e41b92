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
                "name=own_data_warm_up",
                f"output={output}",
                "algorithm=sft",
                "model=full",
                f"model.path={output}/random",
                "model.prepare=rlpipe.quickstart:make_policy",
                "model.dtype=float32",
                f"data.path={config.data.path}",
                "data.completion_column=answer",
                "algorithm.num_steps=100",
                "algorithm.stop_loss=1.0",
                "algorithm.groups_per_step=32",
                "learner.optimizer.lr=1e-3",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ]
        )
    )
