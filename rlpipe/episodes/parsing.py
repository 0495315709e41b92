"""Parsers of the policy's turns, rlpipe's and vLLM's: text, reasoning and tool calls."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from typing import Any, cast

from rlpipe.common.imports import describe_error, import_object
from rlpipe.data.render.messages import END_THINK, THINK
from rlpipe.data.render.template import PROBE_WORD, ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.episodes.tools import ToolCall, whole_characters
from rlpipe.errors import ConfigError

ID_CHARS = 9
"""Characters of a call's id; Mistral's templates take no other number."""
CALL, END_CALL = "<tool_call>", "</tool_call>"
MAX_CALLS = 16
MAX_CHARS = 32_768
MARK_CHARS = 10
"""Characters ahead of a function's name by which calls are counted."""


@dataclass(kw_only=True, slots=True)
class ParsedTurn:
    """A turn of the policy, read from its text."""

    content: str
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_message_part() for call in self.calls]
        return message


Parser = Callable[[str, str], ParsedTurn]
"""Function that reads a turn's text; call ids begin with the given prefix, so that they differ between turns."""


def parse_hermes(text: str, prefix: str) -> ParsedTurn:
    """Read calls as JSON within ``<tool_call>`` (Hermes, Qwen)."""
    rest, reasoning = split_reasoning(text)
    content, *segments = rest.split(CALL)
    calls = []
    for number, segment in enumerate(segments):
        call, _, rest = segment.partition(END_CALL)
        calls.append(_read_call(call.strip(), prefix, number))
        content += rest
    return ParsedTurn(content=content.strip() if calls else content, reasoning=reasoning, calls=calls)


def parse_json(text: str, prefix: str) -> ParsedTurn:
    """Read a turn that is one JSON object, or a list of them, as calls (Llama 3); any other turn is a text."""
    rest, reasoning = split_reasoning(text)
    try:
        parsed = json.loads(rest)
    except (ValueError, RecursionError):
        return ParsedTurn(content=rest, reasoning=reasoning)
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return ParsedTurn(content=rest, reasoning=reasoning)
    calls = [make_call(entry, prefix, number) for number, entry in enumerate(entries)]
    return ParsedTurn(content="", reasoning=reasoning, calls=calls)


PARSERS: Mapping[str, Parser] = {"hermes": parse_hermes, "json": parse_json}


def parse_turn(parser: Parser, text: str, prefix: str) -> ParsedTurn:
    """Read a turn with the first ``MAX_CALLS`` calls, and the next one with a problem.

    All calls of a turn run at the same time, and a policy may repeat itself to its limit.
    """
    parsed = parser(text, prefix)
    first, surplus = parsed.calls[:MAX_CALLS], parsed.calls[MAX_CALLS:]
    problem = f"a turn has at most {MAX_CALLS} calls; the last {len(surplus)} were not made"
    return replace(parsed, calls=[*first, *(replace(call, problem=problem) for call in surplus[:1])])


def with_tools(parser: Parser, tools: Sequence[Any]) -> Parser:
    """Return a parser that knows the schemas of the tools, if it can use them.

    Without tools, a turn that looks like a call is a text for all parsers but a user's own.
    """
    if not tools and (parser in PARSERS.values() or isinstance(parser, VllmParser)):
        return parse_text
    bind: Callable[[Sequence[Any]], Parser] | None = getattr(parser, "with_tools", None)
    return parser if bind is None else bind(tools)


def parse_text(text: str, prefix: str) -> ParsedTurn:
    """Read a turn without calls."""
    rest, reasoning = split_reasoning(text)
    return ParsedTurn(content=rest, reasoning=reasoning)


def split_reasoning(text: str) -> tuple[str, str | None]:
    """Return a turn's text without its thoughts, and these; a turn may begin within them, as prompts may end so.

    Thoughts without an end are a text: some models call tools without closing them.
    """
    thoughts, end, rest = text.partition(END_THINK)
    return (rest.lstrip(), thoughts.strip().removeprefix(THINK).strip()) if end else (text, None)


def _read_call(text: str, prefix: str, number: int) -> ToolCall:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(id=_id(prefix, number), name="", problem=f"the call is not JSON ({error})")
    return make_call(entry, prefix, number)


def make_call(entry: Any, prefix: str, number: int) -> ToolCall:
    """Return the call of an object with a name and arguments, in one of the forms that models write."""
    call_id = _id(prefix, number)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return ToolCall(id=call_id, name="", problem='a call is an object with "name" and "arguments"')
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(id=call_id, name=entry["name"], problem=f"its arguments are not JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(id=call_id, name=entry["name"], problem="its arguments are not an object")
    try:
        return ToolCall(id=call_id, name=whole_characters(entry["name"]), arguments=whole_characters(arguments))
    except RecursionError:
        return ToolCall(id=call_id, name="", problem="its arguments are nested too deeply")


def _id(prefix: str, number: int) -> str:
    return f"{prefix}{number}".rjust(ID_CHARS, "0")[-ID_CHARS:]


class VllmParser:
    """A parser of turns by vLLM's parser of that name; raises ``KeyError`` if there is none, and what vLLM raises.

    Some parsers take the types of arguments from the tools' schemas.
    """

    def __init__(self, name: str, template: ChatTemplate, tools: Sequence[Any] = (), tokenizer: Any = None) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager

        self._name, self._template = name, template
        # Parsers, of which every turn has its own, ask it for its whole vocabulary.
        if tokenizer is None:
            fast: Any = template.tokenizer
            tokenizer = get_cached_tokenizer(fast)
        self._tokenizer = tokenizer
        vllm_tools: list[Any] = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        self._request = ChatCompletionRequest.model_construct(messages=[], tools=vllm_tools, tool_choice="auto")
        kind = ToolParserManager.get_tool_parser(name)
        self._open = lambda: kind(self._tokenizer, vllm_tools)
        self._open()
        self._mark = re.compile(re.escape(_start_of_call(template)))

    def with_tools(self, tools: Sequence[Any]) -> VllmParser:
        return VllmParser(self._name, self._template, tools, self._tokenizer)

    def __call__(self, text: str, prefix: str) -> ParsedTurn:
        rest, reasoning = split_reasoning(text)
        try:
            extracted = self._open().extract_tool_calls(self._shortened(rest), self._request)
        except Exception:  # noqa: BLE001 - its parsers raise anything on texts that they do not expect
            return ParsedTurn(content=rest, reasoning=reasoning)
        calls = [
            make_call({"name": call.function.name, "arguments": call.function.arguments}, prefix, number)
            for number, call in enumerate(extracted.tool_calls)
        ]
        content = extracted.content or ""
        content = content if not calls else content.strip()
        return ParsedTurn(content=content, reasoning=reasoning, calls=calls)

    def _shortened(self, text: str) -> str:
        """Return the text without what follows the first call that is too many, or ``MAX_CHARS`` characters.

        Some parsers take minutes for a few thousand characters in which the policy repeats itself.
        """
        marks = [match.start() for match in islice(self._mark.finditer(text), MAX_CALLS + 2)]
        return text[: min([MAX_CHARS, *marks[MAX_CALLS + 1 :]])]


def _start_of_call(template: ChatTemplate) -> str:
    """Return the end of what the template writes ahead of the name of a call's function."""
    call = ToolCall(id="q8Zk3Lw7P", name=PROBE_WORD)
    question = {"role": "user", "content": "Where?"}
    text = template.text([question, ParsedTurn(content="", calls=[call]).as_message()])
    return text.partition(PROBE_WORD)[0][-MARK_CHARS:].strip() or PROBE_WORD


def vllm_parser_names() -> list[str]:
    """Return the names of vLLM's parsers; none if vLLM is not installed."""
    if find_spec("vllm") is None:
        return []
    from vllm.tool_parsers import ToolParserManager

    return sorted(ToolParserManager.list_registered())


def open_parser(name: str, template: ChatTemplate, *, has_tools: bool) -> Parser:
    """Return the parser that ``environment.parser`` names; ``auto`` tries them on a call that the template renders.

    Raises ``ConfigError`` if no parser reads the template's calls, which only matters if there are tools.
    """
    if name in PARSERS:
        return PARSERS[name]
    if ":" in name:
        return _open_custom(name)
    if name != "auto":
        return _open_of_vllm(name, template)
    for parser in PARSERS.values():
        if _reads_calls(parser, template):
            return parser
    if not has_tools:
        return parse_text
    for parser_name in vllm_parser_names():
        with suppress(Exception):  # they need tokens that other families' tokenizers lack
            if _reads_calls(vllm_parser := VllmParser(parser_name, template), template):
                return vllm_parser
    raise ConfigError(
        "environment.parser: no known parser reads the calls that the model's chat template writes; set it to "
        f"{' or '.join(PARSERS)}, to the name of one of vLLM's parsers, or to file.py:name of your own"
    )


def _open_custom(name: str) -> Parser:
    """Return the user's function, or an object of the user's class, after trying it on a turn without calls."""
    imported: Any = import_object(name, what="environment.parser", error=ConfigError)
    try:
        parser = cast("Parser", imported() if inspect.isclass(imported) else imported)
        parsed = parser(PROBE_WORD, "0c")
    except Exception as error:
        raise ConfigError(f"environment.parser: {name} can't read a turn: {describe_error(error)}") from error
    if not isinstance(parsed, ParsedTurn):
        raise ConfigError(f"environment.parser: {name} returned {type(parsed).__name__}, not a ParsedTurn")
    return parser


def _open_of_vllm(name: str, template: ChatTemplate) -> Parser:
    available = vllm_parser_names()
    if name not in available:
        hint = f"; vLLM has {', '.join(available)}" if available else "; vLLM, which has more, is not installed"
        raise ConfigError(f"environment.parser: {name!r:.80} is not auto, {', '.join(PARSERS)} or file.py:name{hint}")
    try:
        return VllmParser(name, template)
    except Exception as error:
        raise ConfigError(f"environment.parser={name}: {describe_error(error)}") from error


def _reads_calls(parser: Parser, template: ChatTemplate) -> bool:
    call = ToolCall(id="q8Zk3Lw7P", name="look", arguments={"at": PROBE_WORD, "far": True})
    question = {"role": "user", "content": "Where?"}
    parameters = {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}}}
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
    template, parser = template.with_tools([schema]), with_tools(parser, [schema])
    try:
        before = template.text([question], add_generation_prompt=True)
        rendered = template.text([question, ParsedTurn(content="", calls=[call]).as_message()])
    except UnusableRow:
        return False
    text = rendered.removeprefix(before)
    for ends in template.tokenizer.all_special_tokens:
        text = text.rstrip().removesuffix(ends)
    parsed = parser(text.strip(), "")
    return [(read_call.name, read_call.arguments) for read_call in parsed.calls] == [(call.name, call.arguments)]
