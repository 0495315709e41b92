"""Rewards of NeMo Gym: the ``/verify`` endpoint of a resources server scores each completion over HTTP."""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Mapping
from functools import partial
from typing import Any

from rlpipe.scoring.http import JsonClient, UnusableAnswer, together
from rlpipe.scoring.rewards import RewardActor
from rlpipe.types import RolloutGroup

CREATE_PARAMS = "responses_create_params"


class NemoGym(RewardActor):
    """Reward of the resources server at ``url``: the ``reward`` of its answer, or ``component`` of several.

    The row's columns are sent as they are (images as ``data:`` URLs), because NeMo Gym's data sets hold there what
    their verifiers need. If the row has no ``responses_create_params``, they are made from the prompt. ``timeout_s``
    and ``retries`` apply to a request (see ``rlpipe.scoring.http``); ``concurrency`` limits the requests of one
    process.
    """

    def __init__(
        self,
        *,
        url: str,
        component: str | None = None,
        timeout_s: float = 30.0,
        retries: int = 4,
        concurrency: int = 16,
    ) -> None:
        self._component = component
        self._client = JsonClient(url, timeout_s=timeout_s, retries=retries, concurrency=concurrency)

    async def score(self, group: RolloutGroup) -> list[float | None]:  # type: ignore[override]
        return list(await together(self._verify(group, text) for text in self.texts(group)))

    async def _verify(self, group: RolloutGroup, text: str) -> float:
        return await self._client.post("/verify", verify_request(group, text), partial(reward_of, of=self._component))


def reward_of(answer: Any, *, of: str | None = None) -> float:
    """Return the reward in a server's answer, or that of a component; raise ``UnusableAnswer`` if there is none."""
    fields = answer if isinstance(answer, Mapping) else {}
    value = fields.get("reward")
    if of is not None:
        components = fields.get("reward_components")
        value = components.get(of) if isinstance(components, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        named = "reward" if of is None else f"reward_components[{of!r}]"
        raise UnusableAnswer(f"its {named} is {value!r:.100}, not a finite number")
    return float(value)


def verify_request(group: RolloutGroup, text: str) -> dict[str, Any]:
    """Return the body of a ``/verify`` request: the row, and the completion as a response of OpenAI's Responses API."""
    params = group.prompt.task.get(CREATE_PARAMS) or {"input": _as_input(group)}
    return {
        **row_as_json(group.prompt.task),
        CREATE_PARAMS: params,
        "response": {
            "id": f"resp_{group.group_id}",
            "created_at": time.time(),
            "model": "policy",
            "object": "response",
            "output": [
                {
                    "id": f"msg_{group.group_id}",
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [{"type": "output_text", "text": text, "annotations": []}],
                }
            ],
            "parallel_tool_calls": False,
            "tool_choice": "auto",
            "tools": [],
        },
    }


def row_as_json(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's columns, with images as ``data:`` URLs."""
    return {name: _as_json(value) for name, value in row.items()}


def _as_json(value: Any) -> Any:
    """Return a column's value, with an image or a list of images as ``data:`` URLs."""
    if isinstance(value, bytes):
        return f"data:image;base64,{b64encode(value).decode()}"
    return [_as_json(item) for item in value] if isinstance(value, list) else value


def _as_input(group: RolloutGroup) -> list[dict[str, Any]]:
    prompt = group.prompt.prompt
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
