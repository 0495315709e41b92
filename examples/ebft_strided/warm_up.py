"""The cold start of the example: a little training on the same texts, since EBFT's features are the initial policy's.

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
                "name=ebft_strided_warm_up",
                f"output={output}",
                "algorithm=sft",
                "model=full",
                f"model.path={output}/random",
                "model.prepare=rlpipe.quickstart:make_policy",
                "model.dtype=float32",
                f"data.path={config.data.path}",
                f"data.text_column={config.data.text_column}",
                f"data.held_out.size={config.data.held_out.size}",
                "algorithm.num_steps=100",
                "algorithm.stop_loss=1.2",
                "algorithm.groups_per_step=8",
                "learner.optimizer.lr=1e-3",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ]
        )
    )
