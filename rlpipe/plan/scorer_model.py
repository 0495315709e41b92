"""The model of a scorer, without weights: its memory, and the cost of a pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.algorithms.features import layer_indices
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ModelError
from rlpipe.hardware.device import Device
from rlpipe.offload.planner.fake_trace import ForwardCost, trace_forward
from rlpipe.offload.planner.rates import roofline
from rlpipe.plan.learner_outline import Outline, nf4_bytes, outline_policy
from rlpipe.plan.offline_models import describe_offline
from rlpipe.plan.scorer_setup import ScorerSetup
from rlpipe.scoring.feature_network import FeatureReader, FeatureSequence, drop_unread
from rlpipe.scoring.reward_model import ClassifierReward

UNTRACEABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError)
"""Errors of models that can't be outlined, or traced without values."""


@dataclass(kw_only=True, slots=True)
class ScorerModel:
    """A scorer's model on the meta device, as it computes."""

    path: str
    dtype: str
    weights_bytes: int
    starting_bytes: int
    """Bytes of its weights on the device at the start, before the unused ones are dropped."""
    is_mapped: bool
    """Whether loading takes no host memory, as in the learner's outline."""
    run: Callable[[int, int], Tensor]
    """Function that runs a pass, given the number of sequences and of tokens per sequence."""
    module: nn.Module
    unpacked_bytes: int = 0
    """Bytes of the largest 4-bit weight, dequantised while it is used."""
    unpacking_bytes: int = 0
    """Bytes moved per pass to dequantise all 4-bit weights."""
    _costs: dict[tuple[int, int, str], ForwardCost] = field(default_factory=dict)

    def cost(self, num_sequences: int, num_tokens: int, device: Device) -> ForwardCost:
        """Return the cost of a pass; raise ``ModelError`` if its shapes depend on values."""
        key = (num_sequences, num_tokens, device.name)
        if key not in self._costs:
            try:
                found = trace_forward(self.module, lambda: self.run(num_sequences, num_tokens), roofline(device))
            except UNTRACEABLE as error:
                raise ModelError(f"{self.path} can't be traced without its values ({describe_error(error)})") from None
            self._costs[key] = ForwardCost(
                seconds=found.seconds + self.unpacking_bytes / device.memory_bandwidth,
                peak_bytes=found.peak_bytes + self.unpacked_bytes,
            )
        return self._costs[key]


def outline_scorer(setup: ScorerSetup, config: Config, described: PreTrainedConfig) -> ScorerModel:
    """Outline the model of a scorer; ``described`` is transformers' config of the policy.

    Raises ``ModelError`` if the model can't be described or outlined.
    """
    if setup.reward is None:
        return _outline_features(replace(config, model=replace(config.model, dtype=setup.dtype)), described)
    return _outline_reward(setup.reward, setup.dtype, setup.option, config)


def _outline_reward(reward: ClassifierReward, dtype_name: str, option: str, config: Config) -> ScorerModel:
    model = replace(config.model, **reward.options)
    described = describe_offline(reward.source, model, f"{option}.kwargs.model")
    dtype: torch.dtype = getattr(torch, dtype_name)
    code = {"trust_remote_code": model.trust_remote_code}
    try:
        with torch.device("meta"):
            classifier: PreTrainedModel = reward.auto_class.from_config(described, dtype=dtype, **code)
    except (*UNTRACEABLE, OSError, ImportError) as error:
        raise ModelError(f"{reward.source} can't be outlined ({describe_error(error)})") from None
    classifier.config.pad_token_id = 0
    classifier.config.use_cache = False

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


def _outline_features(config: Config, described: PreTrainedConfig) -> ScorerModel:
    """Outline the feature network as ``open_feature_network`` makes it."""
    features = config.algorithm.ebft.features
    outline = outline_policy(described, config.model, frozen=True)
    scorer = outline.scorer.eval()
    starting = outline.stored_bytes()
    drop_unread(scorer, max(layer_indices(features.layers, scorer.num_layers)))
    reader = FeatureReader(
        scorer.depths,
        features,
        num_layers=scorer.num_layers,
        layout=scorer.layout,
        device=torch.device("cpu"),
        max_tokens=features.micro_batch_tokens,
    )

    def run(num_sequences: int, num_tokens: int) -> Tensor:
        token_ids, mask = np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.bool_)
        return reader.read([FeatureSequence(token_ids=token_ids, completion_mask=mask)] * num_sequences)

    sizes = _nf4_sizes(outline)
    itemsize = scorer.compute_dtype.itemsize
    return ScorerModel(
        path=config.model.path,
        dtype=config.model.dtype,
        weights_bytes=outline.stored_bytes(),
        starting_bytes=starting,
        is_mapped=outline.is_mapped,
        run=run,
        module=scorer,
        unpacked_bytes=max(sizes, default=0) * itemsize,
        unpacking_bytes=sum(nf4_bytes(size) + size * itemsize for size in sizes),
    )


def _nf4_sizes(outline: Outline) -> list[int]:
    """Return the elements of the remaining 4-bit weights."""
    return [outline.nf4[name] for name, _ in outline.scorer.named_parameters() if name in outline.nf4]
