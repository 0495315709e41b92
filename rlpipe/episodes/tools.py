"""The interface of environments, which users write, and the tools that a policy calls: schemas and calls."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model

from rlpipe.common.formatting import storable
from rlpipe.common.imports import describe_error
from rlpipe.errors import ConfigError
from rlpipe.types import ChatMessages

MAX_RESULT_CHARS = 16_384
CUT_OFF = re.compile(r"\n\[cut off: \d+ more characters\]")
Observation = str | ChatMessages
"""Text of a user's message, or messages."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "_rlpipe_tool"


@dataclass(slots=True)
class Step:
    """An environment's answer to a turn of the policy, or a tool's to a call."""

    observation: Observation = ""
    reward: float = 0.0
    done: bool = False


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolCall:
    """A call that the policy wrote; ``problem`` says what is wrong with its form, if it has no arguments."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str | None = None

    def as_message_part(self) -> dict[str, Any]:
        """Return the call as chat messages have it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": dict(self.arguments)}}


@dataclass(kw_only=True, slots=True, frozen=True)
class ToolResult:
    """A tool's answer to a call, as the policy reads it."""

    text: str
    failure: str | None = None
    """``error``, ``timeout`` or ``invalid``; None if the tool returned."""
    reward: float = 0.0
    done: bool = False
    """Whether the call ends the episode."""


class Tool(Protocol):
    """A tool that the policy can call."""

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Return what the tool returns; raises ``InvalidArguments``, or anything that the tool raises."""


class InvalidArguments(Exception):
    """Raised for arguments that a tool does not take; the message is written for the policy."""


class FunctionTool:
    """A Python function as a tool; parameters of JSON's types, lists, dictionaries, enums and dataclasses are known.

    A function that is not a coroutine runs in a thread. Raises ``ConfigError`` for parameters that have no types, or
    no names of their own.
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self.name = name or function.__name__
        self.function = function
        documented = function.func if isinstance(function, functools.partial) else function
        description, arguments = _parse_docstring(inspect.getdoc(documented) or "")
        self._model = _arguments_model(function, self.name)
        parameters = _untitled(self._model.model_json_schema())
        for key, text in (arguments or {}).items():
            if key in parameters.get("properties", {}):
                parameters["properties"][key]["description"] = text
        self.schema = {
            "type": "function",
            "function": {"name": self.name, "description": description or "", "parameters": parameters},
        }

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        try:
            validated = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            raise InvalidArguments(_describe(error)) from None
        return await call_anywhere(
            self.function, **{key: getattr(validated, key) for key in validated.model_fields_set}
        )


def one_at_a_time(tools: Iterable[Tool]) -> list[Tool]:
    """Return tools of one object so that a ``Toolbox`` lets their calls wait for each other: they may change it."""
    lock = asyncio.Lock()
    return [LimitedTool(tool, lock) for tool in tools]


@dataclass(frozen=True)
class LimitedTool:
    """A tool whose calls wait for a lock, or for one of a number of slots; a call's time limit begins afterwards."""

    tool: Tool
    slots: asyncio.Lock | asyncio.Semaphore

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def schema(self) -> dict[str, Any]:
        return self.tool.schema

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return await self.tool.call(arguments)


async def call_anywhere(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function or a coroutine function returns; a function runs in a thread, so that it may block."""
    if inspect.iscoroutinefunction(function):
        return await uncancelled(function(*args, **kwargs))
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await uncancelled(result) if inspect.isawaitable(result) else result


async def uncancelled(coroutine: Awaitable[Any]) -> Any:
    """Return what a user's coroutine returns.

    Raises ``RuntimeError`` if it waited for a task that was cancelled, while the one that it runs in is not: the code
    that plays episodes would end without an error.
    """
    try:
        return await coroutine
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("it waited for a task that was cancelled") from error


def _parse_docstring(text: str) -> tuple[str | None, Mapping[str, str] | None]:
    # Imported here because it takes a second, and environments without tools do without it.
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    description, arguments, _ = parse_google_format_docstring(text)
    return description, arguments


def _arguments_model(function: Callable[..., Any], name: str) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
        bound = function.keywords if isinstance(function, functools.partial) else {}
        for parameter in parameters:
            if parameter.name in bound:
                continue  # it is not the policy's
            if parameter.kind in VARIADIC or parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
                raise ConfigError(f"the tool {name} takes {parameter}: give each parameter a name and a type")
            if parameter.annotation is inspect.Parameter.empty:
                raise ConfigError(f"the tool {name}: its parameter {parameter.name} has no type: annotate it")
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[parameter.name] = (parameter.annotation, default)
        model: type[BaseModel] = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        model.model_json_schema()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"the tool {name} has no JSON schema: {describe_error(error)}") from error
    return model


def _untitled(schema: Any) -> Any:
    """Return a JSON schema without pydantic's titles, which only repeat names."""
    if isinstance(schema, list):
        return [_untitled(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    entries = {key: value for key, value in schema.items() if key != "title" or not isinstance(value, str)}
    return {key: _untitled(value) for key, value in entries.items() if key != "additionalProperties"}


def _describe(error: ValidationError) -> str:
    problems = [f"{'.'.join(map(str, entry['loc'])) or 'arguments'}: {entry['msg']}" for entry in error.errors()]
    return "; ".join(problems)


@dataclass(kw_only=True, slots=True)
class ToolUse:
    """Counts of a tool's calls."""

    calls: int = 0
    errors: int = 0
    timeouts: int = 0
    seconds: float = 0.0


class Toolbox:
    """The tools of an episode; a call always has a result, which is a text for the policy.

    Raises ``ConfigError`` if two tools have one name.
    """

    def __init__(self, tools: Iterable[Tool], *, timeout_s: float, max_chars: int = MAX_RESULT_CHARS) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ConfigError(f"two tools are named {tool.name}: rename one")
            self._tools[tool.name] = tool
        self._timeout_s, self._max_chars = timeout_s, max_chars
        self.use: dict[str, ToolUse] = {name: ToolUse() for name in self._tools}

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    async def call(self, call: ToolCall) -> ToolResult:
        """Return a call's result; a failure, or a call in a wrong form, is a text as well."""
        tool = self._tools.get(call.name)
        if call.problem is not None:
            return ToolResult(text=f"Error: {call.problem}", failure="invalid")
        if tool is None:
            names = ", ".join(self._tools) or "none"
            return ToolResult(text=f"Error: there is no tool {call.name!r}; there are: {names}", failure="invalid")
        async with tool.slots if isinstance(tool, LimitedTool) else nullcontext():
            return await self._run(tool, call)

    async def _run(self, tool: Tool, call: ToolCall) -> ToolResult:
        use, clock = self.use[call.name], asyncio.get_running_loop().time
        use.calls += 1
        began = clock()
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return self._result(await tool.call(call.arguments))
        except InvalidArguments as error:
            return ToolResult(text=f"Error: {call.name} does not take these arguments: {error}", failure="invalid")
        except Exception as error:  # noqa: BLE001 - tools raise anything, and the policy reads it
            if limit.expired():
                use.timeouts += 1
                text = f"Error: {call.name} took longer than {self._timeout_s:g} seconds"
                return ToolResult(text=text, failure="timeout")
            use.errors += 1
            return ToolResult(text=self._cut(f"Error: {describe_error(error)}"), failure="error")
        finally:
            use.seconds += clock() - began

    def _result(self, value: Any) -> ToolResult:
        if not isinstance(value, Step):
            return ToolResult(text=self._cut(as_text(value)))
        text = self._cut(as_text(value.observation))
        return ToolResult(text=text, reward=float(value.reward), done=bool(value.done))

    def _cut(self, text: str) -> str:
        return cut_off(text, self._max_chars)


_ANYTHING: TypeAdapter[Any] = TypeAdapter(Any)


def as_text(value: Any) -> str:
    """Return a tool's value as the policy reads it: a text as it is, anything else as JSON."""
    if isinstance(value, str):
        text = value
    else:
        try:
            text = json.dumps(_ANYTHING.dump_python(value, mode="json"), ensure_ascii=False)
        except ValueError:  # pydantic's errors are among these
            text = str(value)
    return str(whole_characters(text))


def cut_off(text: str, max_chars: int = MAX_RESULT_CHARS) -> str:
    """Return a result's text with the count of what is left out beyond the limit; one that was cut stays as it is."""
    if len(text) <= max_chars or CUT_OFF.fullmatch(text, max_chars):
        return text
    return f"{text[:max_chars]}\n[cut off: {len(text) - max_chars} more characters]"


class Environment(ABC):
    """A task with several turns; one object serves one episode.

    Methods may be coroutines; others run in threads, one after the other, so that they may block.

    Methods marked by ``tool`` are offered to the policy; a turn that calls tools is answered by their results, and not
    given to ``step``. A tool that returns a ``Step`` gives the turn its reward, and may end the episode. An episode's
    reward is the sum of its steps' rewards and the final one.
    """

    call_timed_out = False
    """Whether a call took too long, so that its process was ended and it can't answer any more."""

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin an episode on a row of the data, and return what the policy sees first."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer a turn without tool calls; by default it ends the episode."""
        return Step(done=True)

    def final_reward(self) -> float | Awaitable[float]:
        """Return a reward that is added at the end of an episode, also if a limit has truncated it."""
        return 0.0

    def tools(self) -> Sequence[Tool]:
        """Return the tools of the episode: by default the methods marked by ``tool``, in the order of the class."""
        kinds = reversed(type(self).__mro__)
        names = [name for kind in kinds for name, member in vars(kind).items() if _is_tool(member)]
        return [FunctionTool(getattr(self, name), name=name) for name in dict.fromkeys(names)]

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, however the episode ends, and for objects that are only tried."""
        return None


def tool(function: Function) -> Function:
    """Mark a method of an environment as a tool; its schema comes from its signature and docstring."""
    try:
        setattr(function, MARK, True)
    except AttributeError:
        raise TypeError(f"@tool marks methods, and {function!r:.100} is none: put it above a def") from None
    return function


def _is_tool(member: Any) -> bool:
    """Return whether a class's member is marked, or the function within a static or class method is."""
    return True in (getattr(member, MARK, None), getattr(getattr(member, "__func__", None), MARK, None))


def as_messages(observation: Observation, what: str) -> ChatMessages:
    """Return an observation as chat messages; a text is a user's. Raise ``TypeError``, which names it, for others."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, list | tuple) or not all(isinstance(message, Mapping) for message in observation):
        raise TypeError(f"{what} is {observation!r:.100}: give a text or a list of messages")
    messages: ChatMessages = whole_characters([dict(message) for message in observation])
    for part in (
        part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
    ):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise TypeError(f"{what} has the part {part!r:.50}: episodes have texts only")
    return messages


def as_step(value: Any) -> Step:
    """Return what an environment's ``step`` returned; raise ``TypeError`` if that is no ``Step``."""
    if not isinstance(value, Step):
        raise TypeError(f"step returned {value!r:.100}: return rlpipe.Step(observation, reward=..., done=...)")
    return value


def whole_characters(value: Any) -> Any:
    """Return a text, or JSON's lists and objects of texts, with escapes for lone surrogates, which have no tokens."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {whole_characters(key): whole_characters(entry) for key, entry in value.items()}
    return [whole_characters(entry) for entry in value] if isinstance(value, list | tuple) else value
