"""Inputs of the log-prob kernels, and plain autograd in float64 as their reference.

Shapes: T tokens, H hidden size, V vocabulary, r rank of a LoRA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from rlpipe.kernels import softmax
from rlpipe.kernels.primitives import IGNORED

INTERPRETED = pytest.mark.skipif(
    # Triton's own functions are created when Triton is imported, and ours when our modules are.
    {type(function).__name__ for function in (tl.max, softmax._stats_kernel)} != {"InterpretedFunction"},
    reason="Triton was loaded before tests/unit chose its interpreter: run that folder by itself",
)
BOTH = pytest.mark.parametrize("use_triton", [False, pytest.param(True, marks=INTERPRETED)])
EVERY = pytest.mark.parametrize(
    ("use_triton", "dtype"),
    [
        *[(False, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)],
        *[pytest.param(True, dtype, marks=INTERPRETED) for dtype in (torch.float32, torch.float16)],
    ],
)
"""All implementations with their dtypes, without bfloat16 for Triton, whose interpreter computes it wrongly."""

CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "scale": {"scale": 0.3},
    "cap": {"softcap": 2.0},
    "all": {"temperature": 0.7, "scale": 1.7, "softcap": 2.0},
}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def make_targets(num_tokens: int, vocabulary: int, *, ignored: tuple[int, ...] = ()) -> Tensor:
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=torch.Generator().manual_seed(3))
    targets[list(ignored)] = IGNORED
    return targets


def expect_from_logits(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the log-probs and entropies ``[...]`` of logits ``[..., V]``, in their textbook form."""
    z = logits.double() * scale
    z = z if softcap is None else softcap * (z / softcap).tanh()
    z = z / (temperature.double()[..., None] if isinstance(temperature, Tensor) else temperature)
    log_softmax = z.log_softmax(-1)
    counts = targets != IGNORED
    logprobs = log_softmax.gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
    return logprobs * counts, -(log_softmax.exp() * log_softmax).sum(-1) * counts


@dataclass(kw_only=True, slots=True)
class HeadInputs:
    """Leaf tensors; all except the targets require gradients."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    states: Tensor | None  # [T, r]
    up: Tensor | None  # [V, r]
    targets: Tensor  # [T]

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = {name: getattr(self, name) for name in ("hidden", "weight", "bias", "states", "up")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors.values() if tensor.requires_grad]

    def freeze(self, *names: str) -> HeadInputs:
        for name in names:
            if name in self.tensors:
                self.tensors[name].requires_grad_(False)
        return self

    def to(self, target: Any) -> HeadInputs:
        """Return copies in another dtype or on another device."""

        def copy(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.detach().to(target).requires_grad_(tensor.requires_grad)

        moved = {name: copy(getattr(self, name)) for name in ("hidden", "weight", "bias", "states", "up")}
        targets = self.targets if isinstance(target, torch.dtype) else self.targets.to(target)
        return HeadInputs(**moved, targets=targets)

    def expect(self, **change: Any) -> tuple[Tensor, Tensor]:
        """Return the log-probs and entropies ``[T]``, computed from all logits at once."""
        wide = {name: tensor.double() for name, tensor in self.tensors.items()}
        logits = wide["hidden"] @ wide["weight"].T
        if "up" in wide:
            logits = logits + wide["states"] @ wide["up"].T
        if "bias" in wide:
            logits = logits + wide["bias"]
        return expect_from_logits(logits, self.targets, **change)


def make_head_inputs(
    num_tokens: int = 11,
    hidden_size: int = 6,
    vocabulary: int = 17,
    *,
    rank: int | None = 2,
    with_bias: bool = True,
    ignored: tuple[int, ...] = (0, 4),
    dtype: torch.dtype = torch.float64,
    spread: float = 1.0,
) -> HeadInputs:
    """Make inputs whose logits have a standard deviation of about ``spread`` times the root of the hidden size."""
    leaves = {
        "hidden": randn(num_tokens, hidden_size, seed=0, dtype=dtype) * spread,
        "weight": randn(vocabulary, hidden_size, seed=1, dtype=dtype),
        "bias": randn(vocabulary, seed=2, dtype=dtype) if with_bias else None,
        "states": randn(num_tokens, rank, seed=4, dtype=dtype) if rank else None,
        "up": randn(vocabulary, rank, seed=5, dtype=dtype) if rank else None,
    }
    for leaf in leaves.values():
        if leaf is not None:
            leaf.requires_grad_()
    return HeadInputs(**leaves, targets=make_targets(num_tokens, vocabulary, ignored=ignored))


def objective(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Return a weighted sum of the results, which gives every entry a different gradient."""
    weights = randn(2, logprobs.numel(), seed=6).to(logprobs.device)
    total = (logprobs.double().flatten() * weights[0]).sum()
    return total if entropy is None else total + (entropy.double().flatten() * weights[1]).sum()


def assert_near(actual: Any, expected: Any, tolerance: float) -> None:
    """Check that tensors of any dtypes agree, relative to each tensor's largest entry, or to 1 if that is smaller."""
    for got, want in zip(actual, expected, strict=True):
        assert got.shape == want.shape
        bound = tolerance * max(1.0, float(want.detach().abs().max()) if want.numel() else 0.0)
        torch.testing.assert_close(got.detach().double(), want.detach().double(), rtol=0, atol=bound)
