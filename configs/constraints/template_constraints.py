"""Checks for chat template arguments that have an option of their own, or that rlpipe sets itself."""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.configs.data_sources import mixed_sources
from rlpipe.configs.schema.data_config import DataConfig

OPTIONS = {"tools": "data.tools", "chat_template": "model.chat_template"}
GIVEN = {
    *("conversation", "conversations", "messages", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("return_assistant_tokens_mask", "return_dict", "return_tensors", "padding", "truncation", "max_length"),
    "tokenizer_kwargs",
}


def check_template(data: DataConfig) -> Iterator[str]:
    shared = [*_check(data, "data")]
    yield from shared
    if not shared:
        for source in mixed_sources(data):
            yield from _check(source.data, f"data.sources.{source.name}")


def _check(data: DataConfig, at: str) -> Iterator[str]:
    for name in data.chat_template_kwargs:
        option = f"{at}.chat_template_kwargs.{name}"
        if name in OPTIONS:
            yield f"{option}: it can't be set here; set {OPTIONS[name].replace('data', at)} instead"
        elif name in GIVEN:
            yield f"{option}: rlpipe sets it itself, for each row as it needs; leave it out"
