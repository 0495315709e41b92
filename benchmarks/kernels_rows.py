"""Log-probs and entropies from logits: one comparison of ``benchmarks.kernels``.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_turns import Comparison, Outcome, Side, largest_error, relative_error

VARIANTS: dict[str, dict[str, Any]] = {"logprob": {"entropy_gradient": False}, "entropy": {"entropy_gradient": True}}
"""Whether the entropy, which is always computed, has a gradient."""
CHECKED = 64
"""Number of tokens whose results are compared with float64."""
LOGIT_STD = 4.5
ACCESSES = 3
"""Unavoidable accesses per logit: the forward pass reads it, the backward pass reads and writes it."""
COPY_ACCESSES = 2
Compute = Callable[[], tuple[Tensor, Tensor | None]]


@dataclass(kw_only=True, frozen=True)
class RowsCase:
    tokens: int
    vocabulary: int
    dtype: str
    entropy_gradient: bool

    @property
    def logit_bytes(self) -> int:
        return self.tokens * self.vocabulary * getattr(torch, self.dtype).itemsize


@dataclass(kw_only=True, frozen=True)
class Inputs:
    case: RowsCase
    logits: Tensor  # [T, V]
    targets: Tensor  # [T]
    grad_logprobs: Tensor  # [T]
    grad_entropy: Tensor  # [T]


def make_inputs(case: RowsCase, device: torch.device) -> Inputs:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.empty(case.tokens, case.vocabulary, device=device, dtype=getattr(torch, case.dtype))
    logits.normal_(std=LOGIT_STD, generator=generator)
    grads = torch.randn(2, case.tokens, device=device, generator=generator)
    targets = torch.randint(case.vocabulary, (case.tokens,), device=device, generator=generator)
    return Inputs(
        case=case, logits=logits.requires_grad_(), targets=targets, grad_logprobs=grads[0], grad_entropy=grads[1]
    )


def compare(case: RowsCase, names: list[str], device: torch.device) -> Comparison:
    inputs = make_inputs(case, device)
    return Comparison(
        makers={name: lambda name=name: SIDES[name](inputs) for name in names},
        roof="copy",
        gradient_bytes=inputs.logits.nbytes,
        errors_of=errors_against(inputs),
    )


def plain(inputs: Inputs, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy in plain torch, from all logits at once."""
    log_softmax = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)
    logprobs = log_softmax.gather(1, targets[:, None]).squeeze(1)
    if not inputs.case.entropy_gradient:
        log_softmax = log_softmax.detach()
    return logprobs, -(log_softmax.exp() * log_softmax).sum(1)


def errors_against(inputs: Inputs) -> Callable[[Outcome], dict[str, float | None]]:
    rows = slice(0, min(CHECKED, inputs.case.tokens))
    logits = inputs.logits[rows].detach().double().requires_grad_()
    logprobs, entropy = plain(inputs, logits, inputs.targets[rows])
    total = (logprobs * inputs.grad_logprobs[rows]).sum()
    if inputs.case.entropy_gradient:
        total = total + (entropy * inputs.grad_entropy[rows]).sum()
    (grad,) = torch.autograd.grad(total, logits)

    def errors_of(outcome: Outcome) -> dict[str, float | None]:
        found_logprobs, found_entropy, found_grad = outcome
        if found_logprobs is None:  # a copy alone
            return {}
        return {
            "logprob_error": largest_error(found_logprobs[rows], logprobs),
            "entropy_error": None if found_entropy is None else largest_error(found_entropy[rows], entropy),
            "gradient_error": relative_error(found_grad[rows], grad),
        }

    return errors_of


def _side(
    inputs: Inputs, compute: Compute, logits: Tensor | None = None, *, in_place: bool = False, note: str = ""
) -> Side:
    """Return the side of a function that autograd differentiates; ``logits`` are its own, if not the inputs'."""
    differentiated = inputs.logits if logits is None else logits

    def both() -> Outcome:
        logprobs, entropy = compute()
        outputs, upstream = [logprobs], [inputs.grad_logprobs.to(logprobs.dtype)]
        if inputs.case.entropy_gradient:
            outputs.append(entropy)
            upstream.append(inputs.grad_entropy.to(entropy.dtype))
        return logprobs, entropy, *torch.autograd.grad(outputs, differentiated, upstream)

    return Side(both=both, forward=torch.no_grad()(compute), in_place=in_place, note=note)


def make_copy(inputs: Inputs) -> Side:
    """Return a copy of all logits, for the rate at which memory is read and written."""
    source, target = inputs.logits.detach(), torch.empty_like(inputs.logits.detach())

    def both() -> Outcome:
        target.copy_(source)
        return None, None, target

    return Side(both=both)


def make_rlpipe(inputs: Inputs, *, in_place: bool = False) -> Side:
    """Return rlpipe's kernel; in place, the gradient overwrites the logits, which does not change the time."""
    selective = importlib.import_module("rlpipe.kernels.selective")
    logits = inputs.logits.detach().clone().requires_grad_() if in_place else inputs.logits

    def compute() -> tuple[Tensor, Tensor | None]:
        logprobs, entropy = selective.selective_logprob(
            logits, inputs.targets, entropy_gradient=inputs.case.entropy_gradient, in_place=in_place
        )
        return logprobs, entropy

    note = "the gradient overwrites the logits" if in_place else ""
    return _side(inputs, compute, logits, in_place=in_place, note=note)


def make_torch(inputs: Inputs) -> Side:
    return _side(inputs, lambda: plain(inputs, inputs.logits, inputs.targets))


def make_compile(inputs: Inputs) -> Side:
    compiled = torch.compile(plain, dynamic=False)
    return _side(inputs, lambda: compiled(inputs, inputs.logits, inputs.targets))


def make_trl(inputs: Inputs) -> Side:
    if inputs.logits.device.type == "cuda":
        from trl.kernels import selective_log_softmax_and_entropy as fused

        return _side(inputs, lambda: fused(inputs.logits, inputs.targets))
    from trl.trainer.utils import selective_log_softmax_and_entropy

    return _side(
        inputs,
        lambda: selective_log_softmax_and_entropy(
            inputs.logits, inputs.targets, entropy_requires_grad=inputs.case.entropy_gradient
        ),
        note="its torch code, row by row",
    )


def make_liger(inputs: Inputs) -> Side:
    """Return Liger's cross entropy, which computes its gradient in the forward pass, in the logits' memory."""
    from liger_kernel.transformers.functional import liger_cross_entropy

    if inputs.case.entropy_gradient:
        raise NotImplementedError("no entropy")
    if inputs.logits.device.type != "cuda":
        raise NotImplementedError("its kernel needs a GPU")
    logits = inputs.logits.detach().clone().requires_grad_()

    def compute() -> tuple[Tensor, Tensor | None]:
        return -liger_cross_entropy(logits, inputs.targets, reduction="none"), None

    return _side(inputs, compute, logits, note="without entropy; overwrites the logits, and copies them in backward")


SIDES: dict[str, Callable[[Inputs], Side]] = {
    "copy": make_copy,
    "rlpipe": make_rlpipe,
    "rlpipe-in-place": partial(make_rlpipe, in_place=True),
    "torch": make_torch,
    "compile": make_compile,
    "trl": make_trl,
    "liger": make_liger,
}
