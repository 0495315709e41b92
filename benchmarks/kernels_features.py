"""The share of an EBFT reward's time that features take, relative to the network that they are read from.

Shapes: B prompts or blocks, n samples of each, D features, S sequences, T tokens of each, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.features import feature_rewards, join_layers, layer_indices, pool, score_features
from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.hardware.calibration import time_calls

if TYPE_CHECKING:
    from rlpipe.scoring.feature_scorer import FeatureReader

VARIANTS = {"prompts-4": (32, 4), "prompts-8": (32, 8), "blocks-4": (512, 4)}
"""Numbers of prompts, or of blocks of documents, and of samples of each."""
BLOCK_TOKENS = 8
"""Tokens that a block of strided EBFT generates."""


@dataclass(kw_only=True, frozen=True)
class FeatureCase:
    groups: int
    samples: int
    tokens: int
    """Tokens per sequence, whose last token is a feature; for blocks, document tokens and generated ones together."""
    strided: bool
    folder: str
    micro_batch_tokens: int
    whitening: str

    @property
    def num_sequences(self) -> int:
        """Sequences that the network reads: samples and truths, or for blocks as many as hold documents and blocks."""
        if not self.strided:
            return self.groups * (self.samples + 1)
        tokens = self.groups * BLOCK_TOKENS * (1 + self.samples)
        return max(1, tokens // self.tokens)


def measure(cases: dict[str, dict[str, Any]], turns: int, device: torch.device) -> dict[str, dict[str, Any]]:
    # transformers takes seconds to import, which the parent process avoids.
    from benchmarks.learner_speed import SHAPES, make_model
    from rlpipe.configs.schema.model_config import ModelConfig
    from rlpipe.scoring.feature_scorer import open_feature_network

    shape = SHAPES[device.type]
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    given = [FeatureCase(**case) for case in cases.values()]
    path = make_model(shape, Path(given[0].folder), getattr(torch, dtype))
    config = FeatureConfig()
    model = ModelConfig(path=str(path), dtype=dtype)
    reader = open_feature_network(model, config, device, max_tokens=given[0].micro_batch_tokens)
    depths = len(layer_indices(config.layers, shape.layers))
    return {
        name: _measure(case, reader, shape.vocabulary, shape.hidden, depths, turns, device)
        for name, case in zip(cases, given, strict=True)
    }


def _measure(
    case: FeatureCase,
    reader: FeatureReader,
    vocabulary: int,
    hidden: int,
    depths: int,
    turns: int,
    device: torch.device,
) -> dict[str, Any]:
    parts = {
        "network_s": _network(case, reader, vocabulary),
        "pooling_s": _pooling(case, hidden, depths, device),
        "rewards_s": _rewards(case, depths * hidden, device),
    }
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(turns + 1):
        for name, work in parts.items():
            seconds[name].append(time_calls(work, 1, device))
    found = {name: median(taken[1:]) for name, taken in seconds.items()}
    return {**found, **shares(found), "features": depths * hidden, "groups": case.groups, "samples": case.samples}


def shares(seconds: dict[str, float]) -> dict[str, float]:
    """Return shares of the total time: that of a network pass (``network_s``, with pooling) and of the rewards."""
    total = seconds["network_s"] + seconds["rewards_s"]
    return {
        "rewards_share": seconds["rewards_s"] / total,
        "share": (seconds["pooling_s"] + seconds["rewards_s"]) / total,
    }


def _network(case: FeatureCase, reader: FeatureReader, vocabulary: int) -> Callable[[], object]:
    from rlpipe.scoring.feature_scorer import FeatureSequence

    token_ids = np.random.default_rng(0).integers(0, vocabulary, (case.num_sequences, case.tokens)).astype(np.int32)
    mask = np.arange(case.tokens) >= case.tokens // 2
    sequences = [FeatureSequence(token_ids=row, completion_mask=mask) for row in token_ids]
    return lambda: reader.read(sequences)


def _pooling(case: FeatureCase, hidden: int, depths: int, device: torch.device) -> Callable[[], object]:
    """Return the pooling of micro batches, one after the other, as the reader does it."""
    config = FeatureConfig()
    rows = max(1, min(case.num_sequences, case.micro_batch_tokens // case.tokens))
    states = [torch.randn(rows, case.tokens, hidden, device=device) for _ in range(depths)]
    mask = torch.ones(rows, case.tokens, dtype=torch.bool, device=device)

    def work() -> None:
        for _ in range(max(1, round(case.num_sequences / rows))):
            pool(join_layers(states, normalize=config.normalize_layers), mask, mask, config.pooling)

    return work


def _rewards(case: FeatureCase, width: int, device: torch.device) -> Callable[[], Tensor]:
    """Return the rewards' computation: on the CPU, prompt by prompt; for blocks all at once, on the device."""
    config = FeatureConfig(whitening=case.whitening)
    where = device if case.strided else torch.device("cpu")
    samples = torch.randn(case.groups, case.samples, width, device=where)
    truth = torch.randn(case.groups, width, device=where)

    def rewards(x: Tensor, y: Tensor) -> Tensor:
        return feature_rewards(score_features(x, y, config.whitening), config)

    if case.strided:
        return lambda: rewards(samples, truth)
    return lambda: torch.cat([rewards(x[None], y[None]) for x, y in zip(samples, truth, strict=True)])


def make_cases(tokens: int, folder: Path, micro_batch_tokens: int) -> dict[str, dict[str, Any]]:
    cases = {
        f"{name}-{whitening}": FeatureCase(
            groups=groups,
            samples=samples,
            tokens=tokens,
            strided=name.startswith("blocks"),
            folder=str(folder),
            micro_batch_tokens=micro_batch_tokens,
            whitening=whitening,
        )
        for name, (groups, samples) in VARIANTS.items()
        for whitening in ("sample", "none")
    }
    return {name: {entry.name: getattr(case, entry.name) for entry in fields(case)} for name, case in cases.items()}
