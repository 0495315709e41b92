"""Sampling and stopping inside transformers' generate, with a seed and a length limit for each sequence.

Shapes: B sequences, P tokens of the longest prompt, V tokens of the vocabulary, L tokens of the longest completion.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.rollout.engine import sample_seed
from rlpipe.types import GroupRequest


class Sampler(LogitsProcessor):
    """A logits processor that samples the next token of every sequence, and masks all others so that generate takes it.

    ``logprobs`` grows by one entry ``[B]`` for each token: its log-probability in the distribution it was sampled from.
    The steps and their order are vLLM's: repetition penalty, temperature, min_p, top_k, top_p. A temperature of 0
    takes the likeliest token, with its log-probability before min_p, top_k and top_p.
    """

    def __init__(self, requests: Sequence[GroupRequest], sampling: SamplingConfig, prompt_mask: Tensor) -> None:
        self.logprobs: list[Tensor] = []
        device = prompt_mask.device
        longest = max(request.max_tokens for request in requests)
        self._penalty = sampling.repetition_penalty
        self._prompt_mask = prompt_mask.bool()  # [B, P]
        self._temperature = torch.tensor(
            [[request.temperature] for request in requests for _ in range(request.group_size)], device=device
        )  # [B, 1]
        self._uniform = torch.stack(
            [_uniform(request.seed, index, longest) for request in requests for index in range(request.group_size)]
        ).to(device)  # [B, L]
        self._cuts: Any = LogitsProcessorList()
        if sampling.min_p > 0:
            self._cuts.append(MinPLogitsWarper(sampling.min_p))
        if sampling.top_k > 0:
            self._cuts.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            self._cuts.append(TopPLogitsWarper(sampling.top_p))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = self._penalise(input_ids, scores.float())  # [B, V]
        greedy = self._temperature == 0
        cut = self._cuts(input_ids, scores / self._temperature.masked_fill(greedy, 1.0))
        logprobs = torch.where(greedy, scores, cut).log_softmax(-1)
        cumulative = logprobs.double().exp().cumsum(-1)
        threshold = self._uniform[:, len(self.logprobs), None] * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=scores.shape[1] - 1)
        tokens = torch.where(greedy, scores.argmax(-1, keepdim=True), sampled)  # [B, 1]
        self.logprobs.append(logprobs.gather(1, tokens).squeeze(1))
        return torch.full_like(scores, float("-inf")).scatter_(1, tokens, 0.0)

    def _penalise(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply CTRL's repetition penalty (arXiv:1909.05858) over prompt and completion, without the padding."""
        if self._penalty == 1.0:
            return scores
        sampled = input_ids.new_ones((len(input_ids), len(self.logprobs)), dtype=torch.bool)
        real = torch.cat([self._prompt_mask, sampled], dim=1)
        counts = torch.zeros_like(scores).scatter_add_(1, input_ids, real.float())
        penalised = torch.where(scores > 0, scores / self._penalty, scores * self._penalty)
        return torch.where(counts > 0, penalised, scores)


class StopCriterion(StoppingCriteria):
    """A criterion that ends sequences at an end token, a stop string, or a length limit, and records where and why."""

    def __init__(
        self,
        max_tokens: Sequence[int],
        *,
        num_prompt: int,
        end_ids: Collection[int | None],
        stop: Sequence[str],
        decode: Callable[[list[int]], str],
    ) -> None:
        self.lengths = [0] * len(max_tokens)
        self.reasons = [""] * len(max_tokens)
        self._max_tokens = max_tokens
        self._num_prompt = num_prompt
        self._end_ids = end_ids
        self._stop = stop
        self._decode = decode
        # A character takes at most four tokens, in a vocabulary of bytes.
        self._tail = 4 * max(map(len, stop), default=0) + 4

    @property
    def most_tokens(self) -> int:
        return max(self._max_tokens)

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        length = input_ids.shape[1] - self._num_prompt
        tails = input_ids[:, -min(length, self._tail) :].tolist()
        for row, tail in enumerate(tails):
            if not self.reasons[row]:
                self.lengths[row] = length
                self.reasons[row] = self._reason(tail, length, self._max_tokens[row])
        return torch.tensor([bool(reason) for reason in self.reasons], device=input_ids.device)

    def _reason(self, tail: list[int], length: int, max_tokens: int) -> str:
        if tail[-1] in self._end_ids:
            return "stop"
        if self._stop:
            text = self._decode(tail)
            if any(stop in text for stop in self._stop):
                return "stop"
        return "length" if length >= max_tokens else ""


def _uniform(seed: int, sample_index: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(sample_seed(seed, sample_index))
    return torch.rand(count, generator=generator, dtype=torch.float64)
