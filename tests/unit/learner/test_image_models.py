"""Packed rows of models whose processors need torchvision; transformers' image processors make their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from image_cases import TEXT, VISION, picture
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.data.render.images import open_image
from rlpipe.learner.policy import load_policy
from rlpipe.types import PlacedImage, Rollout

IMAGE, BREAK, END = 90, 91, 92
VOCABULARY = 100
GEMMA_LAYERS = {  # one full layer is not the last, whose outputs are read at text tokens only
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
}


class PixtralPixels:
    """The pixels of Mistral Small 3 and Pixtral, with one token per patch, and one after each row of patches."""

    made = PixtralImageProcessorPil(size={"longest_edge": 32}, patch_size={"height": 8, "width": 8})

    def pixels(self, rows: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        return dict(self.made([[open_image(image) for image in row] for row in rows], return_tensors="pt"))

    def tokens(self, image: bytes) -> list[int]:
        height, width = (self.pixels([[image]])["image_sizes"][0] // 8).tolist()
        rows = [*[IMAGE] * width, BREAK] * height
        return [*rows[:-1], END]


class Gemma4Pixels:
    """The pixels of Gemma 4, with one token per square of ``pool_side`` x ``pool_side`` patches."""

    def __init__(self, patch_size: int, pool_side: int) -> None:
        self.made = Gemma4ImageProcessorPil(patch_size=patch_size, pooling_kernel_size=pool_side, max_soft_tokens=70)

    def pixels(self, rows: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        images = [open_image(image) for row in rows for image in row]
        return dict(self.made(images, return_tensors="pt"))

    def tokens(self, image: bytes) -> list[int]:
        return [IMAGE] * int(self.pixels([[image]])["num_soft_tokens_per_image"][0])


def mistral3() -> PreTrainedConfig:
    vision = VISION | {"model_type": "pixtral", "image_size": 32, "patch_size": 8, "head_dim": 16}
    text = TEXT | {"model_type": "mistral", "vocab_size": VOCABULARY, "sliding_window": None}
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=IMAGE, spatial_merge_size=1
    )


def pixtral() -> PreTrainedConfig:
    vision = VISION | {"model_type": "pixtral", "image_size": 32, "patch_size": 8, "head_dim": 16}
    text = TEXT | {"model_type": "mistral", "vocab_size": VOCABULARY, "sliding_window": None}
    return transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def gemma4(sees_ahead: str | None) -> PreTrainedConfig:
    text = {
        **TEXT,
        **GEMMA_LAYERS,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 64,
        "pad_token_id": 0,
        "use_bidirectional_attention": sees_ahead,
    }
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 3}
    return transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, image_token_id=IMAGE, video_token_id=93
    )


def gemma4_unified() -> PreTrainedConfig:
    text = {**TEXT, **GEMMA_LAYERS, "vocab_size": VOCABULARY, "global_head_dim": 64, "pad_token_id": 0}
    vision = {"patch_size": 4, "pooling_kernel_size": 3, "mm_embed_dim": 32, "mm_posemb_size": 80}
    return transformers.Gemma4UnifiedConfig(
        text_config=text,
        vision_config=vision | {"output_proj_dims": 32},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=93,
    )


MODELS = {
    "mistral3": (mistral3, PixtralPixels()),
    "pixtral": (pixtral, PixtralPixels()),
    "gemma4": (lambda: gemma4(None), Gemma4Pixels(4, 3)),
    "gemma4-large": (lambda: gemma4("vision"), Gemma4Pixels(4, 3)),
    "gemma4-unified": (gemma4_unified, Gemma4Pixels(12, 1)),
}


def sequences(pixels: Any) -> list[Rollout]:
    """Return texts of 3 to 9 tokens around up to two images."""
    rng = np.random.default_rng(0)
    rollouts = []
    for index, images in enumerate([[], [picture(40, 30, 1)], [picture(20, 20, 2), picture(70, 30, 3)]]):
        token_ids, placed = rng.integers(1, 89, 3).tolist(), []
        for image in images:
            own = pixels.tokens(image)
            placed.append(PlacedImage(start=len(token_ids), num_tokens=len(own), content=image))
            token_ids += own + rng.integers(1, 89, 3).tolist()
        length = len(token_ids) + 3
        rollouts.append(
            Rollout(
                group_id=index,
                sample_index=0,
                prompt_id=index,
                task={},
                token_ids=np.array([*token_ids, *rng.integers(1, 89, 3)], np.int32),
                loss_mask=np.arange(length) >= len(token_ids),
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.zeros(length, np.int32),
                advantages=np.ones(length, np.float32),
                images=tuple(placed),
            )
        )
    return rollouts


@torch.no_grad()
def alone(policy: Any, rollout: Rollout, pixels: Any) -> np.ndarray:
    token_ids = torch.from_numpy(rollout.token_ids).long()[None]
    made: dict[str, Tensor] = {}
    if rollout.images:
        made = pixels.pixels([[image.content for image in rollout.images]])
        made.pop("num_soft_tokens_per_image", None)
        if isinstance(pixels, Gemma4Pixels):
            made["mm_token_type_ids"] = (token_ids == IMAGE).long()
    logits = policy(input_ids=token_ids, **made).logits[0, :-1].float()
    logprobs = logits.log_softmax(-1).gather(1, token_ids[0, 1:, None]).squeeze(1)
    return logprobs.numpy()[rollout.loss_mask[1:]]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_rows_are_scored_as_each_alone(name: str, attention: str, tmp_path: Path) -> None:
    make_config, pixels = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make_config(), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path)
    config = ModelConfig(
        path=str(tmp_path), dtype="float32", images=True, attention=attention, adapter=AdapterConfig(kind="none")
    )
    rollouts = sequences(pixels)
    expected = np.concatenate([alone(model.eval(), rollout, pixels) for rollout in rollouts])
    policy = load_policy(config, LearnerConfig(), torch.device("cpu"))
    policy.vision.processor = pixels
    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)
    (micro_batch,) = batch.mini_batches[0].micro_batches
    with policy.inference():
        logprobs, _ = policy.logprobs(micro_batch, temperature=1.0)
    np.testing.assert_allclose(logprobs.numpy()[micro_batch.loss_mask], expected, atol=2e-5)
