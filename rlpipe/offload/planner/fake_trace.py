"""Trace of a pass on fake tensors, which take no memory and no time.

Fake tensors lie on the CPU, where attention has a kernel of its own; it stands for that of a GPU, which skips what a
causal mask hides. Shapes: batch b, heads h, queries q, keys k, channels d and e of a head; tokens t in all groups g.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import PreTrainedModel

from rlpipe.offload.planner.trace import Operator, Seconds, TensorTracker, Trace
from rlpipe.offload.units import Unit, is_adapted

Shape = tuple[int, ...]


def attention_flops(
    query: Shape, key: Shape, value: Shape, dropout: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> int:
    """Return attention's FLOP for queries ``[b, h, q, d]``, keys ``[b, h, k, d]`` and values ``[b, h, k, e]``."""
    (batch, heads, queries, channels), keys = query, key[2]
    full = 2 * batch * heads * queries * keys * (channels + value[3])
    return full // 2 if is_causal else full


def attention_backward_flops(
    gradient: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    output: Shape,
    logsumexp: Shape,
    dropout: float,
    is_causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Return attention's backward FLOP: the scores again, and two gradients per product (arXiv:2307.08691)."""
    channels, value_channels = query[3], value[3]
    forward = attention_flops(query, key, value, dropout, is_causal)
    return forward * (3 * channels + 2 * value_channels) // (channels + value_channels)


def added_flops(total: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOP of ``[t, d]`` times ``[d, e]``, added in place; torch's counter knows only ``addmm`` itself."""
    return 2 * left[0] * left[1] * right[1]


def grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOP of a grouped product.

    It multiplies each token with the matrix of its group, ``[t, d]`` and ``[g, d, e]``, or sums up the tokens' outer
    products by group, ``[d, t]`` and ``[t, e]``.
    """
    return 2 * left[0] * left[1] * right[-1]


def register_formulas() -> None:
    """Register the formulas, except those of operators that the registry knows already."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        aten.addmm_: added_flops,
        aten._grouped_mm: grouped_flops,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register: Any = register_flop_formula(operator)
            register(formula)


BITSANDBYTES = ("quant_state", "bnb_quantized", "blocksize", "quant_type", "compress_statistics", "quant_storage")
"""Attributes that bitsandbytes' parameters have beside their values."""
TRACEABLE_EXPERTS = "grouped_mm"
"""Implementation of experts in transformers that depends on no values; its default if torch has the operator."""
WITHOUT_VALUES = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided}
"""Operators that make uninitialized tensors, which may be large."""

register_formulas()


class RealUnlessWeighted(TorchDispatchMode):
    """Mode within a fake mode that computes what does not depend on fake tensors, so that shapes may depend on it.

    Masks, positions and the grids of images are small, and models read their values.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_values = not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs)))
        if has_values and func._overloadpacket not in WITHOUT_VALUES:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is torch.ops.aten.index.Tensor:
            args = (args[0], _masks_to_indices(args[1]))
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            # torch's fake kernel supports only bfloat16, as the kernel on GPUs does.
            narrow = [arg.to(torch.bfloat16) for arg in args[:2]]
            return func(*narrow, *args[2:], **kwargs).to(args[0].dtype)
        return func(*args, **kwargs)


def _masks_to_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Replace masks whose values are known by the indices of the elements that they select."""
    converted: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype is torch.bool and not isinstance(index, FakeTensor):
            with unset_fake_temporarily():
                converted += index.nonzero(as_tuple=True)
        else:
            converted.append(index)
    return converted


class _UnitCall(nn.Module):
    def __init__(self, model: nn.Module, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self._run = model, run

    def forward(self) -> Tensor:
        return self._run()


def trace_model(
    model: nn.Module,
    units: Sequence[Unit],
    loss_of: Callable[[Trace], Tensor],
    seconds: Seconds,
    *,
    compute_dtype: torch.dtype | None = None,
    start_s: float = 0.0,
) -> Trace:
    """Trace ``loss_of``, which calls the model for a loss; the model and its gradients stay as they are.

    ``seconds`` and ``start_s`` are those of ``Trace``. Trained weights in chunks count as having ``compute_dtype``, if
    it is given. The model may be on the meta device. Raises torch's error if shapes depend on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    trace = Trace(units, seconds, start_s=start_s)
    wrapper = _UnitCall(model, lambda: loss_of(trace))
    with mode:
        fakes = _fakes(wrapper, None if is_adapted(model) else compute_dtype)
    with mode, RealUnlessWeighted():
        trace.run(lambda: functional_call(wrapper, fakes, ()), [fake for fake in fakes.values() if fake.requires_grad])
    return trace


@dataclass(kw_only=True, slots=True, frozen=True)
class ForwardCost:
    """Cost of a forward pass that keeps nothing for a backward pass."""

    seconds: float
    peak_bytes: int
    """Most bytes of the tensors that it makes; weights do not count."""


def trace_forward(
    model: nn.Module, run: Callable[[], Tensor], seconds: Seconds, *, start_s: float = 0.0
) -> ForwardCost:
    """Return the cost of ``run``, which calls the model without gradients, traced as in ``trace_model``."""
    mode, total, starts = FakeTensorMode(allow_non_fake_inputs=True), 0.0, 0

    def observe(operator: Operator) -> None:
        nonlocal total, starts
        total += seconds(operator)
        starts += operator.num_bytes > 0

    wrapper, tracker = _UnitCall(model, run), TensorTracker(observe)
    with mode:
        fakes = _fakes(wrapper, None)
    with traceable_experts(model), mode, RealUnlessWeighted(), torch.no_grad(), tracker:
        functional_call(wrapper, fakes, ())
    return ForwardCost(seconds=max(total, starts * start_s), peak_bytes=tracker.peak)


@contextmanager
def traceable_experts(model: nn.Module) -> Iterator[None]:
    """Run the experts of transformers' models, within the context, in a way that works on fake tensors.

    The eager implementation loops over the experts that have tokens, which depends on values. Models whose code has no
    other implementation keep it.
    """
    pretrained = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    implementations = {} if pretrained is None else pretrained.get_experts_implementation()
    if pretrained is None or "eager" not in implementations.values():
        yield
        return
    pretrained.config._experts_implementation = TRACEABLE_EXPERTS  # also sets that of its sub-configs
    try:
        yield
    finally:
        pretrained.config._experts_implementation = implementations


def _fakes(module: nn.Module, compute_dtype: torch.dtype | None) -> dict[str, Tensor]:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: _fake(tensor, compute_dtype) for name, tensor in tensors.items()}


def _fake(tensor: Tensor, compute_dtype: torch.dtype | None) -> Tensor:
    dtype = compute_dtype if tensor.requires_grad and tensor.ndim > 1 and compute_dtype is not None else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu")
    fake.requires_grad_(tensor.requires_grad)
    for name in BITSANDBYTES:
        if hasattr(tensor, name):
            setattr(fake, name, getattr(tensor, name))
    return fake
