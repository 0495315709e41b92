from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rlpipe.errors import EngineFailed, ModelError, WaitTimeout, WeightsMismatch
from rlpipe.rollout.engine import Sample, build_group
from rlpipe.rollout.engine_thread import EngineThread
from rlpipe.types import Buckets, EngineHealth, GroupRequest, Prompt, RolloutGroup, WeightsKind, WeightsManifest

PROMPT = Prompt(prompt_id=0, epoch=0, token_ids=np.array([1, 2], np.int32), prompt="x", task={})


def request(group_id: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id, prompt=PROMPT, group_size=2, max_tokens=3, temperature=1.0, seed=0, min_version=min_version
    )


def manifest(version: int) -> WeightsManifest:
    return WeightsManifest(version=version, kind=WeightsKind.LORA, digest=f"d{version}", num_buckets=0, num_bytes=0)


class FakeEngine:
    """A fake engine that finishes every eligible request in one step, and can fail, refuse a load, or delay it."""

    def __init__(self) -> None:
        self.version = 0
        self.waiting: list[GroupRequest] = []
        self.fail_on: int | None = None
        self.steps_before_load = 0
        self.threads: set[int] = set()
        self.cancelled: set[int] = set()
        self.stopped = False

    @property
    def has_work(self) -> bool:
        return self.steps_before_load > 0 or any(r.min_version <= self.version for r in self.waiting)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.threads.add(threading.get_ident())
        self.waiting.extend(requests)

    def cancel(self, group_ids: Collection[int]) -> None:
        self.cancelled |= {*group_ids}
        self.waiting = [request for request in self.waiting if request.group_id not in group_ids]

    def step(self) -> list[RolloutGroup]:
        self.steps_before_load = max(0, self.steps_before_load - 1)
        ready = [r for r in self.waiting if r.min_version <= self.version]
        self.waiting = [r for r in self.waiting if r.min_version > self.version]
        if any(r.group_id == self.fail_on for r in ready):
            raise RuntimeError("out of memory")
        sample = Sample(token_ids=[5], logprobs=[-1.0], policy_versions=[self.version], finish_reason="stop")
        return [build_group(r, [sample] * r.group_size, 0.0) for r in ready]

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        return self.steps_before_load == 0

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        if manifest.version == 13:
            raise ModelError("no such module")
        if manifest.version == 14:
            raise WeightsMismatch("norm does not serve what was published")
        self.version = manifest.version
        return manifest.digest

    def health(self) -> EngineHealth:
        return EngineHealth(
            name="fake", version=self.version, digest=f"d{self.version}", outstanding_groups=0, num_tokens=0, busy_s=0.0
        )

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def thread(engine: FakeEngine) -> Iterator[EngineThread]:
    thread = EngineThread("engine-3", lambda: engine)
    yield thread
    thread.stop()


def test_a_step_that_hangs_fails_every_call() -> None:
    began, goes_on = threading.Event(), threading.Event()

    class Hanging(FakeEngine):
        def step(self) -> list[RolloutGroup]:
            began.set()
            goes_on.wait()
            return super().step()

    thread = EngineThread("engine-3", Hanging, step_limit_s=0.05)
    assert thread.collect(timeout_s=0.1, max_groups=1) == [], "an idle engine has no step"
    thread.submit([request(0)])
    began.wait(5)
    time.sleep(0.06)
    with pytest.raises(EngineFailed, match=r"engine engine-3 hangs: a step takes longer than 0\.05 s"):
        thread.collect(timeout_s=0.01, max_groups=1)
    goes_on.set()
    assert [group.group_id for group in collect(thread, 1)] == [0]
    thread.stop()


def collect(thread: EngineThread, count: int) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    while len(groups) < count:
        new = thread.collect(timeout_s=5, max_groups=1000)
        assert new, f"only {len(groups)} of {count} groups came"
        groups += new
    return groups


def test_groups_come_back_and_their_tokens_are_accounted(engine: FakeEngine, thread: EngineThread) -> None:
    thread.submit([request(0), request(1), request(2, min_version=1)])
    assert {group.group_id for group in collect(thread, 2)} == {0, 1}
    assert thread.outstanding_tokens == request(2).outstanding_tokens == 8
    assert thread.collect(timeout_s=0.01, max_groups=5) == []
    assert thread.load(manifest(1), [], timeout_s=5) == "d1"
    assert thread.health().version == 1
    assert [group.oldest_version for group in collect(thread, 1)] == [1]
    assert thread.outstanding_tokens == 0
    assert threading.get_ident() not in engine.threads


def test_collect_returns_at_most_max_groups(thread: EngineThread) -> None:
    thread.submit([request(i) for i in range(5)])
    sizes = []
    while sum(sizes) < 5:
        sizes.append(len(thread.collect(timeout_s=5, max_groups=2)))
    assert max(sizes) == 2


def test_a_load_waits_until_the_engine_is_ready(engine: FakeEngine, thread: EngineThread) -> None:
    engine.steps_before_load = 5
    assert thread.load(manifest(2), [], timeout_s=5) == "d2"
    assert engine.steps_before_load == 0


def test_a_refused_load_is_raised_to_its_caller_only(thread: EngineThread) -> None:
    with pytest.raises(ModelError, match="no such module"):
        thread.load(manifest(13), [], timeout_s=5)
    with pytest.raises(WeightsMismatch, match="norm does not serve"):
        thread.load(manifest(14), [], timeout_s=5)
    thread.submit([request(0)])
    assert len(collect(thread, 1)) == 1


def test_a_slow_load_times_out_with_the_state_of_the_engine(engine: FakeEngine, thread: EngineThread) -> None:
    engine.steps_before_load = 10**9
    with pytest.raises(WaitTimeout, match=r"engine-3 did not load version 4 within 0\.05 s: .*version=0"):
        thread.load(manifest(4), [], timeout_s=0.05)
    engine.steps_before_load = 0


def test_a_failing_engine_fails_every_later_call(engine: FakeEngine, thread: EngineThread) -> None:
    engine.fail_on = 7
    thread.submit([request(7)])
    with pytest.raises(EngineFailed, match=r"engine engine-3 failed: RuntimeError: out of memory"):
        thread.collect(timeout_s=5, max_groups=1)
    for call in (lambda: thread.submit([request(8)]), lambda: thread.load(manifest(1), [], timeout_s=5), thread.health):
        with pytest.raises(EngineFailed, match="out of memory"):
            call()


def test_what_the_engine_raises_at_its_opening_is_raised_unchanged() -> None:
    def fail() -> FakeEngine:
        raise ModelError("model.path=x can't be loaded")

    with pytest.raises(ModelError, match=r"model\.path=x"):
        EngineThread("engine-0", fail)


def test_stop_frees_the_engine_and_wakes_a_waiting_collect(engine: FakeEngine, thread: EngineThread) -> None:
    failures: list[str] = []

    def wait() -> None:
        try:
            thread.collect(timeout_s=30, max_groups=1)
        except EngineFailed as error:
            failures.append(str(error))

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.02)
    thread.stop()
    waiter.join(timeout=5)
    assert failures == ["engine engine-3 was stopped"]
    assert engine.stopped


def test_thousands_of_groups_a_second_pass_through(thread: EngineThread) -> None:
    requests = [request(i) for i in range(3000)]
    start = time.perf_counter()
    for index in range(0, len(requests), 8):
        thread.submit(requests[index : index + 8])
    assert len(collect(thread, len(requests))) == len(requests)
    assert time.perf_counter() - start < 3


def ask(thread: EngineThread, request: GroupRequest, timeout_s: float = 5) -> RolloutGroup | BaseException:
    try:
        return thread.ask(request, timeout_s)
    except EngineFailed as error:
        return error


def test_what_is_asked_for_is_answered_to_its_asker_alone(thread: EngineThread) -> None:
    thread.submit([request(0)])
    with ThreadPoolExecutor() as pool:
        asked = list(pool.map(lambda seed: thread.ask(replace(request(0), seed=seed), 5), range(20)))
    assert len({group.group_id for group in asked} | {0}) == 21, "ids of their own"
    assert [group.group_id for group in collect(thread, 1)] == [0]
    assert thread.collect(timeout_s=0.05, max_groups=1) == []
    assert thread.outstanding_tokens == 0


def test_what_is_asked_for_counts_until_it_is_there_even_if_nobody_waits_any_more(thread: EngineThread) -> None:
    with pytest.raises(WaitTimeout, match=r"engine-3 gave no answer within 0\.05 s: .*version=0"):
        thread.ask(request(0, min_version=1), timeout_s=0.05)
    assert thread.outstanding_tokens == request(0).outstanding_tokens
    thread.load(manifest(1), [], timeout_s=5)
    assert thread.collect(timeout_s=0.05, max_groups=1) == []
    assert thread.outstanding_tokens == 0


@pytest.mark.parametrize("end", ["stop", "failure"])
def test_an_engine_that_ends_says_so_to_those_who_asked(engine: FakeEngine, thread: EngineThread, end: str) -> None:
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, thread, request(0, min_version=1))
        while not thread.outstanding_tokens:
            time.sleep(0.01)
        if end == "stop":
            thread.stop()
        else:
            engine.fail_on = 7
            thread.submit([request(7)])
        reason = {"stop": "was stopped", "failure": "out of memory"}[end]
        assert reason in str(asked.result(timeout=5))


def test_the_end_of_a_step_that_hangs_is_not_awaited_for_ever(engine: FakeEngine, thread: EngineThread) -> None:
    entered, released = threading.Event(), threading.Event()

    def hang() -> list[RolloutGroup]:
        entered.set()
        released.wait()
        engine.waiting.clear()
        return []

    engine.step = hang  # type: ignore[method-assign]
    thread.submit([request(1)])
    entered.wait()
    with pytest.raises(WaitTimeout, match=r"engine engine-3 has not ended its current step within 0\.1 s"):
        thread.stop(0.1)
    released.set()
    thread.stop()
    assert engine.stopped


def test_a_client_gets_its_own_groups_under_its_own_ids(thread: EngineThread) -> None:
    thread.submit([request(5)])
    thread.submit([request(5), request(6)], "one/1")
    thread.submit([request(5)], "two/1")
    assert {group.group_id for group in collect_for(thread, "one/1", 2)} == {5, 6}
    assert [group.group_id for group in collect_for(thread, "two/1", 1)] == [5]
    assert [group.group_id for group in collect(thread, 1)] == [5]


def test_a_request_that_a_client_sends_again_is_sampled_again_once_it_was_collected(thread: EngineThread) -> None:
    for _ in range(2):
        thread.submit([request(0), request(1, min_version=1)], "one/1")  # the latter waits for its version
        deadline = time.monotonic() + 5
        while thread.outstanding_tokens > request(1).outstanding_tokens and time.monotonic() < deadline:
            time.sleep(0.001)
    assert [group.group_id for group in thread.collect(5, 5, "one/1")] == [0]
    thread.submit([request(0), request(1, min_version=1)], "one/1")
    assert [group.group_id for group in thread.collect(5, 5, "one/1")] == [0]
    thread.load(manifest(1), [], timeout_s=5)
    assert [group.group_id for group in thread.collect(5, 5, "one/1")] == [1]
    assert thread.outstanding_tokens == 0


def test_cancelled_requests_do_not_come_back(engine: FakeEngine, thread: EngineThread) -> None:
    thread.submit([request(0, min_version=1), request(1, min_version=1)], "one/1")
    thread.submit([request(0, min_version=1)], "two/1")
    thread.cancel("one/1", [0, 7])
    assert thread.outstanding_tokens == 2 * request(0).outstanding_tokens
    thread.load(manifest(1), [], timeout_s=5)
    assert [group.group_id for group in collect_for(thread, "one/1", 1)] == [1]
    assert [group.group_id for group in collect_for(thread, "two/1", 1)] == [0]
    assert len(engine.cancelled) <= 1
    assert thread.outstanding_tokens == 0
    assert thread.collect(0.01, 5, "one/1") == []
    assert thread.collect(0.01, 5) == []


def test_a_group_that_has_just_finished_is_dropped_as_well(thread: EngineThread) -> None:
    thread.submit([request(0), request(1)], "one/1")
    while thread.outstanding_tokens:
        time.sleep(0.001)
    thread.cancel("one/1", [0])
    assert [group.group_id for group in thread.collect(5, 5, "one/1")] == [1]


def test_a_restarted_client_does_not_get_what_was_sampled_for_the_process_before_it(thread: EngineThread) -> None:
    thread.submit([request(0), request(1, min_version=1)], "one/1")
    thread.submit([replace(request(0), group_size=3)], "one/2")
    thread.load(manifest(1), [], timeout_s=5)
    (group,) = collect_for(thread, "one/2", 1)
    assert len(group) == 3
    assert thread.outstanding_tokens == 0
    assert thread.collect(0.01, 5, "one/1") == []


def collect_for(thread: EngineThread, client: str, count: int) -> list[RolloutGroup]:
    groups: list[RolloutGroup] = []
    while len(groups) < count:
        new = thread.collect(5, 1000, client)
        assert new, f"only {len(groups)} of {count} groups came"
        groups += new
    return groups
