"""Parsers of the policy's turns, rlpipe's and vLLM's: text, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice, takewhile
from typing import Any, cast

from rlpipe.common.imports import describe_error, import_object
from rlpipe.data.render.template import PROBE_WORD, ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.episodes.reasoning import is_in_channels, join_messages, split_channels, split_reasoning
from rlpipe.episodes.tools import ToolCall, whole_characters
from rlpipe.errors import ConfigError

ID_CHARS = 9
"""Characters of a call's id; Mistral's templates take no other number."""
CALL, END_CALL = "<tool_call>", "</tool_call>"
MAX_CALLS = 16
MAX_CHARS = 32_768
"""Characters of a turn up to which calls are read by vLLM's parsers."""
MAX_QUICK_CHARS = 2000
MARK_CHARS = 10
"""Characters ahead of a function's name by which calls are counted, if a turn may have one call only."""
OPENING = re.compile(r"\A[^<\[({]*")
"""Text ahead of a call that only happens to be the same ahead of the next one."""
BEGUN_CALL = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:')
CUT_OFF = "the turn was cut off within this call"


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
    except (ValueError, RecursionError) as error:
        calls = [_unreadable(prefix, 0, f"the call is not JSON ({error})")] if BEGUN_CALL.match(rest.lstrip()) else []
        return ParsedTurn(content=rest, reasoning=reasoning, calls=calls)
    entries = parsed if isinstance(parsed, list) else [parsed]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return ParsedTurn(content=rest, reasoning=reasoning)
    calls = [make_call(entry, prefix, number) for number, entry in enumerate(entries)]
    return ParsedTurn(content="", reasoning=reasoning, calls=calls)


def parse_harmony(text: str, prefix: str) -> ParsedTurn:
    """Read the messages of a turn in OpenAI's Harmony format (gpt-oss); those to a tool are its calls."""
    if not is_in_channels(text):
        return parse_text(text, prefix)
    messages = split_channels(text)
    called = [message for message in messages if message.recipient is not None]
    content, reasoning = join_messages([message for message in messages if message.recipient is None])
    calls = []
    for number, message in enumerate(called):
        call = {"name": message.recipient, "arguments": message.text}
        calls.append(make_call(call, prefix, number))
    return ParsedTurn(content=content, reasoning=reasoning, calls=calls)


PARSERS: Mapping[str, Parser] = {"hermes": parse_hermes, "json": parse_json, "harmony": parse_harmony}


def parse_turn(parser: Parser, text: str, prefix: str, *, is_cut: bool = False) -> ParsedTurn:
    """Read a turn with the first ``MAX_CALLS`` calls, and the next one with a problem.

    All calls of a turn run at the same time, and a policy may repeat itself to its limit. If the turn is cut off
    within its last call, that call has a problem, too: vLLM's parsers return it with the arguments that it has.
    """
    parsed = parser(text, prefix)
    if is_cut and parsed.calls and isinstance(parser, VllmParser):
        parsed = replace(parsed, calls=parser.without_cut_call(parsed.calls, text, prefix, CUT_OFF))
    first, surplus = parsed.calls[:MAX_CALLS], parsed.calls[MAX_CALLS:]
    problem = f"a turn has at most {MAX_CALLS} calls; the last {len(surplus)} were not made"
    return replace(parsed, calls=[*first, *(replace(call, problem=problem) for call in surplus[:1])])


async def read_calls(parser: Parser, text: str, prefix: str, *, is_cut: bool = False) -> ParsedTurn:
    """Read a turn as ``parse_turn`` does, a long one in a thread: vLLM's parser for Qwen takes 3 s for 4 KB of tags."""
    if len(text) <= MAX_QUICK_CHARS:
        return parse_turn(parser, text, prefix, is_cut=is_cut)
    return await asyncio.to_thread(parse_turn, parser, text, prefix, is_cut=is_cut)


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


def _read_call(text: str, prefix: str, number: int) -> ToolCall:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _unreadable(prefix, number, f"the call is not JSON ({error})")
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


def _unreadable(prefix: str, number: int, problem: str) -> ToolCall:
    return ToolCall(id=_id(prefix, number), name="", problem=problem)


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
        start, self._end = _call_marks(template)
        self._start = re.compile(re.escape(start))

    def with_tools(self, tools: Sequence[Any]) -> VllmParser:
        return VllmParser(self._name, self._template, tools, self._tokenizer)

    def __call__(self, text: str, prefix: str) -> ParsedTurn:
        rest, reasoning = split_reasoning(text)
        read = self._shortened(rest)
        content, calls = self._extract(read, prefix)
        if not calls:
            is_call = self._start.search(rest) is not None
            calls = [_unreadable(prefix, 0, "the call can't be read")] if is_call else []
            return ParsedTurn(content=rest, reasoning=reasoning, calls=calls)
        if len(read) < len(rest):
            problem = f"the turn's calls are longer than {MAX_CHARS:,} characters"
            calls = self.without_cut_call(calls, read, prefix, problem)
        return ParsedTurn(content=content.strip(), reasoning=reasoning, calls=calls)

    def _extract(self, text: str, prefix: str) -> tuple[str, list[ToolCall]]:
        """Return the text beside the calls, and the calls; none if the parser fails."""
        try:
            extracted = self._open().extract_tool_calls(text, self._request)
        except Exception:  # noqa: BLE001 - its parsers raise anything on texts that they do not expect
            return text, []
        return extracted.content or "", [
            make_call({"name": call.function.name, "arguments": call.function.arguments}, prefix, number)
            for number, call in enumerate(extracted.tool_calls)
        ]

    def without_cut_call(self, calls: list[ToolCall], text: str, prefix: str, problem: str) -> list[ToolCall]:
        """Return the calls of a text that is cut off, with a problem for the call that it ends within, if it does.

        Some parsers return such a call with the arguments that it has, and others leave it out.
        """
        starts = [match.start() for match in self._start.finditer(text)]
        if self._end and text.rfind(self._end) > max(starts, default=-1):
            return calls
        if self._end and len(starts) > len(calls):
            return [*calls, _unreadable(prefix, len(calls), problem)]
        return [*calls[:-1], replace(calls[-1], problem=calls[-1].problem or problem)]

    def _shortened(self, text: str) -> str:
        """Return the text without what follows the first call that is too many, or ``MAX_CHARS`` characters.

        Some parsers take minutes for a few thousand characters in which the policy repeats itself.
        """
        marks = [match.start() for match in islice(self._start.finditer(text), MAX_CALLS + 2)]
        return text[: min([MAX_CHARS, *marks[MAX_CALLS + 1 :]])]


def _call_marks(template: ChatTemplate) -> tuple[str, str]:
    """Return what the template writes ahead of the name of each call's function, and at the end of a call.

    The second is empty if the template does not tell, as with one that takes a single call.
    """
    before, bare = _around_first_call(template, {})
    _, full = _around_first_call(template, {"at": "home"})
    start = "" if full is None else OPENING.sub("", _common_end(before, full))
    if full is None or bare is None or not start:
        return before[-MARK_CHARS:].strip() or PROBE_WORD, ""
    end = _common_end(bare.removesuffix(start), full.removesuffix(start))
    return start.strip(), (end.split() or [""])[-1]


def _around_first_call(template: ChatTemplate, arguments: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the text ahead of a call's name, and the one after it up to another call's name, if there may be one."""
    question = {"role": "user", "content": "Where?"}
    first, second = (ToolCall(id=f"q8Zk3Lw7{name}", name=f"{PROBE_WORD}{name}", arguments=arguments) for name in "12")
    one = template.text([question, ParsedTurn(content="", calls=[first]).as_message()])
    with suppress(UnusableRow):
        two = template.text([question, ParsedTurn(content="", calls=[first, second]).as_message()])
        between, found, _ = two.partition(first.name)[2].partition(second.name)
        return one.partition(first.name)[0], between if found else None
    return one.partition(first.name)[0], None


def _common_end(text: str, other: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(other), strict=False))
    return "".join(character for character, _ in same)[::-1]


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
