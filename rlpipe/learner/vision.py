"""Image inputs of rows: positions, attention between image tokens, and the model's arguments.

Shapes: M tokens of the row, I images, S sequences and L tokens of the longest one of a block.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpipe.data.render.processor import feature_token_id, seen_tiles
from rlpipe.learner.row_plan import AttentionLayout, Row, plan_row
from rlpipe.types import Images, MicroBatch

WHOLE_IMAGES = {"gemma3", "gemma4_unified"}
"""Model types in whose layers all tokens of an image see each other, in both directions.

The configs of other models may turn this on, but not for layers of full attention.
"""
PAST_WINDOW = {"gemma4_unified"}
"""Model types in which the tokens of an image see each other even beyond a layer's window."""


class PixelSource(Protocol):
    """A processor that turns encoded images into a model's inputs."""

    def pixels(self, rows: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        """Return the model's inputs for the images of some rows."""


class Vision:
    """The preparation of image inputs for a model with a vision tower."""

    def __init__(self, model: PreTrainedModel, processor: PixelSource) -> None:
        self.processor = processor
        self._base: Any = model.base_model
        self._config = model.config
        self._image_id = feature_token_id(model.config)
        self._arguments = set(inspect.signature(self._base.forward).parameters)

    def plan(self, micro_batch: MicroBatch, layout: AttentionLayout, device: torch.device) -> Row:
        """Plan the row of a micro batch with images."""
        assert self._image_id is not None, "rows with images are refused where the model can't take them"
        row = plan_row(micro_batch, layout=layout, device=device)
        images = self._in_order(row, layout)
        pixels = self.processor.pixels([[image.content for image in images]])
        is_image = row.token_ids.eq(self._image_id)  # [M]
        extra = {name: value for name, value in pixels.items() if name in self._arguments}
        row = replace(row, images=images)
        if hasattr(self._base, "get_rope_index"):
            row = replace(row, position_ids=self._positions(row, extra, is_image, layout))
        if "cross_attention_mask" in self._arguments:
            assert layout is AttentionLayout.ALONE
            visible_tiles = seen_tiles(row.token_ids, self._image_id, extra["aspect_ratio_mask"][0])
            extra["cross_attention_mask"] = visible_tiles[None]
        if self._sees_whole_images:
            row = self._with_image_groups(row, is_image, layout)
            if layout is not AttentionLayout.SHARED:
                extra[self._type_argument] = _per_row(is_image.long(), row, layout)
        return replace(row, vision=extra)

    @property
    def _sees_whole_images(self) -> bool:
        text = self._config.get_text_config()
        is_configured = getattr(text, "use_bidirectional_attention", None) == "vision"
        return is_configured or self._config.model_type in WHOLE_IMAGES

    @property
    def _type_argument(self) -> str:
        return "mm_token_type_ids" if "mm_token_type_ids" in self._arguments else "token_type_ids"

    def _in_order(self, row: Row, layout: AttentionLayout) -> Images:
        """Return the row's images in the order in which the model reads them."""
        if layout is not AttentionLayout.APART:
            return row.images
        assert row.attention is not None
        selected = row.attention.selected.tolist()
        return tuple(sorted(row.images, key=lambda image: selected[image.start]))

    def _positions(self, row: Row, extra: dict[str, Tensor], is_image: Tensor, layout: AttentionLayout) -> Tensor:
        """Return positions ``[4, M]`` of text, time, height and width, or without text ``[3, M]`` in ``APART``."""
        index_at = {image.start: index for index, image in enumerate(row.images)}
        spatial = row.position_ids.expand(3, -1).clone()
        for sequence in row.sequences:
            image_indices = [index_at[token] for token in sequence.tolist() if token in index_at]
            if not image_indices:
                continue
            indices = torch.from_numpy(sequence).to(spatial.device)
            positions, _ = self._base.get_rope_index(
                input_ids=row.token_ids[indices][None],
                mm_token_type_ids=is_image[indices][None].int(),
                image_grid_thw=extra["image_grid_thw"][image_indices].to(spatial.device),
            )
            spatial[:, indices] = positions[:, 0]
        return spatial if layout is AttentionLayout.APART else torch.cat([row.position_ids[None], spatial])

    def _with_image_groups(self, row: Row, is_image: Tensor, layout: AttentionLayout) -> Row:
        """Return the row with a plan that lets the tokens of an image see each other, in layout ``SHARED``."""
        if layout is not AttentionLayout.SHARED or row.attention is None:
            return row
        starts = is_image & ~torch.cat([is_image.new_zeros(1), is_image[:-1]])
        groups = torch.where(is_image, starts.cumsum(0), 0)  # [M]
        block_groups = [groups[block] for block in row.attention.blocks]
        plan = replace(
            row.attention,
            groups=[group if bool(group.any()) else None for group in block_groups],
            groups_in_full=self._config.model_type in WHOLE_IMAGES,
            groups_past_window=self._config.model_type in PAST_WINDOW,
        )
        return replace(row, attention=plan)


def _per_row(values: Tensor, row: Row, layout: AttentionLayout) -> Tensor:
    """Return the row's values ``[M]`` in the shape of the model's input, ``[1, M]`` or ``[S, L]``."""
    if layout is not AttentionLayout.APART:
        return values[None]
    assert row.attention is not None
    return values[row.attention.blocks[0]]
