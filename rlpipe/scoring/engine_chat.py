"""Chat questions to the run's own engines, retried while engines are dead or late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.data.render.control_tokens import scored_ids
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.errors import ConfigError
from rlpipe.scoring.http import RequestFailed, UnusableAnswer
from rlpipe.types import MAX_SEED, NO_GROUP, ChatMessages, GroupRequest, Prompt, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RETRY_PAUSE_S = 0.5
AVOIDED_S = 10.0
"""Seconds during which an engine that did not answer is used only if no other one is left."""
GRACE_S = 1.0
"""Seconds beyond the timeout in which an engine can report that it is late."""

Value = TypeVar("Value")
Weights = Literal["base", "policy"]
"""Model to ask: the engines' without the run's adapter (``base``), or as they serve it now (``policy``)."""
Ask = Callable[[str, GroupRequest, float], Awaitable[RolloutGroup]]
"""Function that has a named engine sample a request within a number of seconds; raises ``EngineSilent``."""

SAMPLING = frozenset(entry.name for entry in fields(SamplingConfig)) - {"temperature", "max_tokens"}


class EngineSilent(Exception):
    """Raised when an engine is dead or late; the message says why, and a later attempt or another engine may answer."""


class Chat(Protocol):
    """Interface through which scoring asks the run's engines."""

    name: str
    """Name of the engines' model, for caches."""

    async def answer(
        self,
        messages: ChatMessages,
        *,
        weights: Weights,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        seed: int = 0,
        timeout_s: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of an answer, without special tokens; those spelled in messages are read as plain text.

        ``options`` may hold options of ``rollout.sampling``, whose values in the run's config do not apply here, and
        ``chat_template_kwargs``, by default the run's. Dead or late engines are retried. Raises ``TimeoutError`` after
        ``timeout_s``, ``RequestFailed`` if no engine can answer the question, and ``ConfigError`` for unknown
        ``options``.
        """
        ...


class EngineChat:
    """``Chat`` over ``ask``: each question goes to the engine with the fewest open questions of this process."""

    def __init__(
        self,
        engines: Collection[str],
        ask: Ask,
        *,
        tokenizer: PreTrainedTokenizerBase,
        model: ModelConfig,
        chat_template_kwargs: Mapping[str, Any],
    ) -> None:
        revision = f"@{model.revision}" if model.revision else ""
        self.name = f"{model.path}{revision}{' in nf4' if model.adapter.kind == 'qlora' else ''}"
        self._ask, self._tokenizer = ask, tokenizer
        self._chat_template_kwargs = dict(chat_template_kwargs)
        self._asked = dict.fromkeys(engines, 0)
        self._avoided_until = dict.fromkeys(engines, 0.0)

    async def answer(
        self,
        messages: ChatMessages,
        *,
        weights: Weights,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        seed: int = 0,
        timeout_s: float = 60.0,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        sampling, template = self._read_options(options or {})
        request = GroupRequest(
            group_id=NO_GROUP,
            prompt=self._render(messages, template),
            group_size=1,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            sampling=sampling,
            use_adapter=weights == "policy",
            has_priority=True,
        )
        group = await self._sampled(request, timeout_s)
        if group.failure is not None:
            raise RequestFailed(f"no engine can answer: {group.failure}")
        (rollout,) = group.rollouts
        return str(self._tokenizer.decode(rollout.completion_ids.tolist(), skip_special_tokens=True))

    async def _sampled(self, request: GroupRequest, timeout_s: float) -> RolloutGroup:
        deadline, reason = time.monotonic() + timeout_s, "none was asked"
        while (remaining_s := deadline - time.monotonic()) > 0:
            name = min(self._asked, key=lambda name: (self._avoided_until[name] > time.monotonic(), self._asked[name]))
            self._asked[name] += 1
            try:
                async with asyncio.timeout(remaining_s + GRACE_S):
                    return await self._ask(name, request, remaining_s)
            except (EngineSilent, TimeoutError) as error:
                reason = str(error) or f"engine {name} does not answer"
                self._avoided_until[name] = time.monotonic() + AVOIDED_S
            finally:
                self._asked[name] -= 1
            await asyncio.sleep(min(RETRY_PAUSE_S, max(0.0, deadline - time.monotonic())))
        raise TimeoutError(f"no engine has answered within {timeout_s:g} seconds; the last one asked: {reason}")

    def _read_options(self, options: Mapping[str, Any]) -> tuple[SamplingConfig, Mapping[str, Any]]:
        check_options(options)
        sampling = {name: value for name, value in options.items() if name in SAMPLING}
        return SamplingConfig(**sampling), options.get("chat_template_kwargs", self._chat_template_kwargs)

    def _render(self, messages: ChatMessages, template_kwargs: Mapping[str, Any]) -> Prompt:
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"tokenizer {self._tokenizer.name_or_path!r} has no chat template, which questions to engines need: "
                "set model.chat_template"
            )
        template = ChatTemplate(self._tokenizer, DataConfig(chat_template_kwargs=dict(template_kwargs)))
        try:
            token_ids = scored_ids(template, messages, template.prompt_text)
        except UnusableRow as error:
            raise RequestFailed(f"the messages can't be rendered: {error.reason}") from None
        return Prompt(prompt_id=0, epoch=0, token_ids=token_ids, prompt=messages, task={})


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for an option that ``Chat.answer`` does not know."""
    allowed = {*SAMPLING, "chat_template_kwargs"}
    if unknown := options.keys() - allowed:
        raise ConfigError(
            f"engines have no option {', '.join(sorted(unknown))}; they have {', '.join(sorted(allowed))}, and "
            "temperature and max_tokens as separate arguments"
        )


class EngineClient:
    """Client of the run's engines, with at most ``concurrency`` open questions in this process.

    If no engine answers within ``timeout_s`` seconds, or the answer is unusable, the question is asked up to
    ``retries`` times more, each time with another seed. At temperature 0 an unusable answer is final, because another
    one would be the same.
    """

    def __init__(
        self,
        chat: Chat,
        *,
        weights: Weights,
        temperature: float,
        max_tokens: int,
        timeout_s: float,
        retries: int,
        concurrency: int,
        options: Mapping[str, Any],
    ) -> None:
        self._chat, self._weights = chat, weights
        self._temperature, self._max_tokens = temperature, max_tokens
        self._timeout_s, self._retries = timeout_s, retries
        self._slots = asyncio.Semaphore(concurrency)
        self._options = options

    async def ask(self, messages: ChatMessages, seed: int, read: Callable[[str], Value]) -> Value:
        """Ask a question and return ``read(answer)``; ``read`` raises ``UnusableAnswer`` to have it asked again.

        Raises ``RequestFailed`` once the attempts are used up, or at once if no engine can answer the question.
        """
        for attempt in range(self._retries + 1):
            try:
                return read(await self._answer(messages, (seed + attempt) % MAX_SEED))
            except TimeoutError as error:
                reason = str(error)
            except UnusableAnswer as error:
                reason = str(error)
                if self._temperature == 0:
                    raise RequestFailed(reason) from None
        raise RequestFailed(f"{reason}, at the last of {self._retries + 1} attempts")

    async def _answer(self, messages: ChatMessages, seed: int) -> str:
        async with self._slots:
            return await self._chat.answer(
                messages,
                weights=self._weights,
                temperature=self._temperature,
                max_tokens=self._max_tokens,
                seed=seed,
                timeout_s=self._timeout_s,
                options=self._options,
            )
