"""Metrics of a micro batch as sums, minima and maxima, which add up over micro batches and ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class MetricSums:
    """Sums, minima and maxima of metrics, kept on the device without waiting for it until ``values`` is called.

    To reduce over ranks, all-reduce the three flat tensors of ``state`` with SUM, MIN and MAX, and pass them to
    ``load``; all ranks must have merged the same names in the same order, which they do if their config is the same.
    """

    num_tokens: Tensor
    """Number of loss tokens (scalar), which the means are divided by."""
    means: dict[str, Tensor] = field(default_factory=dict)
    """Sums over loss tokens, to be divided by their number."""
    totals: dict[str, Tensor] = field(default_factory=dict)
    """Sums that are not divided, such as the loss, whose parts are normalized already."""
    mins: dict[str, Tensor] = field(default_factory=dict)
    maxs: dict[str, Tensor] = field(default_factory=dict)

    def add_mean(self, name: str, per_token: Tensor) -> None:
        """Add a mean over loss tokens; ``per_token`` is ``[N]``, and 0 where unmasked."""
        self.means[name] = per_token.detach().sum()

    def add_total(self, name: str, value: Tensor) -> None:
        self.totals[name] = value.detach()

    def add_min(self, name: str, per_token: Tensor, mask: Tensor) -> None:
        """Add a minimum of ``per_token`` ``[N]`` over ``mask`` ``[N]``; infinity if no token counts."""
        bounded = torch.where(mask, per_token.detach(), math.inf)
        self.mins[name] = torch.cat([bounded, bounded.new_full((1,), math.inf)]).amin()

    def add_max(self, name: str, per_token: Tensor, mask: Tensor) -> None:
        """Add a maximum of ``per_token`` ``[N]`` over ``mask`` ``[N]``; minus infinity if no token counts."""
        bounded = torch.where(mask, per_token.detach(), -math.inf)
        self.maxs[name] = torch.cat([bounded, bounded.new_full((1,), -math.inf)]).amax()

    def merge(self, other: MetricSums) -> None:
        """Add the metrics of another micro batch."""
        self.num_tokens = self.num_tokens + other.num_tokens
        for target, source, combine in (
            (self.means, other.means, torch.add),
            (self.totals, other.totals, torch.add),
            (self.mins, other.mins, torch.minimum),
            (self.maxs, other.maxs, torch.maximum),
        ):
            target.update(
                {name: combine(target[name], source[name]) if name in target else source[name] for name in source}
            )

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums ``[1 + means + totals]``, minima and maxima as flat float64 tensors, in the names' order."""
        sums = _flat([self.num_tokens, *self.means.values(), *self.totals.values()], self.num_tokens)
        return sums, _flat(list(self.mins.values()), sums), _flat(list(self.maxs.values()), sums)

    def load(self, sums: Tensor, mins: Tensor, maxs: Tensor) -> None:
        """Load the tensors of ``state`` after their reduction."""
        values = iter(sums.unbind())
        self.num_tokens = next(values)
        self.means = dict(zip(self.means, values, strict=False))
        self.totals = dict(zip(self.totals, values, strict=False))
        self.mins = dict(zip(self.mins, mins.unbind(), strict=True))
        self.maxs = dict(zip(self.maxs, maxs.unbind(), strict=True))

    def values(self) -> dict[str, float]:
        """Return the metrics as numbers; without any loss token only the totals are known."""
        sums, mins, maxs = (tensor.tolist() for tensor in self.state())
        num_tokens, means, totals = sums[0], sums[1 : 1 + len(self.means)], sums[1 + len(self.means) :]
        values = dict(zip(self.totals, totals, strict=True))
        if num_tokens:
            values |= {name: value / num_tokens for name, value in zip(self.means, means, strict=True)}
            values |= dict(zip(self.mins, mins, strict=True)) | dict(zip(self.maxs, maxs, strict=True))
        return values


def _flat(scalars: list[Tensor], like: Tensor) -> Tensor:
    if not scalars:
        return like.new_empty(0, dtype=torch.float64)
    return torch.stack([scalar.to(torch.float64) for scalar in scalars])
