"""Choice of the parser that reads a policy's turns, by name or by what the model's chat template writes."""

from __future__ import annotations

from contextlib import suppress

from rlpipe.common.imports import describe_error, import_object
from rlpipe.data.render.template import PROBE_WORD, ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.episodes import vllm_parsers
from rlpipe.episodes.parsing import PARSERS, ParsedTurn, Parser, parse_text, with_tools
from rlpipe.episodes.tools import ToolCall
from rlpipe.errors import ConfigError


def open_parser(name: str, template: ChatTemplate, *, has_tools: bool) -> Parser:
    """Return the parser that ``environment.parser`` names; ``auto`` tries them on a call that the template renders.

    Raises ``ConfigError`` if no parser reads the template's calls, which only matters if there are tools.
    """
    if name in PARSERS:
        return PARSERS[name]
    if ":" in name:
        parser: Parser = import_object(name, what="environment.parser", error=ConfigError)
        return parser
    if name != "auto":
        return _open_of_vllm(name, template)
    for known in PARSERS.values():
        if _reads_calls(known, template):
            return known
    if not has_tools:
        return parse_text
    for other in vllm_parsers.names():
        with suppress(Exception):  # they need tokens that other families' tokenizers lack
            if _reads_calls(found := vllm_parsers.VllmParser(other, template), template):
                return found
    raise ConfigError(
        "environment.parser: no known parser reads the calls that the model's chat template writes; set it to "
        f"{' or '.join(PARSERS)}, to the name of one of vLLM's parsers, or to file.py:name of your own"
    )


def _open_of_vllm(name: str, template: ChatTemplate) -> Parser:
    known = vllm_parsers.names()
    if name not in known:
        there = f"; vLLM has {', '.join(known)}" if known else "; vLLM, which has more, is not installed"
        raise ConfigError(f"environment.parser: {name!r:.80} is not auto, {', '.join(PARSERS)} or file.py:name{there}")
    try:
        return vllm_parsers.VllmParser(name, template)
    except Exception as error:
        raise ConfigError(f"environment.parser={name}: {describe_error(error)}") from error


def _reads_calls(parser: Parser, template: ChatTemplate) -> bool:
    call = ToolCall(id="q8Zk3Lw7P", name="look", arguments={"at": PROBE_WORD, "far": True})
    asked = {"role": "user", "content": "Where?"}
    parameters = {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}}}
    schema = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": parameters}}
    template, parser = template.with_tools([schema]), with_tools(parser, [schema])
    try:
        before = template.text([asked], add_generation_prompt=True)
        whole = template.text([asked, ParsedTurn(content="", calls=[call]).as_message()])
    except UnusableRow:
        return False
    text = whole.removeprefix(before)
    for ends in template.tokenizer.all_special_tokens:
        text = text.rstrip().removesuffix(ends)
    found = parser(text.strip(), "")
    return [(own.name, own.arguments) for own in found.calls] == [(call.name, call.arguments)]
