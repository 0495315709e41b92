"""Image arguments of transformers' generate.

Shapes: B sequences, P tokens of the longest prompt.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.processor import ImageProcessor, feature_token_id, seen_tiles
from rlpipe.types import GroupRequest


class ImageInputs:
    """A builder of generate's image arguments, with the model's processor."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self._processor = ImageProcessor(config)
        self._image_id = feature_token_id(model.config)
        self._arguments = set(inspect.signature(model.forward).parameters)

    def arguments(self, requests: Sequence[GroupRequest], token_ids: Tensor) -> dict[str, Tensor]:
        """Return the arguments by name, for left-padded prompts ``[B, P]`` with the same number of images each."""
        rows = [
            [image.content for image in request.prompt.images]
            for request in requests
            for _ in range(request.group_size)
        ]
        if not rows[0]:
            return {}
        made = self._processor.pixels(rows)
        arguments = {name: value.to(token_ids.device) for name, value in made.items() if name in self._arguments}
        assert self._image_id is not None, "a model that takes images has a token for them"
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in self._arguments:
                arguments[name] = token_ids.eq(self._image_id).long()
        if "cross_attention_mask" in self._arguments:
            tiles = zip(token_ids, arguments["aspect_ratio_mask"], strict=True)
            seen = [seen_tiles(row, self._image_id, own) for row, own in tiles]
            arguments["cross_attention_mask"] = torch.stack(seen)
        return arguments
