"""Masks on every chat template that installed packages ship: equal to the truth, or the row is skipped by name."""

from __future__ import annotations

import pytest
from covering import one_in
from template_cases import Case, cases, find_mistakes, made_tokenizer, shipped_templates

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.render.messages import chat_messages
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.errors import DataError

TEMPLATES = dict(shipped_templates())

SHAPELESS = {"vllm/template_basic", "vllm/template_deepseek_ocr", "vllm/template_kimi_audio"}
"""Templates that write no markers, or read no messages."""
REFUSED = ("the chat template raised", "the chat template leaves out")


def outcome(mask: ConversationMask, case: Case) -> str | None:
    """Return why a row is skipped, or None; fail if its mask is wrong."""
    try:
        encoded, marked = mask.tokens(chat_messages(case.messages), template=mask._template.with_tools(case.tools))
    except (UnusableRow, DataError) as problem:
        return str(problem)
    tokenizer = mask._template.tokenizer
    assert not find_mistakes(tokenizer, encoded.token_ids.tolist(), marked)
    return None


def test_packages_ship_templates() -> None:
    assert len(TEMPLATES) > 50


@pytest.mark.parametrize("name", one_in(3, TEMPLATES))
def test_masks_equal_the_truth_or_rows_are_skipped_by_name(name: str) -> None:
    tokenizer = made_tokenizer(TEMPLATES[name])
    data = DataConfig(source="jsonl")
    mask = ConversationMask(ChatTemplate(tokenizer, data), data)
    skipped = {label: reason for label, case in cases(tokenizer).items() if (reason := outcome(mask, case)) is not None}
    if name in SHAPELESS:
        assert skipped.keys() >= {"plain", "turns"}
        return
    quoting = skipped.pop("quoted turns", "would be trained")
    assert "would be trained" in quoting
    # Otherwise a row is skipped only because the template refuses it, or because the assistant's messages in a row are
    # written without the start of a turn between them.
    joined = ("repeated answers", "repeated questions", "call beside a text")
    for label, reason in skipped.items():
        assert reason.startswith(REFUSED) or (label in joined and "be trained: " in reason), (label, reason)
