"""The rollout actor: one engine and its queue of requests."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import EngineNotStarted
from rlpipe.rollout.engine import resolve_engine
from rlpipe.rollout.engine_thread import EngineThread, open_engine
from rlpipe.rollout.greedy import GreedyBaselineEngine
from rlpipe.rollout.multi_turn import MultiTurnEngine
from rlpipe.types import ByteArray, EngineHealth, GroupRequest, RolloutGroup, WeightsManifest

QUESTIONS = "questions"
"""The concurrency group of ``ask``, which occupies a thread while the engine samples."""
TURNS = "turns"
"""The concurrency group of the turns of episodes."""
VLLM_STEP_S = 600.0
"""Limit on a step of vLLM on GPUs, in seconds; vLLM itself waits 300 s for the processes of several GPUs."""
MAX_TURNS = 1024
"""Turns that a client gets at one time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Receipt:
    """The controller's record of a finished group; the group itself stays in the object store."""

    group_id: int
    num_tokens: int


def with_receipts(groups: list[RolloutGroup], name: str) -> tuple[list[Receipt], list[RolloutGroup]]:
    """Return the receipts of groups, and the groups with the name of the actor that has finished them."""
    for group in groups:
        group.engine = name
    return [Receipt(group_id=group.group_id, num_tokens=group.num_tokens) for group in groups], groups


def step_limit_s(rollout: RolloutConfig) -> float:
    """Return how long a step of an engine may take, in seconds: one token of vLLM on GPUs, which takes milliseconds.

    Steps have no limit on a CPU, where long prompts take minutes, and with ``hf``, which samples whole batches.
    """
    return VLLM_STEP_S if rollout.num_gpus and resolve_engine(rollout) == "vllm" else math.inf


class RolloutActor:
    """Ray actor around an ``EngineThread``; its methods run on several threads, so that none blocks another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: EngineThread | None = None
        self._starting = threading.Lock()

    def start(self, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, max_prompt_tokens: int) -> None:
        """Load the model, which takes seconds to minutes."""
        with self._starting:  # Ray may repeat the call while a newer one runs
            if self._thread is not None:
                return
            self._thread = EngineThread(
                self._name,
                lambda: GreedyBaselineEngine(
                    MultiTurnEngine(
                        open_engine(self._name, model, rollout, weights, max_prompt_tokens=max_prompt_tokens)
                    )
                ),
                step_limit_s=step_limit_s(rollout),
            )

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        if self._thread is not None:  # else ``collect`` raises, and the pool gives them to another engine
            self._thread.submit(requests)

    def collect(self, timeout_s: float, max_groups: int) -> tuple[list[Receipt], list[RolloutGroup]]:
        """Return finished groups with their receipts, as soon as there is one; none after ``timeout_s``."""
        return with_receipts(self._engine.collect(timeout_s, max_groups), self._name)

    def submit_turns(self, client: str, requests: Sequence[GroupRequest]) -> None:
        """Begin to sample turns, which ``poll_turns`` returns to the same client."""
        self._engine.submit(requests, client)

    def cancel(self, client: str, group_ids: Sequence[int]) -> None:
        """Drop turns whose episodes are over."""
        self._engine.cancel(client, group_ids)

    def poll_turns(self, client: str, timeout_s: float) -> tuple[list[RolloutGroup], int]:
        """Return a client's finished turns as soon as there are some, none after ``timeout_s``; and the version."""
        return self._engine.collect(timeout_s, MAX_TURNS, client), self._engine.health().version

    def ask(self, request: GroupRequest, timeout_s: float) -> RolloutGroup:
        """Return the group of a request from outside the rollouts; call it in the concurrency group ``QUESTIONS``."""
        return self._engine.ask(request, timeout_s)

    def load(self, manifest: WeightsManifest, timeout_s: float, *buckets: ByteArray) -> str:
        """Load a version between two engine steps, and return the digest of the weights served now."""
        return self._engine.load(manifest, buckets, timeout_s)

    def health(self) -> EngineHealth:
        return self._engine.health()

    @property
    def _engine(self) -> EngineThread:
        if self._thread is None:
            raise EngineNotStarted(f"the process of engine {self._name} has no model yet")
        return self._thread
