"""Plans the row that one micro batch is run as: shared prompts once, and no token that nothing is predicted from.

Shapes: N tokens and S sequences of the micro batch, M tokens of its row, K loss tokens, L tokens of the longest
sequence of a block.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.types import Images, MicroBatch, PlacedImage

Indices = NDArray[np.int64]

BLOCK_GROWTH = 1.5
"""The longest sequence of a block is at most this many times its shortest, which bounds the padding in attention."""


class AttentionLayout(Enum):
    """How the sequences of a micro batch are run."""

    SHARED = "in one row, common prompts once, kept apart by the plan of its attention"
    POSITIONS = "in one row, kept apart by position ids that restart"
    APART = "each in a row of its own, filled up at the end"
    ALONE = "each in a pass of its own"


PLANNED = {AttentionLayout.SHARED, AttentionLayout.APART}


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionPlan:
    """Cuts the tokens of a row into blocks of sequences of similar length, for attention within each sequence alone.

    A block ``[S, L]`` says where in the row each token of each of its sequences lies; shorter sequences are filled up
    at their end, where causal attention never looks. ``selected`` says which of the outputs of all blocks, one after
    the other, belongs to each token of the row.
    """

    blocks: list[Tensor]  # each [S, L], into the row
    selected: Tensor  # [M], into the sum of S * L
    groups: list[Tensor | None] | None = None  # [S, L] of each block
    """Tokens with the same number above 0 see each other, also ahead; None where there are none."""
    groups_in_full: bool = True
    """Whether that holds in layers of full attention, too."""
    groups_past_window: bool = False
    """Whether it holds for tokens that are further apart than a layer's window."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One row for the backbone, and where in it the loss tokens of the micro batch are predicted."""

    token_ids: Tensor  # [M]
    position_ids: Tensor  # [M], or [P, M] where tokens have several
    predictors: Tensor  # [K], the token of the row that predicts each loss token
    loss_tokens: Tensor  # [K], the loss tokens' places in the micro batch
    targets: Tensor  # [K], their token ids
    attention: AttentionPlan | None = None
    """Of ``AttentionLayout.SHARED``; of ``APART``, it says in a single block which tokens each row has."""
    mask: StridedMask | None = None
    """Of EBFT's strided rows, which have no plan."""
    sequences: Sequence[Indices] = ()
    """Where in the row the tokens of each sequence lie, on the host."""
    images: Images = ()
    """By their places in the row."""
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    """What the model is given of the images, by the names of its arguments; on the host until a pass needs it."""


@dataclass(slots=True)
class _RowBuilder:
    """Collects the tokens of a row, with places for the tokens of each sequence."""

    sources: list[Indices] = field(default_factory=list)  # pieces of the micro batch, in the row's order
    sequences: list[Indices] = field(default_factory=list)  # of each sequence, its tokens' places in the row
    num_tokens: int = 0
    prompts: dict[tuple[bytes, ...], Indices] = field(default_factory=dict)
    images: list[PlacedImage] = field(default_factory=list)

    def append(self, start: int, stop: int, images: Images = ()) -> Indices:
        """Adds a piece of the micro batch, and says where in the row it came to lie."""
        places = np.arange(self.num_tokens, self.num_tokens + stop - start)
        self.sources.append(np.arange(start, stop))
        self.images += [image.moved(self.num_tokens - start) for image in _within(images, start, stop)]
        self.num_tokens += stop - start
        return places

    def append_prompt(self, token_ids: Indices, start: int, stop: int, images: Images) -> Indices:
        key = (token_ids[start:stop].tobytes(), *(image.content for image in _within(images, start, stop)))
        if key not in self.prompts:
            self.prompts[key] = self.append(start, stop, images)
        return self.prompts[key]


def plan_row(micro_batch: MicroBatch, *, layout: AttentionLayout, device: torch.device) -> Row:
    """Drops of each sequence what follows the token that predicts its last loss token, and sequences without any.

    In ``AttentionLayout.SHARED``, siblings whose tokens up to their first loss token are equal, with their images, have
    those run once. A micro batch without loss tokens becomes a row of one token, for ranks that run it only because
    others have work; where it has images, so has its row.
    """
    loss_tokens = np.flatnonzero(micro_batch.loss_mask)
    builder = _RowBuilder()
    predictors = []
    starts = micro_batch.sequence_starts
    first_losses = np.searchsorted(loss_tokens, starts)  # [S + 1], into loss_tokens
    for index, (begin, end) in enumerate(pairwise(first_losses)):
        if begin == end:
            continue
        start, first, last = int(starts[index]), int(loss_tokens[begin]), int(loss_tokens[end - 1])
        if layout is AttentionLayout.ALONE:  # where what comes first may look at an image that comes last
            ends = [image.place + image.num_tokens for image in micro_batch.images if image.place < starts[index + 1]]
            last = max([last, *ends])
        if layout is AttentionLayout.SHARED:
            prompt = builder.append_prompt(micro_batch.token_ids, start, first, micro_batch.images)
            places = np.concatenate([prompt, builder.append(first, last, micro_batch.images)])
        else:
            places = builder.append(start, last, micro_batch.images)
        builder.sequences.append(places)
        predictors.append(places[loss_tokens[begin:end] - 1 - start])
    if micro_batch.images and not builder.images:
        image = micro_batch.images[0]
        start = int(starts[np.searchsorted(starts, image.place, side="right") - 1])
        builder.sequences.append(builder.append(start, image.place + image.num_tokens, (image,)))
    elif not predictors:
        builder.sequences.append(builder.append(0, 1))
    return _to_row(micro_batch, builder, predictors, loss_tokens, layout, device)


def _to_row(
    micro_batch: MicroBatch,
    builder: _RowBuilder,
    predictors: list[Indices],
    loss_tokens: Indices,
    layout: AttentionLayout,
    device: torch.device,
) -> Row:
    sources = np.concatenate(builder.sources)

    def tensor(array: NDArray[np.integer]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)

    return Row(
        token_ids=tensor(micro_batch.token_ids[sources]),
        position_ids=tensor(micro_batch.position_ids[sources]),
        predictors=tensor(np.concatenate(predictors) if predictors else np.zeros(0, np.int64)),
        loss_tokens=tensor(loss_tokens),
        targets=tensor(micro_batch.token_ids[loss_tokens]),
        attention=_plan_attention(builder, layout, device) if layout in PLANNED else None,
        sequences=builder.sequences,
        images=tuple(builder.images),
    )


def _within(images: Images, start: int, stop: int) -> Images:
    return tuple(image for image in images if start <= image.place < stop)


def _plan_attention(builder: _RowBuilder, layout: AttentionLayout, device: torch.device) -> AttentionPlan:
    growth = BLOCK_GROWTH if layout is AttentionLayout.SHARED else math.inf
    ordered = sorted(builder.sequences, key=len)
    blocks: list[Tensor] = []
    selected = np.zeros(builder.num_tokens, np.int64)
    offset = first = 0
    while first < len(ordered):
        last = first + 1
        while last < len(ordered) and len(ordered[last]) <= growth * len(ordered[first]):
            last += 1
        longest = len(ordered[last - 1])
        block = np.empty((last - first, longest), np.int64)
        for slot, places in enumerate(ordered[first:last]):
            block[slot, : len(places)] = places
            block[slot, len(places) :] = places[0]
            selected[places] = np.arange(offset, offset + len(places))
            offset += longest
        blocks.append(torch.from_numpy(block).to(device, non_blocking=True))
        first = last
    return AttentionPlan(blocks=blocks, selected=torch.from_numpy(selected).to(device, non_blocking=True))
