"""Rendering of chat messages through the tokenizer's chat template, with the options of the data config."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.messages import INSTEAD, check_tools
from rlpipe.data.render.processor import Encoded, ImageProcessor
from rlpipe.data.row import UnusableRow
from rlpipe.errors import DataError
from rlpipe.types import ChatMessages, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")

RENDER_ERRORS = (TemplateError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of a template, or of the tokenizer around it, for messages that it can't render."""

PROBE_WORD = "Kestrel"

Span = tuple[int, int]
"""First character of a span, and the one after its last."""


def token_ids_of(tokenizer: PreTrainedTokenizerBase, text: str, **options: bool) -> IntArray:
    """Return the token ids of a text ``[T]``; raise ``UnusableRow`` if it has half a character."""
    _check_characters(text)
    return np.array(tokenizer(text, **options)["input_ids"], np.int32)


def _check_characters(text: str) -> None:
    """Raise ``UnusableRow`` for a lone surrogate, which JSON can hold but no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnusableRow(f"its text has an unpaired surrogate, {text[error.start]!r}") from None


class ChatTemplate:
    """A tokenizer's chat template together with ``data.chat_template_kwargs``, ``tools`` and ``system_prompt``.

    A row's own tools replace the config's by ``with_tools``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, processor: ImageProcessor | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self._processor = processor
        self._system_prompt = data.system_prompt
        self._options: dict[str, Any] = dict(data.chat_template_kwargs)
        self._tools = check_tools(data.tools) or None

    def with_tools(self, tools: Sequence[Any] | None) -> ChatTemplate:
        """Return the template with a row's own tools in place of the config's, or itself for None."""
        if tools is None:
            return self
        _ = self.takes_texts  # cached here, so that it is not computed again for each row
        template = copy(self)
        template._tools = list(tools) or None
        return template

    def require(self) -> None:
        """Raise ``DataError`` if the tokenizer has no chat template."""
        if not self.tokenizer.chat_template:
            raise DataError(
                f"tokenizer {self.tokenizer.name_or_path!r} has no chat template; "
                "set model.chat_template, or data.chat=false for plain texts"
            )

    def with_system_prompt(self, messages: ChatMessages) -> ChatMessages:
        if self._system_prompt is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self._system_prompt}, *messages]

    def text(self, messages: ChatMessages, *, add_generation_prompt: bool = False, resume: bool = False) -> str:
        """Render the conversation, with ``resume`` leaving its last turn open; raise ``UnusableRow`` if that fails."""
        self.require()
        if resume and messages[-1].get("content") is None:
            raise UnusableRow("its last turn, which the completion would continue, has no content")
        return self._render(
            self._taken(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=resume,
        )

    @cached_property
    def takes_texts(self) -> bool:
        """Whether a message's content may be a string; if not, it has to be a list of parts."""
        try:
            return PROBE_WORD in self._render([{"role": "user", "content": PROBE_WORD}])
        except UnusableRow:
            return True

    def _as_taken(self, message: dict[str, Any], nothing: str | None) -> dict[str, Any]:
        """Return the message with content in the form that the template renders: one string, or a list of parts.

        ``nothing`` replaces missing content.
        """
        content = message.get("content")
        if content is None:
            message = {**message, "content": (content := nothing)}
        if isinstance(content, list) and self.takes_texts and all(part["type"] == "text" for part in content):
            return {**message, "content": "".join(part["text"] for part in content)}
        if isinstance(content, str) and not self.takes_texts:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def _taken(self, messages: ChatMessages) -> ChatMessages:
        """Return the messages in the form that the template renders.

        Missing content becomes an empty string, since many templates write ``None`` for it, or raise; it stays None if
        the template renders tool calls only then. Raises ``UnusableRow`` if the template leaves out what messages
        without content hold.
        """
        taken = [self._as_taken(message, "") for message in messages]
        try:
            self._check_shown(taken, messages)
        except UnusableRow:
            beside_none = [self._as_taken(message, None) for message in messages]
            with suppress(UnusableRow):
                self._check_shown(beside_none, messages)
                return beside_none
            raise
        return taken

    def _check_shown(self, taken: ChatMessages, messages: ChatMessages) -> None:
        held = {key for own in messages if own.get("content") is None for key in INSTEAD if own.get(key)}
        if not held:
            return
        bare = [
            {key: value for key, value in own.items() if key not in INSTEAD} if message.get("content") is None else own
            for message, own in zip(messages, taken, strict=True)
        ]
        text = self._render(taken)
        try:
            is_shown = self._render(bare) != text
        except UnusableRow:
            is_shown = True
        if not is_shown:
            raise UnusableRow(f"the chat template leaves out {' and '.join(sorted(held))} of a turn without content")

    def _render(self, messages: ChatMessages, **options: Any) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=self._tools,
                tokenize=False,
                **options,
                **self._options,
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

    def generation_spans(self, messages: ChatMessages) -> tuple[str, list[Span]]:
        """Return the rendered conversation and its ``{% generation %}`` spans; raise ``UnusableRow`` if that fails."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                [self._taken(messages)],
                tools=self._tools,
                chat_template=self.tokenizer.get_chat_template(tools=self._tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self._options},
            )
        except RENDER_ERRORS as error:
            raise UnusableRow(f"the chat template raised {describe_error(error)}") from error
        texts, spans = rendered
        return texts[0], spans[0]

    def encode(self, text: str, images: Sequence[bytes] = ()) -> Encoded:
        """Encode rendered text and its images to tokens; raise ``UnusableRow`` or ``InputError`` if that fails."""
        if not images:
            return Encoded(token_ids=self.token_ids(text))
        assert self._processor is not None, "rows with images need a processor"
        return self._processor.encode(text, images)

    def token_ids(self, text: str) -> IntArray:
        """Return the token ids of rendered text, which contains its special tokens already."""
        return token_ids_of(self.tokenizer, text, add_special_tokens=False)

    def encode_with_offsets(self, text: str, images: Sequence[bytes] = ()) -> Encoded:
        """Encode as ``encode`` does, with ``offsets``; needs a tokenizer for which ``marks_generation`` is true."""
        if images:
            return self.encode(text, images)
        _check_characters(text)
        made = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.array(made["offset_mapping"], np.int32).reshape(-1, 2)
        return Encoded(token_ids=np.array(made["input_ids"], np.int32), offsets=offsets)
