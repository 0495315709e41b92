"""A config as a plain tree, as YAML, and compared with the config that a run began with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any, cast

from omegaconf import OmegaConf

from rlpipe.configs.option_list import options
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import Config

FREE_ON_RESUME = (
    "name",
    "output",
    "resume",
    "resume_changes",
    "model.adapter.merge",
    "model.attention",
    "model.gradient_checkpointing",
    "model.reentrant_checkpointing",
    "model.prepare",
    "data.cache",
    "data.held_out.every_steps",
    "data.held_out.correct_at",
    "data.held_out.correct_by",
    "algorithm.ebft.features.weights",
    "algorithm.ebft.features.micro_batch_tokens",
    "algorithm.ebft.features.num_cpus",
    "algorithm.ebft.features.num_gpus",
    "algorithm.ebft.features.timeout_s",
    "algorithm.ebft.features.serve",
    "rollout.engine",
    "rollout.num_engines",
    "rollout.num_cpus",
    "rollout.num_gpus",
    "rollout.resources",
    "rollout.num_threads",
    "rollout.tensor_parallel_size",
    "rollout.max_model_len",
    "rollout.engine_args",
    "scoring.num_processes",
    "scoring.num_cpus",
    "scoring.memory_gb",
    "scoring.on_rollouts_scored",
    "scoring.rewards.*.timeout_s",
    "scoring.rewards.*.num_processes",
    "scoring.rewards.*.num_cpus",
    "scoring.rewards.*.num_gpus",
    "scoring.rewards.*.isolation",
    "scoring.rewards.*.memory_gb",
    "scoring.rewards.*.serve",
    "learner.strategy",
    "learner.num_ranks",
    "learner.num_cpus",
    "learner.num_gpus",
    "learner.resources",
    "learner.num_threads",
    "learner.max_tokens_per_microbatch",
    "learner.logprob_chunk_tokens",
    "learner.fsdp",
    "learner.zero3",
    "learner.max_bad_steps",
    "learner.max_failures",
    "learner.collective_timeout_s",
    "replay.streaming",
    "ledger",
    "weights",
    "checkpoint",
    "tracking",
    "cluster",
)
"""Options and whole sections that determine how a run is executed, but not what it trains."""
DTYPE = "model.dtype"


def to_tree(config: Config | ModelConfig) -> dict[str, Any]:
    """Convert a config to nested dictionaries and lists of plain values, in the schema's order."""
    tree = plain(asdict(config))
    assert isinstance(tree, dict)
    return tree


def model_of(tree: Mapping[str, Any]) -> ModelConfig:
    """Read a ``ModelConfig`` from a tree of ``to_tree``; options that are newer than the tree get their defaults."""
    return cast(ModelConfig, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), tree)))


def plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value


def to_yaml(config: Config) -> str:
    """Return the resolved config as YAML, which ``rlpipe train --config`` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(to_tree(config)))


def changed_options(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List the differences between two trees of ``to_tree`` that matter for training, as "option: old -> new".

    Options that are newer than the old tree count as their defaults there. ``model.dtype=auto`` equals any other type.
    """
    before, after = dict(training_options(old)), dict(training_options(new))
    defaults = {option.name: plain(option.default) for option in options()}
    before = {name: defaults[name] for name in after if name not in before and name in defaults} | before
    names = [*before, *(name for name in after if name not in before)]
    return [
        f"{name}: {show(before, name)} -> {show(after, name)}"
        for name in names
        if show(before, name) != show(after, name) and not (name == DTYPE and "auto" in (before[name], after[name]))
    ]


def show(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], sort_keys=True) if name in settings else "absent"


def training_options(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of the tree that a resumed run must not change, by dotted name.

    A run may be made longer or shorter if its learning rate does not depend on its length.
    """
    constant = tree["learner"]["schedule"]["name"] == "constant"
    free = (*FREE_ON_RESUME, "algorithm.num_steps") if constant else FREE_ON_RESUME
    for name, value in leaves(tree):
        if not any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in free):
            yield name, value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
