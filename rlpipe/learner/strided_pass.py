"""EBFT's strided pass over one row, which samples the tokens of its blocks, and scores these and the documents.

Shapes: L document tokens of a row, K of them with a loss, C columns (B blocks times n samples), g tokens of a block,
M = L + g C tokens of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache

from rlpipe.algorithms.strided import StridedRow, plan_row
from rlpipe.configs.schema.ebft_config import StridedConfig
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.learner.forward import TokenScorer
from rlpipe.learner.packed_attention import mask_for
from rlpipe.learner.row_plan import Row
from rlpipe.types import IntArray, MicroBatch


@dataclass(kw_only=True, slots=True, frozen=True)
class StridedInputs:
    """A strided row on the device, before its blocks are drawn."""

    plan: StridedRow
    documents: Tensor  # [L] token ids
    position_ids: Tensor  # [M]
    mask: StridedMask
    predecessors: Tensor  # [g, C], into the row
    truth: Tensor  # [K], places of the document tokens whose likelihood counts
    group_ids: IntArray  # of the documents, on the host
    num_columns_of_update: int = 0
    """Columns of the update, on all ranks."""

    @property
    def is_empty(self) -> bool:
        return not self.plan.num_columns and not len(self.truth)

    def row(self, drawn: Tensor) -> Row:
        """Return the row with the drawn tokens ``[g, C]``, which are its targets, step by step."""
        token_ids = torch.cat([self.documents, drawn.flatten()])
        places = torch.arange(len(self.documents), len(token_ids), device=token_ids.device)
        return Row(
            token_ids=token_ids,
            position_ids=self.position_ids,
            predictors=self.predecessors.flatten(),
            loss_tokens=places,
            targets=token_ids[places],
            mask=self.mask,
        )


def plan_strided(
    micro_batch: MicroBatch, config: StridedConfig, *, num_samples: int, device: torch.device
) -> StridedInputs:
    """Plan a strided row with the micro batch's sequences as documents.

    The tokens before a document's first loss token are its prompt, if there is more than one.
    """
    starts = micro_batch.sequence_starts
    masks = [micro_batch.loss_mask[start:end] for start, end in pairwise(starts)]
    firsts = [int(mask.argmax()) if mask.any() else 0 for mask in masks]
    plan = plan_row(
        np.diff(starts).tolist(),
        config,
        num_samples=num_samples,
        # The first token of a text can't be predicted, and is no prompt.
        prompt_lengths=[first if first > 1 else 0 for first in firsts],
    )

    mask = make_mask(plan, device)
    return StridedInputs(
        plan=plan,
        documents=_to_device(micro_batch.token_ids, device),
        position_ids=mask.positions,
        mask=mask,
        predecessors=_to_device(plan.predecessors(), device),
        truth=_to_device(np.flatnonzero(micro_batch.loss_mask), device),
        group_ids=micro_batch.group_ids,
    )


def make_mask(plan: StridedRow, device: torch.device) -> StridedMask:
    """Make the attention mask of a strided row."""
    return StridedMask(
        documents=_to_device(plan.documents(), device),
        columns=_to_device(plan.columns(), device),
        positions=_to_device(plan.position_ids(), device),
        visible=_to_device(plan.visible(), device),
        num_document_tokens=plan.num_document_tokens,
        num_columns=plan.num_columns,
    )


def _to_device(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


class StridedLogprobs(NamedTuple):
    """Log-probs of one pass, in a tuple, where FSDP finds the tensors that the backward pass starts from."""

    drawn: Tensor  # [g C], at the temperature that they were drawn with
    entropy: Tensor  # [g C], in nats
    truth: Tensor  # [K], of the documents' own tokens, at temperature 1


def score_blocks(
    scorer: TokenScorer,
    inputs: StridedInputs,
    drawn: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> StridedLogprobs:
    """Compute the log-probs of the drawn tokens ``[g, C]`` and of the documents' tokens in one pass."""

    def work() -> StridedLogprobs:
        row = inputs.row(drawn)
        hidden = scorer.hidden_states(row)
        own, entropy = scorer.score_hidden(
            hidden.index_select(0, row.predictors), row.targets, temperature, chunk_tokens, True, entropy_gradient
        )
        assert entropy is not None
        before = hidden.index_select(0, inputs.truth - 1)
        truth, _ = scorer.score_hidden(before, inputs.documents[inputs.truth], 1.0, chunk_tokens)
        return StridedLogprobs(drawn=own, entropy=entropy, truth=truth)

    result: StridedLogprobs = scorer(work)
    return result


def draw_blocks(
    scorer: TokenScorer, inputs: StridedInputs, uniforms: Tensor, *, temperature: float, chunk_tokens: int
) -> Tensor:
    """Sample the tokens of all blocks ``[g, C]`` from the policy, one step of all columns at a time.

    ``uniforms`` ``[g, C]`` in [0, 1) determine them: each selects the token whose interval of the cumulative
    probability contains it. Logits are in memory for ``chunk_tokens`` columns at a time.
    """
    drawn: Tensor = scorer(partial(_draw_blocks, scorer, inputs, uniforms, temperature, chunk_tokens))
    return drawn


@torch.no_grad()
def _draw_blocks(
    scorer: TokenScorer, inputs: StridedInputs, uniforms: Tensor, temperature: float, chunk_tokens: int
) -> Tensor:
    plan = inputs.plan

    def run(token_ids: Tensor, places: slice, cache: DynamicCache) -> Tensor:
        return scorer.run_backbone(
            token_ids[None],
            position_ids=inputs.position_ids[None, places],
            attention_mask=mask_for(scorer.causal_model, inputs.mask, places),
            past_key_values=cache,
        )[0]

    def draw(hidden: Tensor, points: Tensor) -> Tensor:
        parts = zip(hidden.split(chunk_tokens), points.split(chunk_tokens), strict=True)
        return torch.cat([_invert(scorer.logits(part, temperature), own) for part, own in parts])

    documents = slice(0, plan.num_document_tokens)
    cache = DynamicCache()
    hidden = run(inputs.documents, documents, cache)
    steps = [draw(hidden.index_select(0, inputs.predecessors[0]), uniforms[0])]
    for step in range(plan.num_steps - 1):
        if plan.num_columns:
            hidden = run(steps[-1], plan.place(step), cache)
        else:  # as many passes as on ranks that have blocks
            run(inputs.documents, documents, DynamicCache())
        steps.append(draw(hidden[: plan.num_columns], uniforms[step + 1]))
    return torch.stack(steps)


def _invert(logits: Tensor, points: Tensor) -> Tensor:
    """Return the tokens ``[C]`` whose intervals of the cumulative probability contain the points ``[C]``."""
    ends = logits.double().softmax(1).cumsum(1)  # [C, V]
    found = torch.searchsorted(ends, (points.double() * ends[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[1] - 1)
