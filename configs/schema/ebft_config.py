"""Options of EBFT, structured and strided."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.configs.schema.option import Freezable, option
from rlpipe.configs.schema.scoring_config import ServeConfig


@dataclass(kw_only=True)
class FeatureConfig(Freezable):
    layers: list[float] = option([0.25, 0.5, 0.75], "Depths whose hidden states are features, as shares of the layers.")
    normalize_layers: bool = option(True, "Bring the features of each depth to length 1.")
    pooling: str = option(
        "last_token",
        "How the features of tokens become those of a sequence, or of a block.",
        choices=("last_token", "mean_pooling", "completion_mean", "concat"),
    )
    whitening: str = option(
        "sample",
        "Decorrelate the features of a prompt's completions: between samples, between features, or not.",
        choices=("sample", "feature", "none"),
    )
    weights: str = option(
        "own",
        "Who computes the rewards of ebft.reward: replicas with a frozen copy of the initial model, or the learner's "
        "ranks, between their steps, with the adapter off.",
        choices=("own", "learner"),
    )
    micro_batch_tokens: int = option(16384, "Tokens of one forward pass, filling included.", minimum=1)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each actor (weights=own).", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for each actor (weights=own).", minimum=0)
    timeout_s: float = option(120.0, "Seconds that scoring one group may take.", above=0)
    serve: ServeConfig = field(default_factory=lambda: ServeConfig(replicas=1))
    alignment_coef: float = option(1.0, "Weight of the match with the ground truth.", minimum=0)
    diversity_coef: float = option(1.0, "Weight of the likeness to the other completions.", minimum=0)


@dataclass(kw_only=True)
class StridedConfig(Freezable):
    stride: int = option(8, "Document tokens from one block to the next.", minimum=1)
    context_length: int = option(8, "Document tokens that the first block sees.", minimum=1)
    generate_tokens: int = option(8, "Tokens that a block generates.", minimum=1)
    temperature: float = option(0.6, "Divides the logits that they are drawn from.", above=0)
    min_completion_prefix: int = option(0, "Tokens of a row's completion before its first block.", minimum=0)


@dataclass(kw_only=True)
class EbftConfig(Freezable):
    reward: bool = option(False, "Reward the engines' completions by their features (kind=rl).")
    truth_column: str = option("ground_truth", "Column with the ground truth, a text or messages.")
    adaptive_max_tokens: bool = option(True, "Bound completions by the length of the ground truth, too.")
    gt_length_multiplier: float = option(1.5, "Times that length, and 64 at least.", above=0)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    strided: StridedConfig = field(default_factory=StridedConfig)
    rl_coef: float = option(1.0, "Weight of the policy gradient.", minimum=0)
    ce_coef: float = option(0.0, "Weight of the cross-entropy on the ground truth.", minimum=0)
