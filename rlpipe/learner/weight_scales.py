"""Detection and rescaling of weights whose standard deviation has drifted from that of similar weights.

Rarely used experts and recurrent parts of published models have some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.model_config import WeightScaleRule
from rlpipe.errors import ModelError

EXPERT_DIMENSIONS = 3


@dataclass(kw_only=True, frozen=True, slots=True)
class Drift:
    """A parameter, or an expert's part of one, whose standard deviation is outside the bounds of a rule."""

    rule: str
    name: str
    spread: float
    """Standard deviation of the parameter or the expert's part."""
    median: float
    """Median standard deviation of all that the rule matches."""
    mended: bool

    @property
    def factor(self) -> float:
        """Factor that the values are multiplied by; 1 if they are not mended, or all 0."""
        return self.median / self.spread if self.mended and self.spread else 1.0

    def __str__(self) -> str:
        done = "scaled to the median" if self.factor != 1 else "left as it is"
        return (
            f"model.normalize_weight_scales.{self.rule}: {self.name} has a standard deviation of {self.spread:.4g}, "
            f"{self.spread / self.median:.2f} times the median {self.median:.4g}; {done}"
        )


@torch.no_grad()
def normalize_weight_scales(model: nn.Module, rules: Mapping[str, WeightScaleRule]) -> list[Drift]:
    """Scale weights outside of a rule's bounds to the median standard deviation, unless the rule is a ``dry_run``.

    All parameters that match a rule's pattern form a group; experts that are fused into one parameter count separately.
    Returns the drifts found. Raises ``ModelError`` if a rule matches nothing, or has a median of 0.
    """
    drifts = []
    for rule_name, rule in rules.items():
        matching = [(name, value) for name, value in model.named_parameters() if re.search(rule.name_pattern, name)]
        group = {member: part for name, value in matching for member, part in _members(name, value)}
        spreads = {name: float(value.float().std()) for name, value in group.items() if value.numel() > 1}
        middle = median(spreads.values()) if spreads else 0.0
        if not middle:
            raise ModelError(
                f"model.normalize_weight_scales.{rule_name}: no parameter with a spread matches {rule.name_pattern!r}; "
                f"one of the model's is {next(iter(model.named_parameters()))[0]}"
            )
        for name, spread in spreads.items():
            if not middle / rule.threshold <= spread <= middle * rule.threshold:
                drift = Drift(rule=rule_name, name=name, spread=spread, median=middle, mended=not rule.dry_run)
                group[name].mul_(drift.factor)
                drifts.append(drift)
    return drifts


def _members(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of a parameter ``[experts, out, in]`` as ``name[0]`` and so on, and any other one whole."""
    if value.ndim == EXPERT_DIMENSIONS and min(value.shape) > 1:  # unlike the kernels [channels, 1, width] of a mixer
        yield from ((f"{name}[{index}]", part) for index, part in enumerate(value))
    else:
        yield name, value


@torch.no_grad()
def apply_factors(name: str, value: Tensor, factors: Mapping[str, float]) -> Tensor:
    """Multiply a parameter, in place, by the factors of a training record's drifts."""
    for member, part in _members(name, value):
        part.mul_(factors.get(member, 1.0))
    return value


def parameter_of(member: str) -> str:
    """Return the name of the parameter that a drift's name refers to."""
    return member.partition("[")[0]
