"""Rewards by a judge: a language model that is asked for a score, with a cache of its answers."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sqlite3
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rlpipe.common.atomic_io import write_ahead
from rlpipe.configs.schema.model_config import ModelConfig, serves_adapter
from rlpipe.data.render.messages import content_text
from rlpipe.errors import ConfigError
from rlpipe.scoring.engine_chat import EngineClient, Weights, check_options
from rlpipe.scoring.http import JsonClient, UnusableAnswer, together
from rlpipe.scoring.rewards import RewardActor
from rlpipe.scoring.toolbox import last_fenced, last_number
from rlpipe.types import RolloutGroup

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 10_000
BUSY_TIMEOUT_S = 10.0


class AnswerCache:
    """Cache of answers in memory (least recently used) and in an SQLite file that processes and runs share."""

    def __init__(self, path: str | None, *, max_in_memory: int = MAX_IN_MEMORY) -> None:
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._max_in_memory = max_in_memory
        self._database: sqlite3.Connection | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # Serve makes a replica in one thread and calls it in another, never in both at a time.
            self._database = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
            write_ahead(self._database, BUSY_TIMEOUT_S)
            self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        row = self._run("SELECT answer FROM answers WHERE key = ?", (key,))
        if row is None:
            return None
        self._remember(key, row[0])
        return str(row[0])

    def put(self, key: str, answer: str) -> None:
        self._remember(key, answer)
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))

    def _run(self, statement: str, values: tuple[str, ...]) -> tuple[str] | None:
        """Run a statement and return its first row; after an error, stop using the file, which is only a cache."""
        if self._database is None:
            return None
        try:
            row: tuple[str] | None = self._database.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            logger.warning("the judge's cache can't be used any more: %s", error)
            self._database = None
            return None
        return row

    def _remember(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > self._max_in_memory:
            self._answers.popitem(last=False)


class Judge(RewardActor, ABC):
    """Base class of all judges: a prompt template, a model that answers, and a cache.

    ``template`` is a Jinja template; it sees the row's columns, ``prompt`` (its text, or the last user turn),
    ``messages`` (of a chat prompt), and what the judge adds. Set either ``url``, the address of an API such as
    ``http://127.0.0.1:8000/v1``, with ``model``, and optionally a key in the environment variable ``api_key_env``; or
    ``engine``, to ask the run's engines: ``base`` is their model without the run's adapter, ``policy`` what they serve
    at that moment.

    Answers are cached by the content of the request, in memory, and in the SQLite file ``cache`` if one is named; the
    policy's are not, because it changes. ``timeout_s`` and ``retries`` apply to a request (see ``JsonClient`` and
    ``EngineClient``); ``concurrency`` limits the requests of one process. ``request`` is added to the request's body,
    or, for an engine, to the sampling options (see ``Chat``).
    """

    def __init__(
        self,
        *,
        template: str,
        url: str | None = None,
        model: str | None = None,
        engine: Weights | None = None,
        system: str | None = None,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        timeout_s: float = 60.0,
        retries: int = 4,
        concurrency: int = 16,
        cache: str | None = None,
        api_key_env: str | None = None,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            self._template = ImmutableSandboxedEnvironment(undefined=StrictUndefined).from_string(template)
        except TemplateError as error:
            raise ValueError(f"template is not a Jinja template: {error}") from None
        self._system = system
        _check_source(url, model, engine, cache)
        self._engine, self._options = engine, dict(request or {})
        self._body = {"model": model, "temperature": temperature, "max_tokens": max_tokens, **self._options}
        self._limits: dict[str, Any] = {"timeout_s": timeout_s, "retries": retries, "concurrency": concurrency}
        self._cache = None if engine == "policy" else AnswerCache(cache)
        if url is not None:
            key = os.environ.get(api_key_env or "OPENAI_API_KEY")
            if api_key_env is not None and not key:
                raise ValueError(
                    f"api_key_env: the environment variable {api_key_env} is not set; export it before the run, or for "
                    "a job on a cluster, set it in ray job submit --runtime-env-json"
                )
            headers = {"Authorization": f"Bearer {key}"} if key else None
            self._client: JsonClient | EngineClient = JsonClient(url, headers=headers, **self._limits)

    @classmethod
    def check_run(cls, model: ModelConfig, kwargs: Mapping[str, Any]) -> None:
        if kwargs.get("engine") is None:
            return
        _check_source(kwargs.get("url"), kwargs.get("model"), kwargs["engine"], kwargs.get("cache"))
        check_options(kwargs.get("request") or {})
        if kwargs["engine"] == "base" and not serves_adapter(model):
            merged = "merges its adapter" if model.adapter.kind != "none" else "has model.adapter.kind=none"
            raise ConfigError(
                f"engine=base needs engines that serve the adapter separately, but the run {merged}: "
                "train a LoRA adapter that is not merged, or set engine=policy, or a url"
            )

    def setup(self) -> None:
        if self._engine is None:
            return
        if self.chat is None:
            raise ValueError(f"engine={self._engine} uses the engines of a run, and there are none here: set a url")
        self._body["model"] = self.chat.name
        self._client = EngineClient(
            self.chat,
            weights=self._engine,
            temperature=self._body["temperature"],
            max_tokens=self._body["max_tokens"],
            options=self._options,
            **self._limits,
        )

    async def ask(self, group: RolloutGroup, **values: Any) -> float:
        """Return the value in the judge's answer to the template, filled with the group's row and ``values``."""
        body = {**self._body, "messages": self._messages(group, values)}
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        cached = self._cache.get(key) if self._cache is not None else None
        if cached is not None:
            return self.parse(cached)
        if isinstance(self._client, JsonClient):
            answer, value = await self._client.post("/chat/completions", body, self._read_completion)
        else:
            answer, value = await self._client.ask(body["messages"], int(key[:7], 16), self._read)
        if self._cache is not None:
            self._cache.put(key, answer)
        return value

    @abstractmethod
    def parse(self, answer: str) -> float:
        """Return the value in the judge's answer; raise ``UnusableAnswer`` if there is none."""

    def _messages(self, group: RolloutGroup, values: Mapping[str, Any]) -> list[dict[str, str]]:
        prompt = group.prompt.prompt
        messages = [] if isinstance(prompt, str) else prompt
        question = prompt if isinstance(prompt, str) else _last_user_turn(prompt)
        text = self._template.render({**group.prompt.task, "prompt": question, "messages": messages, **values})
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text}]

    def _read_completion(self, response: Any) -> tuple[str, float]:
        try:
            answer = response["choices"][0]["message"]["content"]
        except (LookupError, TypeError):
            raise UnusableAnswer(f"its answer is not a chat completion: {str(response)[:100]}") from None
        if not isinstance(answer, str):
            raise UnusableAnswer("its answer has no text")
        return self._read(answer)

    def _read(self, answer: str) -> tuple[str, float]:
        return answer, self.parse(answer)


def _check_source(url: str | None, model: str | None, engine: str | None, cache: str | None) -> None:
    if (url is None) == (engine is None):
        sources = "neither" if url is None else "both"
        raise ValueError(f"a judge needs either url (a server) or engine (base or policy), found {sources}: set one")
    if engine not in (None, *get_args(Weights)):
        raise ValueError(f"engine is {engine!r}; set {' or '.join(get_args(Weights))}")
    if (url is None) != (model is None):
        raise ValueError("model needs url: it names the model on the server; engines have their own")
    if engine == "policy" and cache is not None:
        raise ValueError("cache: the policy's answers change with every version; remove it, or set engine=base")


class NumberJudge(Judge):
    """Judge that gives each completion a number: the last in its answer, or in the last match of ``pattern``'s group.

    The template sees ``completion``. Without a ``pattern``, 7/10 and 7 out of 10 are 7 if the ``maximum`` is 10. A
    number outside ``minimum`` to ``maximum`` is an unusable answer; the value is the number rescaled from that range
    to 0 to 1.
    """

    def __init__(
        self, *, minimum: float = 0.0, maximum: float = 10.0, pattern: str | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        if minimum >= maximum:
            raise ValueError(f"minimum {minimum:g} is not below maximum {maximum:g}")
        self._minimum, self._maximum = minimum, maximum
        self._pattern = None if pattern is None else re.compile(pattern, flags=re.DOTALL)
        most = rf"[*_`$\"'(\[{{]*{re.escape(f'{maximum:g}')}(?:\.0+)?(?!\.?\d)"
        self._scale = re.compile(rf"(?<=\d)[*_`$\"')\]}}]*\s*\(?(?:/|(?:out )?of\b)\s*{most}", flags=re.IGNORECASE)

    async def score(self, group: RolloutGroup) -> list[float | None]:  # type: ignore[override]
        return list(await together(self.ask(group, completion=text) for text in self.texts(group)))

    def parse(self, answer: str) -> float:
        if self._pattern is None:
            text = self._scale.sub("", answer)
        else:
            matches = list(self._pattern.finditer(answer))
            text = matches[-1][1] if matches else ""
        number = last_number(text)
        if number is None or not self._minimum <= number <= self._maximum:
            raise UnusableAnswer(
                f"the judge gave no number from {self._minimum:g} to {self._maximum:g}: {answer[-80:]!r}"
            )
        return (number - self._minimum) / (self._maximum - self._minimum)


class RubricJudge(Judge):
    """Judge that marks each completion by criteria, with a JSON object of one number per criterion.

    ``criteria`` holds their weights; marks range from 0 to ``maximum``, and the value is their weighted mean, rescaled
    to 0 to 1. The template sees ``completion`` and ``criteria``.
    """

    def __init__(self, *, criteria: Mapping[str, float], maximum: float = 10.0, **options: Any) -> None:
        super().__init__(**options)
        if not criteria or sum(criteria.values()) <= 0:
            raise ValueError(f"criteria {dict(criteria)} have no weight; set at least one above 0")
        self._criteria, self._maximum = dict(criteria), maximum

    async def score(self, group: RolloutGroup) -> list[float | None]:  # type: ignore[override]
        criteria = list(self._criteria)
        return list(await together(self.ask(group, completion=text, criteria=criteria) for text in self.texts(group)))

    def parse(self, answer: str) -> float:
        marks = _last_object(answer)
        total = 0.0
        for name, weight in self._criteria.items():
            mark = marks.get(name)
            if isinstance(mark, bool) or not isinstance(mark, int | float) or not 0 <= mark <= self._maximum:
                raise UnusableAnswer(f"the judge gave no mark from 0 to {self._maximum:g} for {name!r}: {mark!r}")
            total += weight * mark / self._maximum
        return total / sum(self._criteria.values())


class PairwiseJudge(Judge):
    """Judge that compares a prompt's completions in pairs; a value is the share of comparisons won, a tie being half.

    The template sees ``completion_a`` and ``completion_b``; the last of the words A, B and TIE in the answer decides.
    Every pair is compared in both orders, because judges favour a position. Each completion meets all others, or only
    the next ``opponents`` ones in the group, cyclically.
    """

    def __init__(self, *, opponents: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        if opponents is not None and opponents < 1:
            raise ValueError(f"opponents is {opponents}; set 1 or more, or null for all")
        self._opponents = opponents

    async def score(self, group: RolloutGroup) -> list[float | None]:  # type: ignore[override]
        texts = self.texts(group)
        if len(texts) == 1:
            return [None]
        games = [game for pair in self._pairs(len(texts)) for game in (pair, pair[::-1])]
        results = await together(
            self.ask(group, completion_a=texts[first], completion_b=texts[second]) for first, second in games
        )
        wins: list[list[float]] = [[] for _ in texts]
        for (first, second), result in zip(games, results, strict=True):
            wins[first].append(result)
            wins[second].append(1 - result)
        return [math.fsum(outcomes) / len(outcomes) for outcomes in wins]

    def _pairs(self, count: int) -> list[tuple[int, int]]:
        if self._opponents is None:
            return list(combinations(range(count), 2))
        steps = range(1, min(self._opponents, count - 1) + 1)
        pairs = {frozenset((index, (index + step) % count)) for index in range(count) for step in steps}
        return sorted((min(pair), max(pair)) for pair in pairs)

    def parse(self, answer: str) -> float:
        """Return 1 if A is better, 0 if B is, and 0.5 for a tie."""
        words = re.findall(r"\b(A|B|TIE|Tie|tie)\b", answer)
        if not words:
            raise UnusableAnswer(f"the judge named neither A, B nor TIE: {answer[-80:]!r}")
        return {"A": 1.0, "B": 0.0}.get(words[-1], 0.5)


def _last_user_turn(messages: Sequence[Mapping[str, Any]]) -> str:
    return next((content_text(turn["content"]) for turn in reversed(messages) if turn["role"] == "user"), "")


def _last_object(answer: str) -> Mapping[str, Any]:
    """Return the JSON object of an answer: its last fenced block, all of it, or what its outermost braces enclose."""
    candidates = [last_fenced(answer), answer, answer[answer.find("{") : answer.rfind("}") + 1]]
    for text in candidates:
        try:
            value = json.loads(text or "")
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    raise UnusableAnswer(f"the judge gave no JSON object: {answer[-80:]!r}")
