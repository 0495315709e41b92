"""Rendering of chat messages through the tokenizer's chat template, with the options of the data config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property, lru_cache
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.messages import (
    CALLS,
    INSTEAD,
    REASONING_KEYS,
    check_tools,
    row_template_options,
    row_tools,
    with_arguments_as_text,
    with_parsed_arguments,
)
from rlpipe.data.render.processor import Encoded, ImageProcessor
from rlpipe.data.row import Row, UnusableRow
from rlpipe.errors import DataError
from rlpipe.types import ChatMessages, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"(\{%[-+]?\s*)generation(\s*[-+]?%\})")
GENERATION_END = re.compile(r"(\{%[-+]?\s*)endgeneration(\s*[-+]?%\})")
BLOCK_START, BLOCK_END = "\U000ffff1", "\U000ffff2"
"""Private characters that stand in a rendered text where a generation block starts and ends."""
BLOCK_MACRO = f"{{% macro rlpipe_generation() %}}{BLOCK_START}{{{{ caller() }}}}{BLOCK_END}{{% endmacro %}}{{{{ '' }}}}"

RENDER_ERRORS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of a template, or of the tokenizer around it, for messages that it can't render."""

PROBE_WORD = "Kestrel"
EMPTY_CONTENTS = (None, "")
"""Values of missing content beside calls or reasoning; templates differ in which they take."""

Span = tuple[int, int]
"""First character of a span, and the one after its last."""


def token_ids_of(tokenizer: PreTrainedTokenizerBase, text: str, *, begins: bool = False) -> IntArray:
    """Return the token ids of a text ``[T]``, after the tokens that begin a sequence if it ``begins`` one.

    Never with an end token, though some tokenizers add one (``add_eos_token``): the text may go on. Raises
    ``UnusableRow`` if it has half a character.
    """
    _check_characters(text)
    token_ids = np.array(tokenizer(text, add_special_tokens=begins)["input_ids"], np.int32)
    return token_ids[: len(token_ids) - len(end_token_ids(tokenizer))] if begins else token_ids


def plain_token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of what a model wrote, in which special tokens are plain text.

    Raises ``UnusableRow`` if it has half a character.
    """
    _check_characters(text)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return token_ids


@lru_cache(maxsize=8)
def end_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the tokens that the tokenizer adds to the end of a text."""
    whole, bare = (tokenizer(PROBE_WORD, add_special_tokens=adds)["input_ids"] for adds in (True, False))
    ends = (end for end in range(len(whole), 0, -1) if whole[:end][-len(bare) :] == bare)
    return tuple(whole[next(ends, len(whole)) :])


def _check_characters(text: str) -> None:
    """Raise ``UnusableRow`` for a lone surrogate, which JSON can hold but no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow(f"its text has an unpaired surrogate, {text[error.start]!r}") from None


def _holds_instead(message: dict[str, Any]) -> bool:
    return any(message.get(key) for key in INSTEAD)


class ChatTemplate:
    """A tokenizer's chat template together with ``data.chat_template_kwargs``, ``tools`` and ``system_prompt``.

    A row's own tools and template options replace the config's by ``for_row``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ImageProcessor | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._processor = processor
        self._system_prompt = data.system_prompt
        self.options: dict[str, Any] = dict(data.chat_template_kwargs)
        self._tools = check_tools(data.tools) or None
        self._tools_column = data.tools_column

    def for_row(self, row: Row) -> ChatTemplate:
        """Return the template with a row's own tools and options; raise ``UnusableRow`` if its columns hold others."""
        return self.with_tools(row_tools(row, self._tools_column)).with_options(row_template_options(row))

    def _copied(self) -> ChatTemplate:
        _ = (
            self.takes_texts,
            self.takes_arguments_as_text,
            self.reasoning_key,
        )  # cached here, not computed again for each row
        return copy(self)

    def with_tools(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template with a row's own tools in place of the config's, or itself for None."""
        if tools is None:
            return self
        template = self._copied()
        template._tools = list(tools) or None
        return template

    def with_options(self, options: Mapping[str, Any]) -> ChatTemplate:
        """Return the template with ``options`` that override the config's, or itself if there are none."""
        if not options:
            return self
        template = self._copied()
        template.options = {**self.options, **options}
        return template

    def require(self) -> None:
        """Raise ``DataError`` if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"tokenizer {self.tokenizer.name_or_path!r} has no chat template; "
                "set model.chat_template, or data.chat=false for plain text"
            )

    def with_system_prompt(self, messages: ChatMessages) -> ChatMessages:
        if self._system_prompt is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def text(self, messages: ChatMessages, *, add_generation_prompt: bool = False, resume: bool = False) -> str:
        """Render the conversation, with ``resume`` leaving its last turn open; raise ``UnusableRow`` if that fails."""
        if resume and messages[-1].get("content") is None:
            raise UnusableRow("its last turn, which the completion would continue, has no content")
        return self.render(
            self.as_taken(messages), add_generation_prompt=add_generation_prompt, continue_final_message=resume
        )

    @cached_property
    def takes_texts(self) -> bool:
        """Whether a message's content may be a string; if not, it has to be a list of parts."""
        try:
            return PROBE_WORD in self.render([{"role": "user", "content": PROBE_WORD}])
        except UnusableRow:
            return True

    @cached_property
    def takes_arguments_as_text(self) -> bool:
        """Whether the arguments of calls have to be JSON; most templates write dictionaries as JSON themselves.

        A dictionary is right unless the template fails on it, or writes Python's form of it.
        """
        arguments = {"at": PROBE_WORD, "far": True}
        is_right = {}
        for form, shown in ((arguments, str(arguments)), (json.dumps(arguments), json.dumps(json.dumps(arguments)))):
            call = {"id": "q8Zk3Lw7P", "type": "function", "function": {"name": "look", "arguments": form}}
            caller = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "content": PROBE_WORD, "tool_call_id": call["id"], "name": "look"}
            question = {"role": "user", "content": PROBE_WORD}
            texts = []
            for content, rest in product(("", None), ([result], [])):
                with suppress(UnusableRow):
                    texts.append(self.render([question, {**caller, "content": content}, *rest]))
            is_right[type(form)] = bool(texts) and not any(shown in text for text in texts)
        return is_right[str] and not is_right[dict]

    @cached_property
    def reasoning_key(self) -> str | None:
        """Key of a message whose reasoning the template writes, or None if it writes none."""

        def content(text: str) -> Any:
            return text if self.takes_texts else [{"type": "text", "text": text}]

        question = {"role": "user", "content": content("Where?")}
        for key in REASONING_KEYS:
            with suppress(UnusableRow):
                if PROBE_WORD in self.render(
                    [question, {"role": "assistant", "content": content("."), key: PROBE_WORD}]
                ):
                    return key
        return None

    def _with_known_reasoning(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with its reasoning under the template's key, which is `thinking` for gpt-oss."""
        keys = [key for key in REASONING_KEYS if message.get(key)]
        if not keys or self.reasoning_key is None or self.reasoning_key in keys:
            return message
        if message.get("content") and any(message.get(key) for key in CALLS):
            return message  # gpt-oss's template refuses a turn that has both and reasoning, too
        rest = {key: value for key, value in message.items() if key not in REASONING_KEYS}
        return rest | {self.reasoning_key: message[keys[0]]}

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether a turn may have more than one call: the templates of Llama 3.1 and 3.2 refuse a second one."""
        numbers = ("q8Zk3Lw7P", "t5Rm1Xc9V")
        function = {"name": "look", "arguments": {"at": PROBE_WORD}}
        calls = [{"id": number, "type": "function", "function": function} for number in numbers]
        results = [
            {"role": "tool", "content": PROBE_WORD, "tool_call_id": number, "name": "look"} for number in numbers
        ]

        def is_rendered(count: int) -> bool:
            caller = {"role": "assistant", "content": "", "tool_calls": calls[:count]}
            try:
                self.text([{"role": "user", "content": PROBE_WORD}, caller, *results[:count]])
            except UnusableRow:
                return False
            return True

        return is_rendered(2) or not is_rendered(1)

    def _normalized_message(self, message: dict[str, Any], empty: str | None) -> dict[str, Any]:
        """Return the message with its content in the form that the template renders: one string, or a list of parts.

        ``empty`` replaces missing content.
        """
        content = message.get("content") or empty
        message = {**self._with_known_reasoning(message), "content": content}
        if isinstance(content, list) and self.takes_texts and all(part["type"] == "text" for part in content):
            return {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(content, str) and not self.takes_texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def as_taken(self, messages: ChatMessages, choices: Sequence[str | None] = EMPTY_CONTENTS) -> ChatMessages:
        """Return the messages in the form that the template renders, for ``render``.

        What stands for missing or empty content beside calls or reasoning is None, unless the template then fails,
        writes "None" or leaves out what the message holds; else an empty string. A single choice is not tried.
        Raises ``UnusableRow`` if the template leaves out calls, or what a message without content holds.
        """
        self.require()
        has_calls = any(message.get(key) for message in messages for key in CALLS)
        if not has_calls and all(message.get("content") or not _holds_instead(message) for message in messages):
            return [self._normalized_message(message, "") for message in messages]
        change = with_arguments_as_text if self.takes_arguments_as_text else with_parsed_arguments
        messages = [change(message) for message in messages]
        candidates: list[tuple[ChatMessages, str]] = []
        problem = None
        for empty in choices:
            normalized = [
                self._normalized_message(message, empty if _holds_instead(message) else "") for message in messages
            ]
            if len(choices) == 1:
                return normalized
            try:
                candidates.append((normalized, self._render_all(normalized)))
            except UnusableRow as error:
                problem = error
        if not candidates:
            assert problem is not None
            raise problem
        beside_none, text = candidates[0]
        return candidates[-1][0] if text.count("None") > candidates[-1][1].count("None") else beside_none

    def _render_all(self, messages: ChatMessages) -> str:
        """Return the rendered text; raise ``UnusableRow`` if calls, or what stands for content, are left out of it."""
        text = self.render(messages)
        bare, held = [], set()
        for message in messages:
            keys = {key for key in (CALLS if message["content"] else INSTEAD) if message.get(key)}
            held |= keys
            bare.append({key: value for key, value in message.items() if key not in keys})
        is_shown = not held
        if held:
            try:
                is_shown = self.render(bare) != text
            except UnusableRow:
                is_shown = True
        if not is_shown:
            without = "" if all(message["content"] for message in messages) else " of a turn without content"
            raise UnusableRow(f"the chat template leaves out {' and '.join(sorted(held))}{without}")
        return text

    def render(self, messages: ChatMessages, **options: Any) -> str:
        """Render messages from ``as_taken``; raise ``UnusableRow`` if that fails."""
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tools=self._tools, tokenize=False, **options, **self.options
            )
        except RENDER_ERRORS as error:
            raise UnusableRow(f"the chat template raised {describe_error(error)}") from error
        assert isinstance(text, str)
        return text

    def prompt_text(self, messages: ChatMessages) -> str:
        """Render the conversation up to where the policy continues: a new assistant turn, or the last if it is one."""
        resume = bool(messages) and messages[-1]["role"] == "assistant"
        return self.text(messages, add_generation_prompt=not resume, resume=resume)

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the assistant's text by ``{% generation %}``, and the tokenizer has offsets."""
        template = self.tokenizer.chat_template
        return self.tokenizer.is_fast and isinstance(template, str) and GENERATION_TAG.search(template) is not None

    @cached_property
    def _with_marked_blocks(self) -> str:
        """The template with ``BLOCK_START`` and ``BLOCK_END`` around what its generation blocks render."""
        called = GENERATION_TAG.sub(r"\1call rlpipe_generation()\2", str(self.tokenizer.chat_template))
        return BLOCK_MACRO + GENERATION_END.sub(r"\1endcall\2", called)

    def generation_spans(self, taken: ChatMessages) -> tuple[str, list[Span]]:
        """Return the text of messages from ``as_taken`` and its ``{% generation %}`` spans.

        Raises ``UnusableRow`` if that fails.
        """
        pieces = re.split(f"([{BLOCK_START}{BLOCK_END}])", self.render(taken, chat_template=self._with_marked_blocks))
        starts, spans, length = [], [], 0
        for piece in pieces:
            if piece == BLOCK_START:
                starts.append(length)
            elif piece == BLOCK_END:
                spans.append((starts.pop(), length))
            else:
                length += len(piece)
        return "".join(piece for piece in pieces if piece not in (BLOCK_START, BLOCK_END)), spans

    def encode(self, text: str, images: Sequence[bytes] = ()) -> Encoded:
        """Encode rendered text and its images to tokens; raise ``UnusableRow`` or ``InputError`` if that fails."""
        if not images:
            return Encoded(token_ids=self.token_ids(text))
        assert self._processor is not None, "rows with images need a processor"
        return self._processor.encode(text, images)

    def token_ids(self, text: str) -> IntArray:
        """Return the token ids of rendered text, which contains its special tokens already."""
        return token_ids_of(self.tokenizer, text)

    def encode_with_offsets(self, text: str, images: Sequence[bytes] = ()) -> Encoded:
        """Encode as ``encode`` does, with ``offsets``, which only fast tokenizers have."""
        if images or not self.tokenizer.is_fast:
            return self.encode(text, images)
        _check_characters(text)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(encoded["offset_mapping"], np.int32).reshape(-1, 2)
        return Encoded(token_ids=np.array(encoded["input_ids"], np.int32), offsets=offsets)
