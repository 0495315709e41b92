"""Parsers of the policy's turns, rlpipe's and vLLM's: text, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice, takewhile
from typing import Any, cast

from rlpipe.common.imports import describe_error, import_object
from rlpipe.data.masks.derivation import CALL_IDS
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
MAX_REPETITION = 25
"""Ratio of compression from which on a text is one in which the policy repeats itself."""
TAG = re.compile(r"<[^<>\s]+[>=]|\[[A-Z_]+\]")
NEVER = r"(?!)"
PYTHON_TAG = "<|python_tag|>"
DECODER = json.JSONDecoder()
SPACE, SEPARATOR = re.compile(r"\s*"), re.compile(r"[\s;]*")
OPENING = re.compile(r"\A[^<\[({]*")
"""Text ahead of a call that only happens to be the same ahead of the next one."""
BEGUN_CALL = re.compile(r'(?:\[\s*)?\{\s*"name"\s*:')
CUT_OFF = "the turn was cut off within this call"
TOO_LONG = f"the turn's calls are longer than {MAX_CHARS:,} characters, or repeat themselves"


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
    calls: list[ToolCall] = []
    content, position = "", 0
    while (start := rest.find(CALL, position)) >= 0:
        content += rest[position:start]
        begin = start + len(CALL)
        after_json = _end_of_json(rest, begin)  # an argument may have the marks in it
        following = rest.find(CALL, after_json)
        limit = following if following >= 0 else len(rest)
        end = rest.find(END_CALL, after_json, limit)
        calls.append(_read_call(rest[begin : limit if end < 0 else end].strip(), prefix, len(calls)))
        position = limit if end < 0 else end + len(END_CALL)
    content += rest[position:]
    return ParsedTurn(content=content.strip() if calls else content, reasoning=reasoning, calls=calls)


def _end_of_json(text: str, begin: int) -> int:
    """Return where the JSON value at a position of a text ends, or the position if there is none."""
    space = SPACE.match(text, begin)
    with suppress(ValueError, RecursionError):
        return DECODER.raw_decode(text, space.end() if space else begin)[1]
    return begin


def parse_json(text: str, prefix: str) -> ParsedTurn:
    """Read a turn of JSON objects, or of a list of them, as calls (Llama 3); any other turn is a text."""
    rest, reasoning = split_reasoning(text)
    body = rest.strip().removeprefix(PYTHON_TAG).strip()
    try:
        values = _json_values(body)
    except (ValueError, RecursionError) as error:
        calls = [_unreadable(prefix, 0, f"the call is not JSON ({error})")] if BEGUN_CALL.match(body) else []
        return ParsedTurn(content=rest, reasoning=reasoning, calls=calls)
    entries = values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return ParsedTurn(content=rest, reasoning=reasoning)
    calls = [make_call(entry, prefix, number) for number, entry in enumerate(entries)]
    return ParsedTurn(content="", reasoning=reasoning, calls=calls)


def _json_values(text: str) -> list[Any]:
    """Return the values of a text of JSON values, between which there may be semicolons; raise ``ValueError``."""
    values: list[Any] = []
    position = 0
    while not values or position < len(text):
        value, position = DECODER.raw_decode(text, position)
        values.append(value)
        separator = SEPARATOR.match(text, position)
        position = separator.end() if separator else position
    return values


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

    All calls of a turn run at the same time, and a policy may repeat itself to its limit. A call within which the turn
    is cut off has a problem, too.
    """
    parsed = parser(text, prefix, is_cut=is_cut) if isinstance(parser, VllmParser) else parser(text, prefix)
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
        self._marks = _call_marks(template)

    def with_tools(self, tools: Sequence[Any]) -> VllmParser:
        return VllmParser(self._name, self._template, tools, self._tokenizer)

    def __call__(self, text: str, prefix: str, *, is_cut: bool = False) -> ParsedTurn:
        rest, reasoning = split_reasoning(text)
        read = self._shortened(rest)
        problem = TOO_LONG if len(read) < len(rest) else CUT_OFF if is_cut else None
        content, calls = self._extract(read, prefix) if problem is None else self._extract_cut(read, prefix, problem)
        if not calls:
            is_call = self._marks.tag is not None and self._marks.tag in rest
            calls = [_unreadable(prefix, 0, "the call can't be read")] if is_call else []
            return ParsedTurn(content=rest, reasoning=reasoning, calls=calls)
        return ParsedTurn(content=content.strip(), reasoning=reasoning, calls=calls)

    def _extract_cut(self, text: str, prefix: str, problem: str) -> tuple[str, list[ToolCall]]:
        """Return what ``_extract`` does of a text that is cut off, with a problem for a call that it ends within.

        vLLM's parsers return such a call with the arguments that it has, or leave it out.
        """
        begin = max((match.start() for match in self._marks.start.finditer(text)), default=-1)
        if self._marks.end and text.rfind(self._marks.end) > begin:
            return self._extract(text, prefix)
        content, calls = self._extract(text[:begin] if begin >= 0 else text, prefix)
        if begin < 0:
            return content, [*calls[:-1], *(replace(call, problem=problem) for call in calls[-1:])]
        return content, [*calls, _unreadable(prefix, len(calls), problem)]

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

    def _shortened(self, text: str) -> str:
        """Return the text without what follows the first call that is too many, or ``MAX_CHARS`` characters.

        Some parsers take minutes for a few thousand characters in which the policy repeats itself.
        """
        marks = [match.start() for match in islice(self._marks.start.finditer(text), MAX_CALLS + 2)]
        limit = MAX_CHARS
        if len(text) > MAX_QUICK_CHARS and len(text) > MAX_REPETITION * len(zlib.compress(text.encode())):
            limit = MAX_QUICK_CHARS
        return text[: min([limit, *marks[MAX_CALLS + 1 :]])]


@dataclass(kw_only=True, slots=True, frozen=True)
class CallMarks:
    """Texts of a template by which calls are found that a parser of vLLM can't read."""

    start: re.Pattern[str]
    """The text ahead of each call's name, or ahead of the first if a turn has one call or a list of them."""
    end: str
    """Last word of a call; empty if the template does not tell."""
    tag: str | None
    """The tag ahead of a call, which other texts do not have; None if calls have none."""


def _call_marks(template: ChatTemplate) -> CallMarks:
    before, bare, bare_tail = _around_calls(template, {}, CALL_IDS)
    _, full, full_tail = _around_calls(template, {"at": "home"}, CALL_IDS[::-1])
    start = OPENING.sub("", _common_end(before, full)) if bare and full else ""
    tags = TAG.findall(start) or TAG.findall(before)
    if start:
        bare_tail, full_tail = bare.removesuffix(start), full.removesuffix(start)
    end = _common_end(bare_tail, full_tail).split()
    mark = start.strip() or (tags[-1] if tags else "")
    return CallMarks(
        start=re.compile(re.escape(mark) if mark else NEVER), end=end[-1] if end else "", tag=tags[-1] if tags else None
    )


def _around_calls(template: ChatTemplate, arguments: Mapping[str, Any], ids: Sequence[str]) -> tuple[str, str, str]:
    """Return a turn's text ahead of its call's name, up to another call's name (if it may have two), and at its end."""
    question = {"role": "user", "content": "Where?"}
    first, second = (
        ToolCall(id=call_id, name=f"{PROBE_WORD}{number}", arguments=arguments) for number, call_id in enumerate(ids)
    )
    before, _, tail = _rendered_turn(template, [first]).partition(first.name)
    end_of_turn = template.text([question, {"role": "assistant", "content": PROBE_WORD}]).rpartition(PROBE_WORD)[2]
    between = ""
    with suppress(UnusableRow):
        between, found, _ = _rendered_turn(template, [first, second]).partition(first.name)[2].partition(second.name)
        between = between if found else ""
    return before, between, tail.removesuffix(end_of_turn)


def _rendered_turn(template: ChatTemplate, calls: list[ToolCall]) -> str:
    """Return what the template writes for a turn with these calls, with a header if it opens turns in another way."""
    question = {"role": "user", "content": "Where?"}
    text = template.text([question, ParsedTurn(content="", calls=calls).as_message()])
    for prompt in (template.text([question], add_generation_prompt=True), template.text([question])):
        text = text.removeprefix(prompt)
    return text


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
    parameters = {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}}}
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
    template, parser = template.with_tools([schema]), with_tools(parser, [schema])
    try:
        text = _rendered_turn(template, [call])
    except UnusableRow:
        return False
    for ends in template.tokenizer.all_special_tokens:
        text = text.rstrip().removesuffix(ends)
    parsed = parser(text.strip(), "")
    return [(read_call.name, read_call.arguments) for read_call in parsed.calls] == [(call.name, call.arguments)]
