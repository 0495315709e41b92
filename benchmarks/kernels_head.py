"""Log-probs and entropies from hidden states and the lm_head: one comparison of ``benchmarks.kernels``.

Shapes: T tokens, H hidden size, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels_turns import Comparison, Outcome, Side, largest_error, relative_error
from rlpipe.kernels.logprob import linear_logprob

VARIANTS: dict[str, dict[str, Any]] = {
    "frozen": {"trained": False, "entropy_gradient": False},
    "frozen-entropy": {"trained": False, "entropy_gradient": True},
    "trained": {"trained": True, "entropy_gradient": False},
}
"""Whether the weight has a gradient, and whether the entropy, which is always computed, has one."""
CHECKED = 64
"""Number of tokens, and of the weight's rows, whose results are compared with float64."""
LOGIT_STD = 4.5
"""Standard deviation of the logits at which distributions are about as narrow as those of trained models."""
TRL_VOCABULARY_CHUNK = 32768
"""Vocabulary entries per chunk, as in ``trl.trainer.utils``."""
Compute = Callable[[], tuple[Tensor, Tensor | None]]


@dataclass(kw_only=True, frozen=True)
class HeadCase:
    tokens: int
    vocabulary: int
    hidden: int
    chunk_tokens: int
    roof_chunk_tokens: int
    """Tokens per chunk of the bare products."""
    dtype: str
    trained: bool
    entropy_gradient: bool


@dataclass(kw_only=True, frozen=True)
class Inputs:
    case: HeadCase
    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [T]
    grad_logprobs: Tensor  # [T]
    grad_entropy: Tensor  # [T]

    @property
    def differentiated(self) -> list[Tensor]:
        return [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]


def make_inputs(case: HeadCase, device: torch.device) -> Inputs:
    """Make random inputs; targets are drawn from the softmax, as a policy's own tokens are."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).mul_(std).to(dtype)

    hidden = normal(case.tokens, case.hidden, std=LOGIT_STD)
    weight = normal(case.vocabulary, case.hidden, std=case.hidden**-0.5)
    parts = hidden.split(case.chunk_tokens)
    probabilities = ((part @ weight.T).float().softmax(1) for part in parts)
    targets = torch.cat([torch.multinomial(part, 1, generator=generator).squeeze(1) for part in probabilities])
    return Inputs(
        case=case,
        hidden=hidden.requires_grad_(),
        weight=weight.requires_grad_(case.trained),
        targets=targets,
        grad_logprobs=normal(case.tokens).float(),
        grad_entropy=normal(case.tokens).float(),
    )


def compare(case: HeadCase, names: list[str], device: torch.device) -> Comparison:
    inputs = make_inputs(case, device)
    return Comparison(
        makers={name: lambda name=name: SIDES[name](inputs) for name in names},
        roof="gemms",
        gradient_bytes=sum(tensor.nbytes for tensor in inputs.differentiated),
        errors_of=errors_against(inputs),
    )


def product_flops(case: HeadCase) -> float:
    """Return the FLOPs of the unavoidable products: logits, hidden states' gradient, and weight's if trained."""
    return 2 * case.tokens * case.vocabulary * case.hidden * (3 if case.trained else 2)


def whole_logits(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Compute log-probs and entropy in plain torch, from all logits at once."""
    logits = functional.linear(inputs.hidden, inputs.weight)
    log_softmax = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(1)  # [T, V]
    logprobs = log_softmax.gather(1, inputs.targets[:, None]).squeeze(1)
    if not inputs.case.entropy_gradient:
        log_softmax = log_softmax.detach()
    return logprobs, -(log_softmax.exp() * log_softmax).sum(1)


def errors_against(inputs: Inputs) -> Callable[[Outcome], dict[str, float | None]]:
    """Return a function that measures errors against float64, on some tokens and some rows of the weight's gradient."""
    rows = slice(0, min(CHECKED, inputs.case.tokens))
    exact = Inputs(
        case=inputs.case,
        hidden=inputs.hidden[rows].detach().double().requires_grad_(),
        weight=inputs.weight.detach().double(),
        targets=inputs.targets[rows],
        grad_logprobs=inputs.grad_logprobs[rows].double(),
        grad_entropy=inputs.grad_entropy[rows].double(),
    )
    outcome = _differentiated(exact, lambda: whole_logits(exact))
    logprobs, entropy, grad_hidden, *_ = (tensor.detach() for tensor in outcome)
    words = inputs.targets[rows].unique()
    grad_weight = _grad_weight(inputs, words) if inputs.case.trained else None

    def errors_of(outcome: Outcome) -> dict[str, float | None]:
        found_logprobs, found_entropy, found_hidden, *found_weight = outcome
        if found_logprobs is None:  # products alone
            return {}
        return {
            "logprob_error": largest_error(found_logprobs[rows], logprobs),
            "entropy_error": None if found_entropy is None else largest_error(found_entropy[rows], entropy),
            "gradient_error": relative_error(found_hidden[rows], grad_hidden),
            "weight_gradient_error": None
            if grad_weight is None
            else relative_error(found_weight[0][words], grad_weight),
        }

    return errors_of


def _grad_weight(inputs: Inputs, words: Tensor) -> Tensor:
    """Return some rows of the weight's gradient through the log-probs, in float64."""
    weight, total = inputs.weight.detach().double(), 0
    for chunk in torch.arange(inputs.case.tokens, device=words.device).split(inputs.case.chunk_tokens):
        hidden = inputs.hidden.detach()[chunk].double()
        chosen = (hidden @ weight.T).softmax(1)[:, words]  # [C, words]
        hit = (inputs.targets[chunk, None] == words).double()
        total = total + ((hit - chosen) * inputs.grad_logprobs[chunk, None].double()).T @ hidden
    return total


def _differentiated(inputs: Inputs, compute: Compute) -> Outcome:
    logprobs, entropy = compute()
    outputs, upstream = [logprobs], [inputs.grad_logprobs]
    if inputs.case.entropy_gradient:
        outputs.append(entropy)
        upstream.append(inputs.grad_entropy)
    upstream = [grad.to(output.dtype) for grad, output in zip(upstream, outputs, strict=True)]
    return logprobs, entropy, *torch.autograd.grad(outputs, inputs.differentiated, upstream)


def _side(inputs: Inputs, compute: Compute, *, has_entropy: bool = True, note: str = "") -> Side:
    """Return the side of a function that autograd differentiates."""
    if inputs.case.entropy_gradient and not has_entropy:
        raise NotImplementedError("no entropy")
    with_note = "; ".join(filter(None, [note, "" if has_entropy else "without entropy"]))
    return Side(both=lambda: _differentiated(inputs, compute), forward=torch.no_grad()(compute), note=with_note)


def make_gemms(inputs: Inputs) -> Side:
    """Return the bare products; every chunk uses the same rows as the gradient of its logits."""
    case, hidden, weight = inputs.case, inputs.hidden.detach(), inputs.weight.detach()
    size = min(case.roof_chunk_tokens, case.tokens)
    logits = hidden.new_empty(size, case.vocabulary)  # [C, V]
    slope = (hidden[:size] @ weight.T).div_(case.vocabulary)  # [C, V]
    grad_hidden = torch.empty_like(hidden)
    grad_weight = torch.zeros_like(weight) if case.trained else None
    chunks = [slice(start, min(start + size, case.tokens)) for start in range(0, case.tokens, size)]

    def forward() -> None:
        for rows in chunks:
            torch.mm(hidden[rows], weight.T, out=logits[: rows.stop - rows.start])

    def both() -> Outcome:
        forward()
        for rows in chunks:
            part = slope[: rows.stop - rows.start]
            torch.mm(part, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight.addmm_(part.T, hidden[rows], beta=0 if rows.start == 0 else 1)
        return None, None, grad_hidden, grad_weight

    return Side(both=both, forward=forward)


def make_rlpipe(inputs: Inputs) -> Side:
    return _side(
        inputs,
        lambda: linear_logprob(
            inputs.hidden,
            inputs.weight,
            inputs.targets,
            chunk_tokens=inputs.case.chunk_tokens,
            entropy_gradient=inputs.case.entropy_gradient,
        ),
    )


def make_torch(inputs: Inputs) -> Side:
    return _side(inputs, lambda: whole_logits(inputs))


def make_compile(inputs: Inputs) -> Side:
    compiled = torch.compile(lambda: whole_logits(inputs), dynamic=False)
    return _side(inputs, compiled)


def make_trl(inputs: Inputs) -> Side:
    """Return TRL's function behind ``fused_lm_head``, called as GRPOTrainer calls it."""
    from trl.kernels import ChunkedLogProbFunction

    def compute() -> tuple[Tensor, Tensor | None]:
        logprobs, entropy, *_ = ChunkedLogProbFunction.apply(
            inputs.hidden, inputs.weight, None, inputs.targets, 1.0, TRL_VOCABULARY_CHUNK, None, 1.0, ("entropy",)
        )
        return logprobs, entropy

    return _side(inputs, compute)


def make_liger(inputs: Inputs) -> Side:
    """Return Liger's function with entropy: kernels from ``nvidia-cutlass-dsl`` on Hopper, else torch in chunks."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as liger

    fallback = liger._FusedLinearPPOFallbackFunction
    try:
        function = liger._resolve_implementation(inputs.hidden.device)
        how = "torch in chunks of 512 tokens" if function is fallback else "CuTe's kernels"
    except ImportError as error:
        function, how = fallback, f"torch in chunks of 512 tokens, because its kernels can't be imported: {error}"
    options = (1.0, -100, True) if function is fallback else (1.0, -100, 1, True)

    def compute() -> tuple[Tensor, Tensor | None]:
        loss, entropy = function.apply(inputs.hidden, inputs.weight, inputs.targets, *options)
        return -loss, entropy

    return _side(inputs, compute, note=f"{how}; also computes the gradient of a frozen weight")


def make_liger_loss(inputs: Inputs) -> Side:
    """Return Liger's Triton kernel for the loss of each token."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    if inputs.hidden.device.type != "cuda":
        raise NotImplementedError("its kernel needs a GPU")

    def compute() -> tuple[Tensor, Tensor | None]:
        return -liger_fused_linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, reduction="none"), None

    return _side(inputs, compute, has_entropy=False)


def make_liger_ppo(inputs: Inputs) -> Side:
    """Return the function that Liger's GRPO loss calls for each chunk of its batch."""
    from liger_kernel.chunked_loss.fused_linear_ppo import LigerFusedLinearPPOBase

    def compute() -> tuple[Tensor, Tensor | None]:
        logprobs = LigerFusedLinearPPOBase.chunk_forward(inputs.hidden[None], inputs.weight, inputs.targets[None])
        return logprobs.squeeze(0), None

    return _side(inputs, compute, has_entropy=False, note="torch; the backward pass multiplies in float32")


def make_cce(inputs: Inputs) -> Side:
    from cut_cross_entropy import linear_cross_entropy

    on_gpu = inputs.hidden.device.type == "cuda"

    def compute() -> tuple[Tensor, Tensor | None]:
        return -linear_cross_entropy(
            inputs.hidden, inputs.weight, inputs.targets, reduction="none", impl="cce" if on_gpu else "torch_compile"
        ), None

    note = "leaves out small gradients" if on_gpu else "its compiled torch code, with all logits in memory"
    return _side(inputs, compute, has_entropy=False, note=note)


SIDES: dict[str, Callable[[Inputs], Side]] = {
    "gemms": make_gemms,
    "rlpipe": make_rlpipe,
    "torch": make_torch,
    "compile": make_compile,
    "trl": make_trl,
    "liger": make_liger,
    "liger-loss": make_liger_loss,
    "liger-ppo": make_liger_ppo,
    "cce": make_cce,
}
