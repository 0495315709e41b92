"""Conversations, with the parts that the loss covers."""

from __future__ import annotations

import re
from typing import Any

from chat_families import Family
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.render.template import ChatTemplate
from rlpipe.types import ChatMessages


def template_of(family: Family, jinja: str | None = None) -> ChatTemplate:
    tokenizer = family.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template if jinja is None else jinja
    return ChatTemplate(tokenizer, DataConfig(source="jsonl"))


def turns(*contents: Any, system: str | None = None) -> ChatMessages:
    """Return messages that alternate between user and assistant."""
    roles = ["user", "assistant"] * len(contents)
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def pieces(text: str) -> list[tuple[str, bool]]:
    """Split a text into its pieces, and whether each is marked as ``«trained»``."""
    return [(piece, bool(index % 2)) for index, piece in enumerate(re.split("[«»]", text))]


def assert_marks(tokenizer: PreTrainedTokenizerBase, messages: ChatMessages, expected: str, **options: Any) -> None:
    """Check the rendered text and its mask against ``expected``, which marks what is trained with ``«...»``.

    Each piece of ``expected`` is tokenized separately.
    """
    data = DataConfig(source="jsonl", **options)
    encoded, mask = ConversationMask(ChatTemplate(tokenizer, data), data).tokens(messages)
    token_ids = encoded.token_ids
    parts = [(tokenizer(piece, add_special_tokens=False)["input_ids"], counts) for piece, counts in pieces(expected)]
    assert tokenizer.decode(token_ids) == re.sub("[«»]", "", expected)
    assert token_ids.tolist() == [token for ids, _ in parts for token in ids]
    assert mask.tolist() == [counts for ids, counts in parts for _ in ids]


CALL = {"id": "q8Zk3Lw7P", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
RESULT = {"role": "tool", "content": "21", "tool_call_id": "q8Zk3Lw7P"}


def with_tool(num_results: int = 1) -> ChatMessages:
    caller = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    return [
        {"role": "user", "content": "hi"},
        caller,
        *[RESULT] * num_results,
        {"role": "assistant", "content": "the cat"},
    ]


GEMMA_CALL = '<|tool_call>call:weather{city:<|"|>Rome<|"|>}<tool_call|>'
GEMMA_RESULT = 'response:weather{value:<|"|>21<|"|>}<tool_response|>'

TWO_TURNS = {
    "chatml": "<|im_start|>system\nsys<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    "«the cat<|im_end|>»\n<|im_start|>user\nwho<|im_end|>\n<|im_start|>assistant\n«a  mat<|im_end|>»\n",
    "gemma3": "<bos><start_of_turn>user\nsys\n\nhi<end_of_turn>\n<start_of_turn>model\n«the cat<end_of_turn>»\n"
    "<start_of_turn>user\nwho<end_of_turn>\n<start_of_turn>model\n«a  mat<end_of_turn>»\n",
    "gemma4": "<bos><|turn>system\nsys<turn|>\n<|turn>user\nhi<turn|>\n<|turn>model\n«the cat<turn|>»\n"
    "<|turn>user\nwho<turn|>\n<|turn>model\n«a  mat<turn|>»\n",
    "llama3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nsys<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "«the cat<|eot_id|>»<|start_header_id|>user<|end_header_id|>\n\nwho<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n«a  mat<|eot_id|>»",
    "llama4": "<|begin_of_text|><|header_start|>system<|header_end|>\n\nsys<|eot|>"
    "<|header_start|>user<|header_end|>\n\nhi<|eot|><|header_start|>assistant<|header_end|>\n\n«the cat<|eot|>»"
    "<|header_start|>user<|header_end|>\n\nwho<|eot|><|header_start|>assistant<|header_end|>\n\n«a  mat<|eot|>»",
    "pixtral": "<s>[INST]hi[/INST]«the cat</s>»[INST]who[/INST]«a  mat</s>»",
    "mistral_v7": "<s>[SYSTEM_PROMPT]sys[/SYSTEM_PROMPT][INST]hi[/INST]«the cat</s>»[INST]who[/INST]«a  mat</s>»",
}
TWO_TURNS["qwen2_vl"] = TWO_TURNS["chatml"]
TWO_TURNS["qwen3"] = TWO_TURNS["chatml"].replace("«a  mat", "«<think>\n\n</think>\n\na  mat")
"""The expected marks, by family, of two rounds with a system message."""
