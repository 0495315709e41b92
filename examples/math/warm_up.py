"""The cold start of the example: supervised training on the column ``worked``, until some of the products are right.

A model from the hub needs no cold start.
"""

from pathlib import Path

import rlpipe


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    output = Path(config.model.path).parent
    rlpipe.train(
        rlpipe.load_config(
            [
                "name=math_warm_up",
                f"output={output}",
                f"seed={config.seed}",
                "algorithm=sft",
                "model=full",
                f"model.path={output}/random",
                "model.prepare=rlpipe.quickstart:make_policy",
                "model.dtype=float32",
                f"data.path={config.data.path}",
                "data.completion_column=worked",
                f"data.held_out.size={config.data.held_out.size}",
                "algorithm.num_steps=300",
                "algorithm.stop_loss=0.2",
                "algorithm.groups_per_step=64",
                "learner.num_cpus=2",
                "learner.optimizer.lr=1e-3",
                "learner.schedule.warmup_steps=10",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ]
        )
    )
