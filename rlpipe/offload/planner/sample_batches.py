"""Sample batches for a model: text, text with an image, a pair of texts, or texts with classes."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlpipe.data.render.processor import feature_token_id

IMAGE_SIDE = 448
"""Side of a typical image in pixels; models that take only one size have their own."""


def representative_batch(model: nn.Module, num_tokens: int, *, num_rows: int = 1) -> dict[str, Tensor]:
    """Return arguments of the model's ``forward`` for a loss, with ``num_tokens`` in every row.

    The model's class decides on the kind before its config does: a classifier with an encoder and a decoder is a
    classifier. Raises ``ValueError`` for an unknown class; the caller then needs a batch of its own.
    """
    base: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    name, config = type(base).__name__, getattr(base, "config", None)
    tokens = torch.zeros(num_rows, num_tokens, dtype=torch.long)
    if "ForSequenceClassification" in name:
        is_regression = getattr(config, "num_labels", 2) == 1
        return {
            "input_ids": tokens,
            "labels": torch.zeros(num_rows, dtype=torch.float if is_regression else torch.long),
        }
    if "ForTokenClassification" in name or "ForMaskedLM" in name:
        return {"input_ids": tokens, "labels": tokens}
    if "ForQuestionAnswering" in name:
        places = torch.zeros(num_rows, dtype=torch.long)
        return {"input_ids": tokens, "start_positions": places, "end_positions": places}
    if getattr(config, "vision_config", None) is not None and (
        "ForConditionalGeneration" in name or "ForImage" in name
    ):
        return _with_image(base, config, tokens)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "labels": tokens}
    if "ForCausalLM" in name or "LMHead" in name:
        return {"input_ids": tokens, "labels": tokens}
    raise ValueError(f"{name} is of no kind that a batch is known for: give one")


def _with_image(model: Any, config: Any, tokens: Tensor) -> dict[str, Tensor]:
    vision = config.vision_config
    rows, length = tokens.shape
    if hasattr(vision, "spatial_merge_size"):
        pixels, count = _patches(vision, rows, length)
    else:
        pixels, count = _squares(config, vision, rows)
    if count >= length:
        raise ValueError(f"an image of {type(model).__name__} is {count} tokens: give rows of more than {length}")
    image_token = feature_token_id(config)
    assert image_token is not None, "a model with a vision tower has a token for its features"
    tokens = torch.full_like(tokens, 1 if image_token != 1 else 2)
    tokens[:, 1 : 1 + count] = image_token
    batch = {"input_ids": tokens, "labels": tokens, **pixels}
    accepted = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            batch[name] = (tokens == image_token).long()
    return batch


def _patches(vision: Any, rows: int, length: int) -> tuple[dict[str, Tensor], int]:
    """Return image inputs and tokens per image for models that merge patches in squares (Qwen); at most half a row."""
    merge = vision.spatial_merge_size
    side = max(1, min(IMAGE_SIDE // (vision.patch_size * merge), math.isqrt(length // 2)))
    patches = side * merge
    size = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
    pixels = torch.zeros(rows * patches**2, size)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, patches, patches]] * rows)}, side**2


def _squares(config: Any, vision: Any, rows: int) -> tuple[dict[str, Tensor], int]:
    """Return image inputs and tokens per image for models that take images of one size (Gemma 3, LLaVA)."""
    pixels = torch.zeros(rows, getattr(vision, "num_channels", 3), vision.image_size, vision.image_size)
    count = getattr(config, "mm_tokens_per_image", None) or (vision.image_size // vision.patch_size) ** 2
    return {"pixel_values": pixels}, count
