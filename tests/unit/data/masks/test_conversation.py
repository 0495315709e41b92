"""Tests that the loss mask covers exactly what the assistant writes, or is refused if that is unclear."""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.conversation import ConversationMask
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.models.tiny_model import CHAT_TEMPLATE, make_tokenizer
from rlpipe.types import ChatMessages

UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
END_OUTSIDE = CHAT_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
NEWLINE_AFTER_END = UNMARKED.replace("<|end|>", "<|end|>\n")
THINKS_LAST = UNMARKED.replace("<|assistant|>{{", "<|assistant|>{% if loop.last %}<think></think>{% endif %}{{")

DATA = DataConfig(source="jsonl")

CONVERSATION: ChatMessages = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "and 3?"},
    {"role": "assistant", "content": " 7 \n"},
]


def template_of(jinja: str) -> ChatTemplate:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = jinja
    return ChatTemplate(tokenizer, DATA)


def marked(jinja: str, messages: ChatMessages, first_message: int = 0) -> list[str]:
    """Return the runs of trained tokens, as text."""
    template = template_of(jinja)
    encoded, mask = ConversationMask(template, DATA).tokens(messages, first_message=first_message)
    token_ids = encoded.token_ids
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    runs = zip(borders[::2], borders[1::2], strict=True)
    return [str(template.tokenizer.decode(token_ids[start:end])) for start, end in runs]


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED, END_OUTSIDE, NEWLINE_AFTER_END])
def test_every_assistant_turn_counts_with_its_end_token_and_no_more(jinja: str) -> None:
    assert marked(jinja, CONVERSATION) == ["4<|end|>", " 7 \n<|end|>"]


def test_blocks_may_have_blanks_after_their_end_marker(caplog: pytest.LogCaptureFixture) -> None:
    assert marked(CHAT_TEMPLATE.replace("<|end|>{% endgen", "<|pad|>\n{% endgen"), CONVERSATION[:2]) == ["4", "\n"]
    assert "no end token" not in caplog.text


def test_blocks_that_leave_out_the_end_marker_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    template = template_of(END_OUTSIDE.replace("{% endgeneration %}<|end|>", "{% endgeneration %}<|pad|>"))
    mask = ConversationMask(template, DATA)
    for _ in range(2):
        encoded, counted = mask.tokens(CONVERSATION)
        assert template.tokenizer.decode(encoded.token_ids[counted]) == "4 7 \n"
    assert [record.message.partition(",")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        "the chat template's generation blocks have no end token"
    ]


OPENED = "<think>\n\n</think>\n\n"
OPENS_BEFORE_BLOCKS = CHAT_TEMPLATE.replace(
    "<|assistant|>{% generation %}{{", "<|assistant|>{% generation %}" + OPENED + "{{"
).replace("<|assistant|>{% endif %}", "<|assistant|>" + OPENED + "{% endif %}")
OPENS_IN_BLOCKS = OPENS_BEFORE_BLOCKS.replace("<|assistant|>{% generation %}", "{% generation %}<|assistant|>")


@pytest.mark.parametrize("jinja", [OPENS_BEFORE_BLOCKS, OPENS_IN_BLOCKS])
def test_a_thought_that_the_prompt_opens_does_not_count(jinja: str) -> None:
    assert jinja.count(OPENED) == 2
    assert marked(jinja, CONVERSATION) == ["4<|end|>", " 7 \n<|end|>"]


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED])
def test_turns_may_end_with_the_token_that_also_pads(jinja: str) -> None:
    template = template_of(jinja)
    template.tokenizer.eos_token, template.tokenizer.pad_token = "<|unknown|>", "<|end|>"
    encoded, mask = ConversationMask(template, DATA).tokens(CONVERSATION)
    assert template.tokenizer.decode(encoded.token_ids[mask]) == "4<|end|> 7 \n<|end|>"


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED])
def test_turns_before_the_first_message_do_not_count(jinja: str) -> None:
    assert marked(jinja, CONVERSATION, first_message=3) == [" 7 \n<|end|>"]


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED])
def test_the_end_of_a_prompt_s_last_answer_does_not_count(jinja: str) -> None:
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": "or 5"}]
    assert marked(jinja, messages, first_message=2) == ["or 5<|end|>"]


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED])
def test_tokens_of_images_and_padding_never_count(jinja: str) -> None:
    template = template_of(jinja)
    template.tokenizer.add_tokens(["<|image_pad|>"], special_tokens=True)
    messages = [CONVERSATION[0], {"role": "assistant", "content": "x<|image_pad|>y<|pad|>z"}]
    encoded, mask = ConversationMask(template, DATA).tokens(messages)
    assert template.tokenizer.decode(encoded.token_ids[mask]) == "xyz<|end|>"


def test_template_that_rewrites_earlier_turns_is_marked_as_it_renders_them() -> None:
    assert marked(THINKS_LAST, CONVERSATION) == ["4<|end|>", "<think></think> 7 \n<|end|>"]


def test_conversation_without_assistant_is_unusable() -> None:
    with pytest.raises(UnusableRow, match="it has no token in a turn of assistant"):
        marked(CHAT_TEMPLATE, CONVERSATION[:1])


SPLIT = "{%% set content = m.content.split('</think>')[-1] if m.role == 'assistant' %s else m.content %%}"
WRITTEN = (
    "<|{{ m.role }}|>{{ content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|end|>"
)
DROPS_REASONING, DROPS_EARLIER_REASONING = (
    "{% for m in messages %}" + SPLIT % unless + WRITTEN + "{% endfor %}" for unless in ("", "and not loop.last")
)
THOUGHTS: ChatMessages = [
    {**message, "content": f"<think>so\n</think>{message['content']}"} if message["role"] == "assistant" else message
    for message in CONVERSATION
]


def test_reasoning_may_be_left_out_of_all_turns_but_the_last() -> None:
    assert marked(DROPS_EARLIER_REASONING, THOUGHTS) == ["4<|end|>", "<think>so\n</think> 7 \n<|end|>"]
    with pytest.raises(UnusableRow, match=r"leaves out 2 characters of message 4 \(assistant\)"):
        marked(DROPS_REASONING, THOUGHTS)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_that_the_template_does_not_write_is_reported_if_it_is_the_last_turns(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, answer, question, last = CONVERSATION
    expected = ["4<|end|>", " 7 \n<|end|>"]
    assert marked(UNMARKED, [first, {**answer, key: "so"}, question, last]) == expected
    assert "reasoning" not in caplog.text
    assert marked(UNMARKED, [first, answer, question, {**last, key: "so"}]) == expected
    assert f"the chat template leaves out the reasoning of messages ({key}), so that it is not trained" in caplog.text


def test_second_of_two_calls_that_the_template_leaves_out_is_noticed() -> None:
    calls = [{"function": {"name": "look", "arguments": {"at": word}}} for word in ("cat", 'the "mat"')]
    conversation = [CONVERSATION[0], {"role": "assistant", "content": "", "tool_calls": calls}]
    (turn,) = marked(DROPS_REASONING, conversation)
    assert turn == '{"at": "cat"}{"at": "the \\"mat\\""}<|end|>'
    with pytest.raises(UnusableRow, match=r"leaves out 8 characters of message 2 \(assistant\)"):
        marked(DROPS_REASONING.replace("m.tool_calls", "(m.tool_calls or [])[:1]"), conversation)


def test_text_beside_calls_that_the_template_leaves_out_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    call = {"function": {"name": "look", "arguments": {"at": "cat"}}}
    conversation = [CONVERSATION[0], {"role": "assistant", "content": "so", "tool_calls": [call]}]
    only_calls = DROPS_REASONING.replace("{{ content }}", "{{ '' if m.tool_calls else content }}")
    assert marked(only_calls, conversation) == ['{"at": "cat"}<|end|>']
    assert "the chat template leaves out the text of messages beside their calls" in caplog.text


def test_template_that_raises_makes_the_row_unusable() -> None:
    with pytest.raises(UnusableRow, match="roles must alternate"):
        marked("{{ raise_exception('roles must alternate') }}", CONVERSATION)


def make_byte_level_tokenizer(trim_offsets: bool) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the  cat sat\n\non the mat, the answer is the cat"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, END_OUTSIDE])
@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("answer", ["the cat", " the answer\n\n", "\n\nzażółć 🐈 the  mat "])
def test_merged_tokens_are_marked_as_their_text_is(jinja: str, trim_offsets: bool, answer: str) -> None:
    tokenizer = make_byte_level_tokenizer(trim_offsets)
    tokenizer.chat_template = jinja
    template = ChatTemplate(tokenizer, DATA)
    messages = [{"role": "user", "content": "who sat on the mat?"}, {"role": "assistant", "content": answer}]
    encoded, mask = ConversationMask(template, DATA).tokens(messages)
    token_ids = encoded.token_ids
    assert tokenizer.decode(token_ids[mask]) == f"{answer}<|end|>"
    start = int(np.argmax(mask))
    assert mask[start:].all()


def test_answer_that_merges_into_the_prompt_is_unusable() -> None:
    tokenizer = make_byte_level_tokenizer(False)
    tokenizer.chat_template = UNMARKED.replace("<|assistant|>", "<|assistant|>th")
    template = ChatTemplate(tokenizer, DATA)
    with pytest.raises(UnusableRow, match="merge"):
        ConversationMask(template, DATA).tokens([CONVERSATION[0], {"role": "assistant", "content": "e cat"}])


def test_generation_blocks_keep_their_own_variables_and_blanks() -> None:
    """Check that blocks are rendered as transformers renders them: variables that are set within stay within."""
    jinja = (
        "{% for m in messages %}{% set own = 'x' %}\n  <|{{ m.role }}|>\n"
        "  {%- if m.role == 'assistant' -%} {% generation %}\n{% set own = 'y' %}{{ m.content }}{{ own }}<|end|>\n"
        "{% endgeneration %}\n{% else %}{{ m.content }}{% endif %}{{ own }}{% endfor %}"
    )
    template = template_of(jinja)
    text, spans = template.generation_spans(template.as_taken(CONVERSATION))
    made = template.tokenizer.apply_chat_template(
        CONVERSATION, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert text == template.text(CONVERSATION)
    encoded, mask = ConversationMask(template, DATA).tokens(CONVERSATION)
    assert encoded.token_ids.tolist() == made["input_ids"]
    assert mask.astype(int).tolist() == made["assistant_masks"]
    assert len(spans) == sum(message["role"] == "assistant" for message in CONVERSATION)


@pytest.mark.parametrize("jinja", [CHAT_TEMPLATE, UNMARKED])
def test_the_vocabulary_is_not_copied_for_every_row(jinja: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(jinja)
    mask = ConversationMask(template, DATA)
    first = mask.tokens(CONVERSATION)
    monkeypatch.setattr(type(template.tokenizer), "get_vocab", lambda self: pytest.fail("a copy of all its tokens"))
    again = mask.tokens(CONVERSATION)
    assert first[1].tolist() == again[1].tolist()
