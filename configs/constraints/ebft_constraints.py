"""Checks for options of EBFT, structured and strided, that contradict each other or those of other sections."""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.schema.scoring_config import ServeConfig

KIND = "algorithm.kind=ebft_strided"


def check_strided(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if config.model.attention == "flash_attention_2":
        yield f"model.attention: flash_attention_2 takes no masks, which {KIND} needs; set sdpa"
    if algorithm.stop_loss is not None:
        yield "algorithm.stop_loss: only SFT has a loss that falls with learning; set it to null"
    if algorithm.reference.sync_steps:
        yield f"algorithm.reference.sync_steps: the feature network of {KIND} is the initial policy, and stays; set 0"
    yield from _check_advantage(algorithm)
    yield from check_features(algorithm)
    yield from _check_room(config)


def check_structured(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of EBFT as a reward (``ebft.reward``)."""
    if algorithm.combine != "sum_then_normalize":
        yield "algorithm.combine: EBFT's rewards are summed first; set sum_then_normalize"
    features = algorithm.ebft.features
    if features.weights == "own" and not features.serve.replicas:
        yield "algorithm.ebft.features.serve.replicas: 0 replicas compute no features; set 1 or more"
    yield from check_replicas("algorithm.ebft.features.serve", features.serve)
    if features.weights == "learner":
        if features.serve != ServeConfig(replicas=1):
            yield "algorithm.ebft.features.serve: weights=learner has no replicas; leave it out, or set weights=own"
        if algorithm.reference.sync_steps:
            yield (
                "algorithm.reference.sync_steps: it would move the model that weights=learner reads features of; set "
                "0, or algorithm.ebft.features.weights=own"
            )
    yield from check_features(algorithm)


def check_replicas(option: str, serve: ServeConfig) -> Iterator[str]:
    least = max(serve.replicas, 1)
    if serve.max_replicas is not None and serve.max_replicas < least:
        yield f"{option}.max_replicas: {serve.max_replicas} is below replicas; set {least} or more"


def check_features(algorithm: AlgorithmConfig) -> Iterator[str]:
    features = algorithm.ebft.features
    if not features.layers or not all(0 <= layer <= 1 for layer in features.layers):
        yield f"algorithm.ebft.features.layers: {list(features.layers)} are no shares of the depth; set [0.25,0.5,0.75]"
    if not features.alignment_coef and not features.diversity_coef:
        yield "algorithm.ebft.features.alignment_coef: without diversity_coef, 0 leaves no reward; set it above 0"


def _check_advantage(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, size = algorithm.advantage, algorithm.group_size
    if advantage.name == "reinforce_baseline" or (advantage.name == "grpo" and advantage.scale == "batch"):
        yield (
            f"algorithm.advantage: {advantage.name} normalises over the step's batch, but blocks are drawn and trained "
            "by micro batches; set name=rloo"
        )
    elif size < 2 and advantage.name == "grpo":
        yield f"algorithm.group_size: {size}, but grpo compares the samples of a block; set 2 or more, or name=rloo"


def _check_room(config: Config) -> Iterator[str]:
    """Yield a problem if the shortest document with a block does not fit into a micro batch with its blocks."""
    strided, size = config.algorithm.ebft.strided, config.algorithm.group_size
    shortest = strided.context_length + strided.generate_tokens
    needed = shortest + -(-shortest * size * strided.generate_tokens // strided.stride)
    if config.learner.max_tokens_per_microbatch < needed:
        yield (
            f"learner.max_tokens_per_microbatch: {config.learner.max_tokens_per_microbatch} leave no room for a block "
            f"with its context and {size} samples; set it to {needed} or more"
        )
