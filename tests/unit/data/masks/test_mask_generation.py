"""Tests that masks by markers equal those that transformers makes of a template's ``{% generation %}`` blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from chat_families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.boundaries import LossMask, TrainedEnds
from rlpipe.data.masks.rules import resolve_mask
from rlpipe.data.render.template import ChatTemplate
from rlpipe.models.tiny_model import make_tokenizer

DATA = DataConfig(source="jsonl")
STARTS = ("<|im_start|>{}\n", "<|im_start|>{}<|im_sep|>", "<|{}|>", "<|{}|>\n", "[{}]", "### {}:\n")
TOKENIZERS = {"of words": FAMILIES["qwen3"].tokenizer(), "of characters": make_tokenizer()}
WORDS = st.text(st.sampled_from("aeinrst 012,.!?\n"), min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def marked_templates(draw: st.DrawFn) -> tuple[PreTrainedTokenizerBase, str, bool]:
    """Return a tokenizer, a template, and whether its blocks include the end of a turn."""
    tokenizer = TOKENIZERS[draw(st.sampled_from([*TOKENIZERS]))]
    start, end = draw(st.sampled_from(STARTS)), tokenizer.eos_token
    behind, includes_end = draw(st.sampled_from(["", "\n"])), draw(st.booleans())
    block = (
        "{% generation %}{{ m.content }}END{% endgeneration %}"
        if includes_end
        else ("{% generation %}{{ m.content }}{% endgeneration %}END")
    )
    assistant = start.format("assistant") + block.replace("END", end)
    other = start.replace("{}", "{{ m.role }}") + "{{ m.content }}" + end
    opened = "{% if add_generation_prompt %}" + start.format("assistant") + "{% endif %}"
    jinja = f"{{% if m.role == 'assistant' %}}{assistant}{{% else %}}{other}{{% endif %}}{{{{ BEHIND }}}}"
    jinja = jinja.replace("BEHIND", repr(behind))
    return tokenizer, f"{{% for m in messages %}}{jinja}{{% endfor %}}{opened}", includes_end


@settings(max_examples=200, deadline=None)
@given(marked=marked_templates(), contents=st.lists(WORDS, min_size=2, max_size=8), system=st.none() | WORDS)
def test_masks_equal_those_of_transformers(
    marked: tuple[PreTrainedTokenizerBase, str, bool], contents: list[str], system: str | None
) -> None:
    tokenizer, jinja, includes_end = marked
    tokenizer.chat_template = jinja
    messages = [
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
    ]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    rules: LossMask = resolve_mask(ChatTemplate(tokenizer, DATA), DATA)
    rules = replace(rules, ends=TrainedEnds.TURN if includes_end else TrainedEnds.NONE)
    mask = rules.mark(np.array(expected["input_ids"], np.int32))
    assert mask.astype(int).tolist() == expected["assistant_masks"]
    assert mask.any()
