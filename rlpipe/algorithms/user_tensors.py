"""Checks of the tensors that a function of the user's own returns: their shapes, types, gradients and values.

They stand apart from ``plugins``, which a config's check imports without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlpipe.errors import RunError

Fail = Callable[[str], RunError]
"""Makes the error for a problem, such as ``returned NaN``."""


def check_shapes(tensors: Mapping[str, Any], shape: torch.Size, unit: str, fail: Fail) -> None:
    """Raise unless all of the named values are tensors of a shape, with one value for each ``unit``."""
    for name, values in tensors.items():
        if not isinstance(values, Tensor) or values.shape != shape:
            received = f"shape {list(values.shape)}" if isinstance(values, Tensor) else f"type {type(values).__name__}"
            raise fail(f"returned {name} of {received}, not a tensor of shape {list(shape)}, one value for each {unit}")


def check_marks(tensors: Mapping[str, Any], shape: torch.Size, unit: str, fail: Fail) -> None:
    """Raise unless all of the named values that are not None are tensors of booleans of a shape."""
    marks = {name: values for name, values in tensors.items() if values is not None}
    check_shapes(marks, shape, unit, fail)
    for name, values in marks.items():
        if values.dtype is not torch.bool:
            raise fail(f"returned {name} of type {values.dtype}, not torch.bool")


def check_gradient(values: Tensor, source: Tensor, name: str, fail: Fail) -> None:
    """Raise if values have no gradient though ``source``, which the function got as ``name``, has one."""
    if source.requires_grad and not values.requires_grad:
        raise fail(f"returned a loss without a gradient; compute it from {name}")


def check_finite(values: Tensor, mask: Tensor, source: Tensor, units: str, fail: Fail) -> None:
    """Raise if masked values are not finite though those of ``source`` are.

    The learner skips updates whose log-probs are not finite.
    """
    num_bad = int((mask & ~values.isfinite()).sum())
    if num_bad and bool(source.isfinite().all()):
        shape = list(values.shape)
        raise fail(f"returned NaN or infinity for {num_bad} of {int(mask.sum())} {units}, in the shape {shape}")
