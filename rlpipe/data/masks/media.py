"""Tokens that stand for parts of images, audio and videos, or that enclose these."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ATTRIBUTES = tuple(
    f"{name}_token"
    for name in (
        *("image", "video", "audio", "image_break", "image_end", "vision_start", "vision_end", "fake_image"),
        *("boi", "eoi", "boa", "eoa", "bov", "eov", "start_image", "end_image", "start_of_image", "end_of_image"),
    )
)
"""Attributes under which tokenizers name media tokens; each may be missing."""
KNOWN = (
    *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image|>", "<|video|>", "<|audio|>", "<|image_start|>", "<|image_end|>", "<|patch|>"),
    *("<|tile_x_separator|>", "<|tile_y_separator|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
    *("<image>", "<video>", "<audio>", "<image_soft_token>", "<audio_soft_token>", "<start_of_image>"),
    *("<end_of_image>", "<start_of_audio>", "<end_of_audio>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
    *("[IMG]", "[IMG_BREAK]", "[IMG_END]", "[AUDIO]", "[BEGIN_AUDIO]", "<fake_token_around_image>"),
)
"""Media tokens of tokenizers without such attributes: Qwen, Llama, Gemma, LLaVA, Pixtral, Voxtral, Idefics."""


def media_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of the media tokens that the tokenizer has."""
    named = (getattr(tokenizer, name, None) for name in ATTRIBUTES)
    vocabulary = tokenizer.get_vocab()
    return tuple(sorted({vocabulary[str(token)] for token in (*named, *KNOWN) if str(token) in vocabulary}))
