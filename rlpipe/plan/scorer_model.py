"""Scorers that run a model: how many there are, their work, memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.algorithms.features import layer_indices
from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.device import Device
from rlpipe.hardware.dtypes import AUTO
from rlpipe.learner.forward import drop_unread
from rlpipe.learner.workload import sequence_tokens
from rlpipe.offload.planner.fake_trace import ForwardCost, trace_forward
from rlpipe.offload.planner.profiler import roofline, start_seconds
from rlpipe.plan.dtype_work import dtype_on, scorer_products
from rlpipe.plan.learner_memory import MetaPolicy, meta_policy, nf4_bytes
from rlpipe.plan.model_shape import describe_offline
from rlpipe.scoring.feature_scorer import FeatureReader, FeatureSequence
from rlpipe.scoring.pools import FEATURE_PATH, MAX_GROUPS_PER_CALL, REWARD_MODELS, resolve_pools
from rlpipe.scoring.reward_model import ClassifierReward, prepare_config


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerSetup:
    """One process of a scorer; all its processes are alike."""

    name: str
    option: str
    """Name of its section in the config."""
    batch_option: str
    reward: ClassifierReward | None
    """The reward before it loads its model; None: EBFT's feature network."""
    dtype: str
    """Dtype that it computes in."""
    copies: int
    """Number of processes, or of replicas under load."""
    num_gpus: float
    """GPUs that one process asks for."""
    batch_tokens: int
    """Tokens per pass, including padding."""
    sequence_tokens: int
    groups_per_copy: int
    """Groups of a step per process."""
    groups_per_call: int
    sequences_per_group: int

    @property
    def copies_per_gpu(self) -> int:
        return min(self.copies, int(1 / self.num_gpus + 1e-9) or 1) if self.num_gpus else self.copies

    @property
    def batch(self) -> int:
        """Sequences per pass."""
        max_sequences = self.groups_per_call * self.sequences_per_group
        return min(max_sequences, max(1, self.batch_tokens // self.sequence_tokens))

    @property
    def num_passes(self) -> float:
        """Passes per step."""
        return max(1.0, self.groups_per_copy * self.sequences_per_group / self.batch)


def has_model(members: Mapping[str, RewardConfig]) -> bool:
    """Return whether each process of a pool loads a model that a plan knows."""
    return next(iter(members.values())).path.startswith((FEATURE_PATH, REWARD_MODELS))


def read_scorer_setups(config: Config, device: Device) -> Iterator[ScorerSetup]:
    """Yield the scorers' setups; raise ``ConfigError`` for one that can't be made or asks for an absent GPU."""
    for pool in resolve_pools(config).values():
        name, reward = next(iter(pool.members.items()))
        if has_model(pool.members):
            setup = _read_setup(config, name, reward, pool.max_size, device)
            if device.kind == "cpu" and reward.num_gpus > 0:
                setting = f"{setup.option}.num_gpus={reward.num_gpus:g}"
                raise ConfigError(f"{setting}: {device.name} has no GPU; give the GPU's --device, or set 0")
            yield setup


def _read_setup(config: Config, name: str, reward: RewardConfig, copies: int, device: Device) -> ScorerSetup:
    is_features = reward.path == FEATURE_PATH
    option = "algorithm.ebft.features" if is_features else f"scoring.rewards.{name}"
    model = None if is_features else _make_reward(option, reward)
    requested_dtype = config.model.dtype if model is None else model.dtype
    model_products = scorer_products(config.model.path if model is None else model.source, reward.num_cpus)
    groups, length = -(-config.algorithm.groups_per_step // copies), sequence_tokens(config)
    per_call = reward.serve.batch_groups if reward.is_served else MAX_GROUPS_PER_CALL
    return ScorerSetup(
        name="features" if is_features else name,
        option=option,
        batch_option=_batch_option(option, reward),
        reward=model,
        dtype=dtype_on(device, [model_products], on_gpu=reward.num_gpus > 0)
        if requested_dtype == AUTO
        else requested_dtype,
        copies=copies,
        num_gpus=reward.num_gpus,
        batch_tokens=config.algorithm.ebft.features.micro_batch_tokens if model is None else model.batch_tokens,
        sequence_tokens=length if model is None else min(length, model.max_tokens),
        groups_per_copy=groups,
        groups_per_call=min(groups, per_call),
        sequences_per_group=config.algorithm.completions_per_prompt + is_features,  # and the ground truth
    )


def _make_reward(option: str, reward: RewardConfig) -> ClassifierReward:
    reward_class = import_object(reward.path, what=f"{option}.path", error=ConfigError)
    try:
        scorer: ClassifierReward = reward_class(**reward.kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{option}.kwargs: {error}") from None
    return scorer


def _batch_option(option: str, reward: RewardConfig) -> str:
    """Return the option that limits a pass, for the command line: a plus adds one that the config does not have yet."""
    if reward.path == FEATURE_PATH:
        return f"{option}.micro_batch_tokens"
    return f"{'' if 'batch_tokens' in reward.kwargs else '+'}{option}.kwargs.batch_tokens"


UNTRACEABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
"""Errors of models that can't be described, or traced without values."""


@dataclass(kw_only=True, slots=True)
class ScorerModel:
    """A scorer's model on the meta device, as it computes."""

    path: str
    dtype: str
    weights_bytes: int
    starting_bytes: int
    """Bytes of its weights on the device at the start, before the unused ones are dropped."""
    is_mapped: bool
    """Whether loading takes no host memory, as in the learner's policy."""
    run: Callable[[int, int], Tensor]
    """Function that runs a pass, given the number of sequences and of tokens per sequence."""
    module: nn.Module
    unpacked_bytes: int = 0
    """Bytes of the largest 4-bit weight, dequantized while it is used."""
    unpacking_bytes: int = 0
    """Bytes moved per pass to dequantize all 4-bit weights."""
    _costs: dict[tuple[int, int, str], ForwardCost] = field(default_factory=dict)

    def cost(self, num_sequences: int, num_tokens: int, device: Device) -> ForwardCost:
        """Return the cost of a pass; raise ``ModelError`` if its shapes depend on values."""
        key = (num_sequences, num_tokens, device.name)
        if key not in self._costs:
            try:
                traced = trace_forward(
                    self.module,
                    lambda: self.run(num_sequences, num_tokens),
                    roofline(device),
                    start_s=start_seconds(device),
                )
            except UNTRACEABLE as error:
                raise ModelError(
                    f"{self.path} can't be traced without real tensors ({describe_error(error)})"
                ) from None
            self._costs[key] = ForwardCost(
                seconds=traced.seconds + self.unpacking_bytes / device.memory_bandwidth,
                peak_bytes=traced.peak_bytes + self.unpacked_bytes,
            )
        return self._costs[key]


def meta_scorer(setup: ScorerSetup, config: Config, described: PreTrainedConfig) -> ScorerModel:
    """Make the model of a scorer on the meta device; ``described`` is transformers' config of the policy.

    Raises ``ModelError`` if the model can't be described or outlined.
    """
    if setup.reward is None:
        return _meta_features(replace(config, model=replace(config.model, dtype=setup.dtype)), described)
    return _meta_reward(setup.reward, setup.dtype, setup.option, config)


def _meta_reward(reward: ClassifierReward, dtype_name: str, option: str, config: Config) -> ScorerModel:
    model = replace(config.model, **reward.options)
    described = describe_offline(reward.source, model, f"{option}.kwargs.model")
    dtype: torch.dtype = getattr(torch, dtype_name)
    code = {"trust_remote_code": model.trust_remote_code}
    try:
        with torch.device("meta"):
            classifier: PreTrainedModel = reward.auto_class.from_config(described, dtype=dtype, **code)
    except (*UNTRACEABLE, OSError, ImportError) as error:
        raise ModelError(f"{reward.source} can't be created without weights ({describe_error(error)})") from None
    prepare_config(classifier.config, 0)

    def run(num_sequences: int, num_tokens: int) -> Tensor:
        token_ids = torch.ones(num_sequences, num_tokens, dtype=torch.long)
        logits: Tensor = classifier(input_ids=token_ids, attention_mask=token_ids).logits
        return logits.float()

    weights = sum(parameter.nbytes for parameter in classifier.parameters())
    return ScorerModel(
        path=reward.source,
        dtype=dtype_name,
        weights_bytes=weights,
        starting_bytes=weights,
        is_mapped=(described.dtype or dtype) is dtype,
        run=run,
        module=cast(nn.Module, classifier).eval(),
    )


def _meta_features(config: Config, described: PreTrainedConfig) -> ScorerModel:
    """Make the feature network on the meta device as ``open_feature_network`` makes it."""
    features = config.algorithm.ebft.features
    policy = meta_policy(described, config.model, frozen=True)
    module = policy.module.eval()
    starting = policy.stored_bytes()
    drop_unread(module, max(layer_indices(features.layers, module.num_layers)))
    reader = FeatureReader(
        module.depths,
        features,
        num_layers=module.num_layers,
        layout=module.layout,
        device=torch.device("cpu"),
        max_tokens=features.micro_batch_tokens,
    )

    def run(num_sequences: int, num_tokens: int) -> Tensor:
        token_ids, mask = np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.bool_)
        return reader.read([FeatureSequence(token_ids=token_ids, completion_mask=mask)] * num_sequences)

    sizes = _nf4_sizes(policy)
    itemsize = module.compute_dtype.itemsize
    return ScorerModel(
        path=config.model.path,
        dtype=config.model.dtype,
        weights_bytes=policy.stored_bytes(),
        starting_bytes=starting,
        is_mapped=policy.is_mapped,
        run=run,
        module=module,
        unpacked_bytes=max(sizes, default=0) * itemsize,
        unpacking_bytes=sum(nf4_bytes(size) + size * itemsize for size in sizes),
    )


def _nf4_sizes(policy: MetaPolicy) -> list[int]:
    """Return the elements of the remaining 4-bit weights."""
    return [policy.nf4[name] for name, _ in policy.module.named_parameters() if name in policy.nf4]
