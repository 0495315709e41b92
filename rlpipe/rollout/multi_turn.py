"""Turn-by-turn sampling of conversations, on any engine: each answer continues the turns before it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from rlpipe.rollout.engine import Engine, WrappedEngine
from rlpipe.types import MAX_SEED, NO_VERSION, GroupRequest, Rollout, RolloutGroup, RolloutStatus

FIRST_PART_ID = 2**40
"""First request id for single turns; no group's id is in this range."""
SEED_STEP = 1_000_003


class MultiTurnEngine(WrappedEngine):
    """An engine that also samples prompts with ``turns``; all other requests go to the wrapped engine unchanged.

    The first turn is sampled for the whole group. After each answer that ended by itself, the prompt's next turn is
    appended, and the sibling continues alone, until its last turn or an answer that was cut off.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._conversations: dict[int, _Conversation] = {}
        self._parts: dict[int, tuple[_Conversation, int]] = {}
        self._next_id = FIRST_PART_ID

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._conversations |= {r.group_id: _Conversation(r) for r in requests if r.prompt.turns}
        self._engine.submit(requests)

    def cancel(self, group_ids: Collection[int]) -> None:
        turn_ids = {turn_id for turn_id, (conversation, _) in self._parts.items() if conversation.group_id in group_ids}
        self._parts = {turn_id: entry for turn_id, entry in self._parts.items() if turn_id not in turn_ids}
        self._conversations = {
            group_id: conversation
            for group_id, conversation in self._conversations.items()
            if group_id not in group_ids
        }
        self._engine.cancel({*group_ids, *turn_ids})

    def step(self) -> list[RolloutGroup]:
        finished = []
        for group in self._engine.step():
            if group.group_id in self._parts:
                conversation, index = self._parts.pop(group.group_id)
                conversation.go_on(index, group)
            elif group.group_id in self._conversations:
                conversation = self._conversations[group.group_id]
                conversation.begin(group)
            else:
                finished.append(group)
                continue
            self._continue(conversation)
            if conversation.is_over:
                del self._conversations[conversation.group_id]
                finished.append(conversation.group)
        return finished

    def _continue(self, conversation: _Conversation) -> None:
        requests = []
        for index, request in conversation.take_requests():
            self._parts[self._next_id] = (conversation, index)
            requests.append(replace(request, group_id=self._next_id))
            self._next_id += 1
        if requests:
            self._engine.submit(requests)


class _Conversation:
    """The siblings (rollouts of one group) of a prompt with further turns."""

    group: RolloutGroup
    """The group with all turns sampled so far; set by ``begin``."""

    def __init__(self, request: GroupRequest) -> None:
        self._request = request
        self.group_id = request.group_id
        self._num_turns: list[int] = []
        self._due: list[int] = []
        self._num_waiting = 0

    def begin(self, group: RolloutGroup) -> None:
        """Add the first turn of all siblings."""
        self.group = group
        self._num_turns = [1] * len(group)
        self._due = [index for index in range(len(group)) if self._has_next_turn(index)]

    def go_on(self, index: int, part: RolloutGroup) -> None:
        """Add a further turn of one sibling."""
        self._num_waiting -= 1
        self.group.generate_s += part.generate_s / self._request.group_size
        if part.failure is not None:
            self.group.failure = self.group.failure or f"turn {self._num_turns[index] + 1}: {part.failure}"
            return
        (answer,) = part.rollouts
        self.group.rollouts[index] = _joined(self.group.rollouts[index], answer)
        self._num_turns[index] += 1
        if self._has_next_turn(index):
            self._due.append(index)

    def take_requests(self) -> list[tuple[int, GroupRequest]]:
        """Return the turns to sample next, as (sibling's index, request); none once a turn has failed."""
        indices = self._due if self.group.failure is None else []
        self._due = []
        self._num_waiting += len(indices)
        return [(index, self._next_request(index)) for index in indices]

    @property
    def is_over(self) -> bool:
        return not self._num_waiting

    def _has_next_turn(self, index: int) -> bool:
        completed = self.group.rollouts[index].status is RolloutStatus.COMPLETED
        return completed and self._num_turns[index] <= len(self._request.prompt.turns)

    def _next_request(self, index: int) -> GroupRequest:
        request, turn = self._request, self._num_turns[index]
        token_ids = np.concatenate([self.group.rollouts[index].token_ids, request.prompt.turns[turn - 1]])
        return replace(
            request,
            prompt=request.prompt.followed_by(token_ids),
            group_size=1,
            seed=(request.seed + SEED_STEP * (turn * request.group_size + index)) % MAX_SEED,
        )


def _joined(before: Rollout, answer: Rollout) -> Rollout:
    """Append an answer to a rollout; the prompt of ``answer`` holds all turns before it."""
    length = len(answer.token_ids)
    earlier = np.arange(length) < len(before.token_ids)

    def joined(old: np.ndarray, new: np.ndarray, fill: float) -> np.ndarray:
        filled = np.r_[old, np.full(length - len(old), fill, old.dtype)]
        return np.where(earlier, filled, new).astype(old.dtype)

    return replace(
        before,
        token_ids=answer.token_ids,
        loss_mask=joined(before.loss_mask, answer.loss_mask, False),
        logprobs=joined(before.logprobs, answer.logprobs, 0.0),
        policy_versions=joined(before.policy_versions, answer.policy_versions, NO_VERSION),
        status=answer.status,
        finish_reason=answer.finish_reason,
    )
