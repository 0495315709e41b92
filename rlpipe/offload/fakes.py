"""Traces a model on fake tensors in place of its own: no memory is taken, nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from transformers import PreTrainedModel

from rlpipe.offload import flops
from rlpipe.offload.trace import Seconds, Trace
from rlpipe.offload.units import Unit

BITSANDBYTES = ("quant_state", "bnb_quantized", "blocksize", "quant_type", "compress_statistics", "quant_storage")
"""What its parameters carry beside their values."""
TRACEABLE_EXPERTS = "grouped_mm"
"""transformers' way to run experts that depends on no values; its own choice where torch has the operator."""

flops.register()


class _Loss(nn.Module):
    def __init__(self, model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
        super().__init__()
        self.model, self._loss_of = model, loss_of

    def forward(self) -> Tensor:
        return self._loss_of()


def trace_model(
    model: nn.Module,
    units: Sequence[Unit],
    loss_of: Callable[[Trace], Tensor],
    seconds: Seconds,
    *,
    compute_dtype: torch.dtype | None = None,
) -> Trace:
    """Of ``loss_of``, which calls the model for a loss; the model and its gradients stay as they are.

    Weights that are trained count as of ``compute_dtype``, if it is given. The model may be on the meta device. Raises
    what torch raises where shapes depend on values.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    trace = Trace(units, seconds)
    wrapper = _Loss(model, lambda: loss_of(trace))
    tensors = {**dict(wrapper.named_parameters()), **dict(wrapper.named_buffers())}
    with mode:
        fakes = {name: _fake(tensor, compute_dtype) for name, tensor in tensors.items()}
        trace.run(lambda: functional_call(wrapper, fakes, ()), [fake for fake in fakes.values() if fake.requires_grad])
    return trace


@contextmanager
def traceable_experts(model: nn.Module) -> Iterator[None]:
    """Within it, experts of transformers' models run in a way that fakes can be led through.

    The loop of the eager way asks which experts have tokens. Models whose code knows no other keep it.
    """
    found = next((module for module in model.modules() if isinstance(module, PreTrainedModel)), None)
    own = {} if found is None else found.get_experts_implementation()
    if found is None or "eager" not in own.values():
        yield
        return
    found.config._experts_implementation = TRACEABLE_EXPERTS  # and those of its parts
    try:
        yield
    finally:
        found.config._experts_implementation = own


def _fake(tensor: Tensor, compute_dtype: torch.dtype | None) -> Tensor:
    dtype = compute_dtype if tensor.requires_grad and tensor.ndim > 1 and compute_dtype is not None else tensor.dtype
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="cpu").requires_grad_(
        tensor.requires_grad
    )
    for name in BITSANDBYTES:
        if hasattr(tensor, name):
            setattr(fake, name, getattr(tensor, name))
    return fake
