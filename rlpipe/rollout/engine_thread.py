"""Opening of rollout engines, and a thread that runs one, with methods that any other thread may call."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError, EngineFailed, InputError, WaitTimeout, WeightsMismatch
from rlpipe.rollout.engine import Engine, resolve_engine, why_no_vllm
from rlpipe.types import Buckets, EngineHealth, GroupRequest, RolloutGroup, WeightsManifest

STOP_TIMEOUT_S = 60.0
FIRST_ASKED_ID = 2**50
"""First group id for requests of ``ask`` and of clients; no other group's id is in this range."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Load:
    manifest: WeightsManifest
    buckets: Buckets
    digest: Future[str] = field(default_factory=Future)


class EngineThread:
    """A thread that runs an engine, so that callers can submit and collect without waiting for a step to finish.

    ``open_engine`` is called on the thread, so that the engine lives on one thread from start to end. The constructor
    returns once the engine is open, and raises whatever ``open_engine`` raises. An error in a later step or load ends
    the thread, and every later call raises ``EngineFailed`` with the engine's name and the cause. So does every call
    while a step takes longer than ``step_limit_s``, because a GPU that hangs raises nothing.
    """

    def __init__(self, name: str, open_engine: Callable[[], Engine], step_limit_s: float = math.inf) -> None:
        self.name = name
        self._step_limit_s, self._step_began = step_limit_s, math.inf
        self._changed = threading.Condition()
        self._submitted: list[GroupRequest] = []
        self._finished: dict[str, deque[RolloutGroup]] = {}
        """Finished groups, by the name of the client that they are kept for."""
        self._cancelled: set[int] = set()
        self._loads: deque[_Load] = deque()
        self._asked: dict[int, Future[RolloutGroup]] = {}
        self._of_clients: dict[int, tuple[str, int]] = {}
        """Clients of requests with names of their own, and the ids that these gave them."""
        self._clients: dict[str, str] = {}
        self._next_asked_id = FIRST_ASKED_ID
        self._outstanding: dict[int, int] = {}
        self._outstanding_tokens = 0
        self._health: EngineHealth | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, opened), name=name, daemon=True)
        self._thread.start()
        opened.result()  # the process that asked for the engine limits this wait, which may be a download's

    @property
    def outstanding_tokens(self) -> int:
        """Upper bound on the tokens of all unfinished requests."""
        with self._changed:
            return self._outstanding_tokens

    def submit(self, requests: Sequence[GroupRequest], client: str = "") -> None:
        """Accept requests; ``collect`` returns their groups to the same client, whose ids are its own.

        A client is named ``name/process``; the requests of an earlier process of the same name are dropped. It may send
        a request again, which is sampled anew only if it was collected before.
        """
        with self._changed:
            self._check()
            if not client:
                self._add(requests)
                return
            self._end_predecessor(client)
            submitted = {group_id for owner, group_id in self._of_clients.values() if owner == client}
            submitted |= {group.group_id for group in self._finished.get(client, ())}
            requests = [request for request in requests if request.group_id not in submitted]
            ids = [self._take_id() for _ in requests]
            self._of_clients |= {
                engine_id: (client, request.group_id) for engine_id, request in zip(ids, requests, strict=True)
            }
            self._add([replace(request, group_id=engine_id) for engine_id, request in zip(ids, requests, strict=True)])

    def cancel(self, client: str, group_ids: Collection[int]) -> None:
        """Drop a client's requests; a group that has just finished is dropped as well."""
        with self._changed:
            self._check()
            dropped = {
                engine_id
                for engine_id, (name, group_id) in self._of_clients.items()
                if name == client and group_id in group_ids
            }
            finished = [group for group in self._finished.get(client, ()) if group.group_id not in group_ids]
            self._finished[client] = deque(finished)
            self._submitted = [request for request in self._submitted if request.group_id not in dropped]
            self._cancelled |= dropped
            for engine_id in dropped:
                del self._of_clients[engine_id]
                self._outstanding_tokens -= self._outstanding.pop(engine_id, 0)

    def _end_predecessor(self, client: str) -> None:
        name = client.partition("/")[0]
        earlier, self._clients[name] = self._clients.get(name, client), client
        if earlier != client:
            self.cancel(earlier, [group_id for owner, group_id in self._of_clients.values() if owner == earlier])
            self._finished.pop(earlier, None)

    def ask(self, request: GroupRequest, timeout_s: float) -> RolloutGroup:
        """Sample one group and wait for it; ``collect`` does not return it, and the request's own id is ignored.

        Raises ``WaitTimeout`` after ``timeout_s``; the group is then still sampled, but dropped.
        """
        answer: Future[RolloutGroup] = Future()
        with self._changed:
            self._check()
            group_id = self._take_id()
            self._asked[group_id] = answer
            self._add([replace(request, group_id=group_id)])
        try:
            return answer.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(f"engine {self.name} gave no answer within {timeout_s:g} s: {self.health()}") from None

    def collect(self, timeout_s: float, max_groups: int, client: str = "") -> list[RolloutGroup]:
        """Wait for a client's finished group, and return up to ``max_groups``; none if ``timeout_s`` passes first."""
        with self._changed:
            self._changed.wait_for(lambda: self._finished.get(client) or not self._alive, timeout_s)
            finished = self._finished.get(client, deque())
            if not finished:
                self._check()
            return [finished.popleft() for _ in range(min(max_groups, len(finished)))]

    def load(self, manifest: WeightsManifest, buckets: Buckets, timeout_s: float) -> str:
        """Load a version between two steps, and return the digest of the weights that the engine then serves.

        Raises ``WaitTimeout`` after ``timeout_s``; the load still takes place.
        """
        load = _Load(manifest, buckets)
        with self._changed:
            self._check()
            self._loads.append(load)
            self._changed.notify_all()
        try:
            return load.digest.result(timeout_s)
        except FutureTimeout:
            raise WaitTimeout(
                f"engine {self.name} did not load version {manifest.version} within {timeout_s:g} s: {self.health()}"
            ) from None

    def health(self) -> EngineHealth:
        """Return the health that the engine reported after its last step."""
        with self._changed:
            self._check()
            assert self._health is not None
            return self._health

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the thread after its current step, and free the engine; requests in flight are dropped.

        Raises ``WaitTimeout`` if the step takes longer than ``timeout_s``; the thread ends with its process, then.
        """
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise WaitTimeout(f"engine {self.name} has not ended its current step within {timeout_s:g} s")

    def _take_id(self) -> int:
        engine_id, self._next_asked_id = self._next_asked_id, self._next_asked_id + 1
        return engine_id

    def _add(self, requests: Sequence[GroupRequest]) -> None:
        self._submitted.extend(requests)
        for request in requests:
            tokens = request.outstanding_tokens
            self._outstanding[request.group_id] = self._outstanding.get(request.group_id, 0) + tokens
            self._outstanding_tokens += tokens
        self._changed.notify_all()

    @property
    def _alive(self) -> bool:
        return self._failure is None and not self._stopping

    def _check(self) -> None:
        if self._failure is not None:
            cause = f"{type(self._failure).__name__}: {self._failure}"
            raise EngineFailed(f"engine {self.name} failed: {cause}") from self._failure
        if self._stopping:
            raise EngineFailed(f"engine {self.name} was stopped")
        if time.monotonic() - self._step_began > self._step_limit_s:
            raise EngineFailed(f"engine {self.name} hangs: a step takes longer than {self._step_limit_s:g} s")

    def _run(self, open_engine: Callable[[], Engine], opened: Future[None]) -> None:
        try:
            engine = open_engine()
            self._health = engine.health()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for the engine
            opened.set_exception(error)
            return
        opened.set_result(None)
        try:
            while self._take_turn(engine):
                pass
        except BaseException as error:  # noqa: BLE001 - raised to every caller from now on
            self._fail(error)
        finally:
            engine.stop()

    def _take_turn(self, engine: Engine) -> bool:
        work = self._await_work(engine)
        if work is None:
            return False
        requests, cancelled = work
        engine.submit(requests)
        if cancelled:
            engine.cancel(cancelled)
        if self._loads:
            self._try_load(engine)
        self._step_began = time.monotonic()
        groups = engine.step() if engine.has_work else []
        self._step_began = math.inf
        with self._changed:
            self._health = engine.health()
            for group in groups:
                self._outstanding_tokens -= self._outstanding.pop(group.group_id, 0)
                self._deliver(group)
            if groups:
                self._changed.notify_all()
        return True

    def _deliver(self, group: RolloutGroup) -> None:
        if group.group_id in self._asked:
            self._asked.pop(group.group_id).set_result(group)
            return
        if group.group_id in self._cancelled:  # while it was being sampled
            return
        client, group.group_id = self._of_clients.pop(group.group_id, ("", group.group_id))
        self._finished.setdefault(client, deque()).append(group)

    def _await_work(self, engine: Engine) -> tuple[list[GroupRequest], set[int]] | None:
        """Return new requests, and requests to drop; None if the thread is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._submitted or self._loads or engine.has_work)
            if self._stopping:
                self._end_waits(EngineFailed(f"engine {self.name} was stopped"))
                return None
            requests, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, set()
            return requests, cancelled

    def _try_load(self, engine: Engine) -> None:
        load = self._loads[0]
        try:
            if not engine.prepare_load(load.manifest):
                return
            digest = engine.load(load.manifest, load.buckets)
        except (InputError, WeightsMismatch) as error:
            load.digest.set_exception(error)
        else:
            with self._changed:
                self._health = engine.health()
            load.digest.set_result(digest)
        self._loads.popleft()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = error
            try:
                self._check()
            except EngineFailed as failed:
                self._end_waits(failed)
            self._changed.notify_all()

    def _end_waits(self, error: EngineFailed) -> None:
        while self._loads:
            self._loads.popleft().digest.set_exception(error)
        while self._asked:
            self._asked.popitem()[1].set_exception(error)


def open_engine(
    name: str, model: ModelConfig, rollout: RolloutConfig, weights: WeightsConfig, *, max_prompt_tokens: int
) -> Engine:
    """Open the engine that the config selects, with the model loaded.

    Args:
        name: name of this engine, in its health and its errors.
        max_prompt_tokens: the longest prompt that will be submitted.

    Raises:
        ConfigError: an option is unknown to the engine, or not supported by it.
        ModelError: the model or adapter can't be loaded.
    """
    model = replace(model, dtype=rollout.dtype or model.dtype)
    if model.dtype == "auto":  # vLLM would read auto as the type of the model's files
        from rlpipe.models.loading import torch_device, with_dtype

        model = with_dtype(model, torch_device())
    engine = resolve_engine(rollout)
    if rollout.engine == "auto" and engine == "hf":
        logger.warning("engine %s samples with transformers, which is slower: %s", name, why_no_vllm(rollout))
    if engine == "vllm":
        from rlpipe.rollout.vllm.vllm_engine import VllmEngine

        return VllmEngine(name, model, rollout, weights, max_prompt_tokens=max_prompt_tokens)
    if weights.transport == "nccl":
        raise ConfigError("weights.transport=nccl needs vLLM, which is not installed: set object_store")
    from rlpipe.rollout.hf_engine import HfEngine

    return HfEngine(name, model, rollout, weights, max_prompt_tokens=max_prompt_tokens)
