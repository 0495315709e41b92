"""Makes the quickstart's policy: random weights, then a supervised warm-up on the data of the run that asks for it."""

from __future__ import annotations

from pathlib import Path

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema import Config


def warm_up(config: Config) -> None:
    """``model.prepare`` of the quickstart: trains the policy at ``config.model.path`` by SFT."""
    from rlpipe.pipeline import train

    output = Path(config.model.path).parent
    print("warming the policy up by supervised fine-tuning; this is done once", flush=True)
    train(load_config(["experiment=quickstart_warmup", f"output={output}", f"seed={config.seed}"]))


def make_policy(config: Config) -> None:
    """``model.prepare`` of the warm-up: writes a tiny random policy to ``config.model.path``."""
    from rlpipe.tiny import make_tiny_policy

    make_tiny_policy(config.model.path, seed=config.seed)
