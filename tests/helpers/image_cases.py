"""Tiny models of the families that take images, with their real processors, and rows for them.

The processors of Pixtral, Gemma 4 and Llama 4 need torchvision; the first two have stand-ins that do without it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from chat_families import FAMILIES
from family_cases import SIZES as TEXT
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedTokenizerFast, set_seed
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.images import as_png
from rlpipe.data.render.processor import ImageProcessor, load_tokenizer
from rlpipe.data.row import RowLocation
from rlpipe.data.row_renderer import SequenceRenderer
from rlpipe.types import Prompt, Rollout

VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 8}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


@dataclass(kw_only=True, frozen=True)
class ImageFamily:
    chat: str
    """The entry of ``chat_families`` that provides the tokenizer and the template."""
    make_config: Callable[[PreTrainedTokenizerFast], PreTrainedConfig]
    make_processor: Callable[[PreTrainedTokenizerFast], Any]
    extra_tokens: tuple[str, ...] = ()
    named: dict[str, str] = field(default_factory=dict)
    """Tokens by their attribute names in the tokenizer."""
    placeholder: str | None = None
    """The template's text for an image, if it differs from the chat family's."""

    def tokenizer(self) -> PreTrainedTokenizerFast:
        family = FAMILIES[self.chat]
        tokenizer = family.tokenizer()
        tokenizer.add_tokens([*self.extra_tokens], special_tokens=True)
        tokenizer._set_model_specific_special_tokens(self.named)
        if self.placeholder is not None:
            tokenizer.chat_template = family.full_template.replace(family.image, self.placeholder)
        return tokenizer

    def write(self, folder: Path) -> Path:
        """Write a model with random weights, and its processor."""
        tokenizer = self.tokenizer()
        config = self.make_config(tokenizer)
        set_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # so that images have an effect even if gates start at 0
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder)
        self.make_processor(tokenizer).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder


def picture(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return as_png(Image.fromarray(pixels))


def rows() -> list[dict[str, Any]]:
    """Return rows without images, with one, with several in several turns, and with one after the last answer."""
    look = {"type": "image"}
    return [
        {"messages": turns("the cat", "sat")},
        {"messages": turns([look, text("the cat")], "the mat"), "images": [picture(40, 30, 1)]},
        {
            "messages": turns([look, text("the"), look], "sat on", [text("cat"), look], "the answer is the cat"),
            "images": [picture(20, 20, 2), picture(70, 30, 3), picture(30, 90, 4)],
        },
        {"messages": turns([look, text("the cat")], "mat"), "images": [picture(40, 30, 5)]},
        {"messages": turns("the cat", "the", [look, text("?")])[:3], "images": [picture(16, 16, 6)]},
    ]


def render_rows(model: ModelConfig) -> list[Rollout]:
    renderer = SequenceRenderer(
        load_tokenizer(model), DataConfig(source="jsonl"), max_tokens=512, processor=ImageProcessor(model)
    )
    return [renderer.render(row, place) for row, place in zip(rows(), places(), strict=True)]


def render_prompts(model: ModelConfig) -> list[Prompt]:
    renderer = SequenceRenderer(
        load_tokenizer(model), DataConfig(source="jsonl"), max_tokens=512, processor=ImageProcessor(model)
    )
    return [renderer.prompt(row, place) for row, place in zip(rows(), places(), strict=True)]


def places() -> list[RowLocation]:
    return [RowLocation(row=index, epoch=0, location=f"row {index + 1}") for index in range(len(rows()))]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turns(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


def _qwen(name: str, vision: dict[str, Any], text: dict[str, Any] | None = None) -> ImageFamily:
    """Return the family of Qwen2-VL or one of its successors."""

    def make_config(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        find = tokenizer.convert_tokens_to_ids
        return getattr(transformers, f"{name}Config")(
            text_config=TEXT | {"vocab_size": len(tokenizer), "rope_parameters": MROPE} | (text or {}),
            vision_config=QWEN_VISION | vision,
            image_token_id=find("<|image_pad|>"),
            video_token_id=find("<|video_pad|>"),
            vision_start_token_id=find("<|vision_start|>"),
            vision_end_token_id=find("<|vision_end|>"),
        )

    def make_processor(tokenizer: PreTrainedTokenizerFast) -> Any:
        parts = classmethod(lambda _: ["image_processor", "tokenizer"])
        known = getattr(transformers, "Qwen3VLProcessor" if name.startswith("Qwen3") else f"{name}Processor")
        image_processor = Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16 * 16, max_pixels=48 * 48)
        return type(known.__name__, (known,), {"get_attributes": parts})(image_processor, tokenizer)

    return ImageFamily(
        chat="qwen2_vl",
        make_config=make_config,
        make_processor=make_processor,
        extra_tokens=("<|vision_start|>", "<|vision_end|>"),
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
    )


def _gemma3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    find = tokenizer.convert_tokens_to_ids
    layers = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
    return transformers.Gemma3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer), "sliding_window": 3} | layers,
        vision_config=VISION | {"image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        boi_token_index=find("<start_of_image>"),
        eoi_token_index=find("<end_of_image>"),
        image_token_index=find("<image_soft_token>"),
    )


def _mllama(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    text_config = TEXT | {"vocab_size": len(tokenizer), "num_hidden_layers": 3, "cross_attention_layers": [1]}
    vision = VISION | {"attention_heads": 2, "num_global_layers": 1, "image_size": 28, "patch_size": 14}
    return transformers.MllamaConfig(
        text_config=text_config | {"pad_token_id": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        vision_config=vision
        | {
            "max_num_tiles": 2,
            "vision_output_dim": 64,
            "intermediate_layers_indices": [0],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )


def _llava(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return transformers.LlavaConfig(
        text_config=TEXT | {"vocab_size": len(tokenizer), "model_type": "llama"},
        vision_config=VISION | {"model_type": "clip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )


def _idefics3(tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    return transformers.Idefics3Config(
        text_config=TEXT | {"vocab_size": len(tokenizer), "model_type": "llama", "pad_token_id": 0},
        vision_config=VISION | {"image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=0,
    )


GEMMA_IMAGES = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
IDEFICS_TOKENS = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")

IMAGE_FAMILIES = {
    "qwen2-vl": _qwen("Qwen2VL", {"embed_dim": 32, "hidden_size": 64}),
    "qwen2.5-vl": _qwen(
        "Qwen2_5_VL",
        {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
        | {"window_size": 32},
    ),
    "qwen3-vl": _qwen(
        "Qwen3VL", {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "deepstack_visual_indexes": [0]}
    ),
    "qwen3.5": _qwen(
        "Qwen3_5",
        {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64},
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
    ),
    "gemma3": ImageFamily(
        chat="gemma3",
        make_config=_gemma3,
        make_processor=lambda tokenizer: transformers.Gemma3Processor(
            Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), tokenizer, image_seq_length=4
        ),
        extra_tokens=("<start_of_image>", "<end_of_image>"),
        named=GEMMA_IMAGES,
        placeholder="<start_of_image>",
    ),
    "mllama": ImageFamily(
        chat="llama3",
        make_config=_mllama,
        make_processor=lambda tokenizer: transformers.MllamaProcessor(
            MllamaImageProcessorPil(size={"height": 28, "width": 28}, max_image_tiles=2), tokenizer
        ),
    ),
    "llava": ImageFamily(
        chat="chatml",
        make_config=_llava,
        make_processor=lambda tokenizer: transformers.LlavaProcessor(
            LlavaImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
            tokenizer,
            patch_size=8,
            vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
        extra_tokens=("<image>",),
        placeholder="<image>",
    ),
    "idefics3": ImageFamily(
        chat="chatml",
        make_config=_idefics3,
        make_processor=lambda tokenizer: transformers.Idefics3Processor(
            Idefics3ImageProcessorPil(
                size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
            ),
            tokenizer,
            image_seq_len=4,
        ),
        extra_tokens=(*IDEFICS_TOKENS, *(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))),
        placeholder="<image>",
    ),
}


def rows_with_files(folder: Path, *, as_prompts: bool = False) -> list[dict[str, Any]]:
    """Return ``rows`` in JSON-compatible form, with the first image of each as a file in ``folder``.

    ``as_prompts`` returns prompts instead: the messages before the last answer.
    """
    found = []
    for number, row in enumerate(rows()):
        own: dict[str, Any] = {}
        if "images" in row:
            first, *others = row["images"]
            (folder / f"{number}.png").write_bytes(first)
            own["images"] = [f"{number}.png", *(f"data:image/png;base64,{b64encode(one).decode()}" for one in others)]
        asked = row["messages"][: -1 if row["messages"][-1]["role"] == "assistant" else None]
        found.append({"prompt": asked, **own} if as_prompts else {**row, **own})
    return found
