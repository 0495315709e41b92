"""vLLM's parsers of tool calls, for the model families whose calls are neither Hermes' nor plain JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

from rlpipe.data.render.template import PROBE_WORD, ChatTemplate
from rlpipe.episodes.parsing import ParsedTurn, make_call, split_reasoning
from rlpipe.episodes.tools import ToolCall

MAX_CALLS = 16
MAX_CHARS = 32_768
MARK_CHARS = 10
"""Characters ahead of a function's name by which calls are counted."""


class VllmParser:
    """Reads turns by vLLM's parser of a name; raises ``KeyError`` if there is none, and what vLLM raises.

    Some parsers take the types of arguments from the tools' schemas.
    """

    def __init__(self, name: str, template: ChatTemplate, tools: Sequence[Any] = ()) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tool_parsers import ToolParserManager

        self._name, self._template = name, template
        given: list[Any] = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        self._request = ChatCompletionRequest.model_construct(messages=[], tools=given, tool_choice="auto")
        kind = ToolParserManager.get_tool_parser(name)
        tokenizer: Any = template.tokenizer
        self._open = lambda: kind(tokenizer, given)
        self._open()
        self._mark = re.compile(re.escape(_start_of_call(template)))

    def with_tools(self, tools: Sequence[Any]) -> VllmParser:
        return VllmParser(self._name, self._template, tools)

    def __call__(self, text: str, prefix: str) -> ParsedTurn:
        rest, reasoning = split_reasoning(text)
        try:
            found = self._open().extract_tool_calls(self._shortened(rest), self._request)
        except Exception:  # noqa: BLE001 - its parsers raise anything on texts that they do not expect
            return ParsedTurn(content=rest, reasoning=reasoning)
        calls = [
            make_call({"name": call.function.name, "arguments": call.function.arguments}, prefix, number)
            for number, call in enumerate(found.tool_calls)
        ]
        content = found.content or ""
        return ParsedTurn(content=content if not calls else content.strip(), reasoning=reasoning, calls=calls)

    def _shortened(self, text: str) -> str:
        """Return the text without what follows ``MAX_CALLS`` calls or ``MAX_CHARS`` characters.

        Some parsers take minutes for a few thousand characters in which the policy repeats itself.
        """
        marks = [found.start() for found in islice(self._mark.finditer(text), MAX_CALLS + 1)]
        return text[: min([MAX_CHARS, *marks[MAX_CALLS:]])]


def _start_of_call(template: ChatTemplate) -> str:
    """Return the end of what the template writes ahead of the name of a call's function."""
    call = ToolCall(id="q8Zk3Lw7P", name=PROBE_WORD)
    asked = {"role": "user", "content": "Where?"}
    whole = template.text([asked, ParsedTurn(content="", calls=[call]).as_message()])
    return whole.partition(PROBE_WORD)[0][-MARK_CHARS:].strip() or PROBE_WORD


def names() -> list[str]:
    """Return the names of vLLM's parsers; none if vLLM is not installed."""
    if find_spec("vllm") is None:
        return []
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())
