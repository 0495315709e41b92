"""Micro batches that stand for a model's real ones when its memory and time are traced."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from rlpipe.data.render.processor import feature_token_id

IMAGE_SIDE = 448
"""Side of a typical image in pixels; models that take only one size have their own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class BlankImages:
    """Equal blank images, as a model's ``forward`` takes them."""

    num_images: int
    tokens_per_image: int
    inputs: dict[str, Tensor]


def blank_images(config: Any, num_images: int, *, most_tokens: int) -> BlankImages:
    """Return images of a typical size, which have up to ``most_tokens`` tokens each if the model takes any size.

    ``config`` is the transformers config of a model with a vision tower.
    """
    vision = config.vision_config
    if hasattr(vision, "spatial_merge_size"):
        return _patches(vision, num_images, most_tokens)
    return _squares(config, vision, num_images)


def _patches(vision: Any, num_images: int, most_tokens: int) -> BlankImages:
    """Return images for models that merge patches in squares (Qwen)."""
    merge = vision.spatial_merge_size
    side = max(1, min(IMAGE_SIDE // (vision.patch_size * merge), math.isqrt(most_tokens)))
    patches = side * merge
    size = getattr(vision, "in_channels", 3) * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
    return BlankImages(
        num_images=num_images,
        tokens_per_image=side**2,
        inputs={
            "pixel_values": torch.zeros(num_images * patches**2, size),
            "image_grid_thw": torch.tensor([[1, patches, patches]] * num_images),
        },
    )


def _squares(config: Any, vision: Any, num_images: int) -> BlankImages:
    """Return images for models that take one size (Gemma 3, LLaVA, InternVL, Idefics 3), and for Pixtral's tower."""
    side, patch = (size if isinstance(size, int) else size[0] for size in (vision.image_size, vision.patch_size))
    takes_any = getattr(vision, "model_type", "") == "pixtral"
    side = min(side, IMAGE_SIDE) if takes_any else side
    merged = getattr(config, "spatial_merge_size", None) or getattr(config, "scale_factor", None) or 1
    shrunk = getattr(config, "downsample_ratio", 1) / merged
    count = getattr(config, "mm_tokens_per_image", None) or int((side // patch * shrunk) ** 2)
    pixels = torch.ones(num_images, getattr(vision, "num_channels", 3), side, side)  # Idefics drops images of zeros
    inputs = {"pixel_values": pixels[None] if hasattr(config, "scale_factor") else pixels}
    if takes_any:
        inputs["image_sizes"] = torch.tensor([[side, side]] * num_images)
    return BlankImages(num_images=num_images, tokens_per_image=count, inputs=inputs)


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
        positions = torch.zeros(num_rows, dtype=torch.long)
        return {"input_ids": tokens, "start_positions": positions, "end_positions": positions}
    if getattr(config, "vision_config", None) is not None and (
        "ForConditionalGeneration" in name or "ForImage" in name
    ):
        return _with_image(base, config, tokens)
    if getattr(config, "is_encoder_decoder", False):
        return {"input_ids": tokens, "labels": tokens}
    if "ForCausalLM" in name or "LMHead" in name:
        return {"input_ids": tokens, "labels": tokens}
    raise ValueError(f"{name} has no default batch: pass one")


def _with_image(model: Any, config: Any, tokens: Tensor) -> dict[str, Tensor]:
    rows, length = tokens.shape
    images = blank_images(config, rows, most_tokens=length // 2)
    count = images.tokens_per_image
    if count >= length:
        raise ValueError(
            f"an image of {type(model).__name__} has {count} tokens, too many for rows of {length}: raise num_tokens"
        )
    image_token = feature_token_id(config)
    assert image_token is not None, "a model with a vision tower has a token for its features"
    tokens = torch.full_like(tokens, 1 if image_token != 1 else 2)
    tokens[:, 1 : 1 + count] = image_token
    accepted = inspect.signature(model.forward).parameters
    inputs = {name: value for name, value in images.inputs.items() if name in accepted}
    batch = {"input_ids": tokens, "labels": tokens, **inputs}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            batch[name] = (tokens == image_token).long()
    return batch
