"""A learner rank starts, continues and stops at the right step, and publishes, reports and checkpoints in order."""

from __future__ import annotations

import errno
import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayTaskError

from rlpipe.actors import learner
from rlpipe.actors.learner import LearnerLoop, RemoteCalls, run_rank
from rlpipe.common import run_files
from rlpipe.common.atomic_io import seal
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.root_config import CheckpointConfig, WeightsConfig
from rlpipe.errors import DataError, RunError
from rlpipe.learner.checkpoint_files import RECORD, latest, read_extra
from rlpipe.learner.profiling import StepProfiler
from rlpipe.learner.step import LossTarget
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import TrainBatch

NOTE = "a message about the model"
FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


class Killed(Exception):
    """Death of the rank in the middle of a step."""


class Handle:
    """Handle of an actor that does what it is asked as late as it may: when the caller waits for the answer."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(partial, getattr(self._actor, method)))


@dataclass(kw_only=True)
class Scene:
    """Stubs of all that a rank calls (model, checkpoints, publisher, actor), with a ``log`` of what it has done."""

    output: Path
    rank: int = 0
    first_step: int = 0
    """Step of the checkpoint that there is at the start; 0: none."""
    num_steps: int = 5
    checkpoint_every: int = 2
    publish_every: int = 1
    evaluate_every: int = 0
    has_engines: bool = False
    stop_loss: float | None = None
    resume_from: Path | None = None
    stops_before: float = math.inf
    dies_in: int | None = None
    failures: dict[int, Exception] = field(default_factory=dict)
    """Error of the first attempt to write a checkpoint, by step: of its files, or as a ``RunError`` of the ledger."""
    log: list[str] = field(default_factory=list)
    evaluated: dict[int, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Scene:
        if self.first_step:
            write_checkpoint(self.output, self.first_step)
        actor = SimpleNamespace(
            begin_incarnation=lambda: 7,
            held_out=lambda rank: ["a row"],
            next_batch=self._next_batch,
            complete_step=self._complete_step,
            checkpointed=lambda step, served: self._did(f"record {step} as {served}"),
            back_up=lambda target: self._fail(int(target.parent.name), RunError),
            note=lambda kind, subject, message: self.notes.append(message),
        )
        loop: Any = object.__new__(LearnerLoop)
        loop._setup = SimpleNamespace(
            model=ModelConfig(path="org/policy"),
            algorithm=AlgorithmConfig(num_steps=self.num_steps, stop_loss=self.stop_loss),
            weights=WeightsConfig(every_steps=self.publish_every),
            checkpoint=CheckpointConfig(every_steps=self.checkpoint_every),
            resolved_config={"algorithm": {"num_steps": self.num_steps}},
            output=self.output,
            evaluate_every=self.evaluate_every,
            resume_from=self.resume_from,
            batches=Handle(actor),
            weights_actor=object() if self.has_engines else None,
            start_timeout_s=1.0,
            step_timeout_s=1.0,
        )
        loop._rank, loop._step, loop._saved_step, loop._incarnation, loop._num_notes = self.rank, 0, -1, 0, 0
        loop._policy = SimpleNamespace(notes=[NOTE], device=torch.device("cpu"), log=self.log)
        loop._learner = SimpleNamespace(
            train_step=self._train_step,
            compare=lambda batch: self._did(f"compare {batch.step}"),
            evaluate=lambda rows: self._did("evaluate"),
            token_differences=lambda batch: {},
        )
        loop._publisher = SimpleNamespace(
            publish=lambda version, incarnation: self._did(f"publish {version} of group {incarnation}"),
            wait=lambda call, timeout_s: True,
            digest_of=lambda version: f"v{version}",
        )
        loop._store = SimpleNamespace(load=lambda path, learner: read_extra(path), save=self._save)
        loop._calls, loop._target, loop._features = RemoteCalls(self.rank, 1.0), LossTarget(self.stop_loss), None
        loop._profiler = StepProfiler(self.output, (), rank=self.rank, device=loop._policy.device)
        loop.run()
        return self

    def steps(self, action: str) -> list[int]:
        return [int(entry.split()[1]) for entry in self.log if entry.startswith(action)]

    def _did(self, entry: str) -> dict[str, float]:
        self.log.append(entry)
        return {}

    def _next_batch(self, step: int, rank: int) -> TrainBatch | None:
        assert rank == self.rank
        if step >= self.stops_before:
            return None
        return TrainBatch(step=step, mini_batches=[], resume={"position": step + 1})

    def _train_step(self, batch: TrainBatch) -> dict[str, float]:
        if batch.step == self.dies_in:
            raise Killed
        return {"loss": 0.1} | self._did(f"train {batch.step}")

    def _complete_step(self, report: StepReport) -> None:
        self._did(f"report {report.step}" + " last" * report.last)
        self.evaluated |= {report.step: list(report.evaluations)} if report.evaluations else {}

    def _save(self, learner: Any, *, step: int, extra: Any, add: Any) -> None:
        self._fail(step, OSError)
        if self.rank == 0:
            write_checkpoint(self.output, step, **extra, **add(Path(str(step))))
        self._did(f"save {step}")

    def _fail(self, step: int, kind: type[Exception]) -> None:
        if isinstance(self.failures.get(step), kind):
            raise self.failures.pop(step)


def write_checkpoint(output: Path, step: int, *, num_steps: int = 5, **extra: Any) -> Path:
    folder = output / run_files.CHECKPOINTS / f"step_{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    extra = {"config": {"algorithm": {"num_steps": num_steps}}, "resume": {"position": step}} | extra
    record = {"step": step, "num_bad_steps": 0, "bad_steps_in_row": 0, "extra": extra, "files": {}}
    (folder / RECORD).write_text(seal(record))
    return folder


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "get", lambda call, timeout=None: call())
    monkeypatch.setattr(learner, "export_policy", lambda policy, folder: policy.log.append(f"export {folder.name}"))


def test_a_run_publishes_and_reports_each_step_and_then_writes_and_records_what_is_due(tmp_path: Path) -> None:
    scene = Scene(output=tmp_path, num_steps=3).run()
    start, first = ["publish 0 of group 7", "evaluate"], ["train 0", "publish 1 of group 7"]
    second = ["train 1", "publish 2 of group 7", "report 0", "report 1", "save 2", "record 2 as v2"]
    third = ["train 2", "publish 3 of group 7", "evaluate", "report 2 last", "save 3", "record 3 as v3"]
    assert scene.log == [*start, *first, *second, *third, "export policy"]
    assert scene.notes == [NOTE]


@pytest.mark.parametrize(
    ("own", "given", "first"), [([], None, 0), ([2, 3], None, 3), ([], 2, 2), ([4], 2, 4), ([2], 3, 3)]
)
def test_a_run_continues_after_its_newest_checkpoint_and_records_it_again(
    tmp_path: Path, own: list[int], given: int | None, first: int
) -> None:
    for step in own:
        write_checkpoint(tmp_path, step)
    resume_from = None if given is None else write_checkpoint(tmp_path / "other", given)
    scene = Scene(output=tmp_path, resume_from=resume_from).run()
    start = [
        f"publish {first} of group 7",
        *[f"record {first} as v{first}"] * (first > 0),
        "evaluate",
        f"train {first}",
    ]
    assert scene.log[: len(start)] == start
    assert scene.steps("train") == scene.steps("report") == list(range(first, 5))


@pytest.mark.parametrize(("num_steps", "trained"), [(20, range(6, 10)), (30, range(6, 16))])
def test_a_killed_run_trains_again_from_its_checkpoint_whose_losses_count_unless_the_run_is_extended(
    tmp_path: Path, num_steps: int, trained: range
) -> None:
    killed = Scene(output=tmp_path, num_steps=20, checkpoint_every=3, stop_loss=0.5, dies_in=8)
    with pytest.raises(Killed):
        killed.run()
    assert killed.steps("report") == list(range(7))
    scene = Scene(output=tmp_path, num_steps=num_steps, checkpoint_every=3, stop_loss=0.5).run()
    assert scene.steps("train") == scene.steps("report") == list(trained)
    last, after = trained[-1], trained.stop
    assert scene.log[-4:] == [f"report {last} last", f"save {after}", f"record {after} as v{after}", "export policy"]


@pytest.mark.parametrize(
    ("step", "num_steps", "losses", "has_engines"),
    [(5, 5, [], False), (5, 5, [], True), (7, 5, [], False), (12, 20, [0.1] * 10, False)],
    ids=["ended", "ended with engines", "longer than the config", "target met"],
)
def test_a_run_that_had_ended_trains_no_step(
    tmp_path: Path, step: int, num_steps: int, losses: list[float], has_engines: bool
) -> None:
    write_checkpoint(tmp_path, step, num_steps=max(step, num_steps), losses=losses)
    scene = Scene(output=tmp_path, num_steps=num_steps, stop_loss=0.5, has_engines=has_engines).run()
    comparison = ["compare 5", "report 5 last"] if has_engines else []
    assert scene.log == [f"publish {step} of group 7", f"record {step} as v{step}", *comparison, "export policy"]


@pytest.mark.parametrize(
    ("first", "every", "stops_before", "failing", "saved"),
    [
        (0, 2, 0, [], []),
        (2, 2, 2, [], []),
        (0, 2, 3, [], [2, 3]),
        (0, 3, 3, [], [3]),
        (2, 0, 3, [], [3]),
        (0, 3, 3, [3], [3]),
    ],
)
def test_a_stop_writes_a_checkpoint_if_steps_were_trained_since_the_last_one(
    tmp_path: Path, first: int, every: int, stops_before: int, failing: list[int], saved: list[int]
) -> None:
    failures: dict[int, Exception] = dict.fromkeys(failing, FULL_DISK)
    scene = Scene(
        output=tmp_path, first_step=first, checkpoint_every=every, stops_before=stops_before, failures=failures
    )
    scene.run()
    assert scene.steps("save") == saved
    assert scene.steps("train") == scene.steps("report") == list(range(first, stops_before))
    assert "export policy" not in scene.log
    newest = latest(tmp_path / run_files.CHECKPOINTS)
    assert newest is None or read_extra(newest).extra["resume"] == {"position": stops_before}


@pytest.mark.parametrize("stops", [False, True])
def test_with_engines_a_run_ends_with_a_comparison_unless_it_is_stopped(tmp_path: Path, stops: bool) -> None:
    scene = Scene(output=tmp_path, has_engines=True, stops_before=5 if stops else math.inf).run()
    end = [] if stops else ["compare 5", "report 5 last", "export policy"]
    assert scene.log[scene.log.index("report 4") :] == ["report 4", "save 5", "record 5 as v5", *end]
    assert "evaluate" not in scene.log, "the engines evaluate"


@pytest.mark.parametrize(
    ("first", "publish_every", "evaluate_every", "published", "evaluated"),
    [
        (0, 2, 2, [0, 2, 4, 5], {0: [0], 1: [2], 3: [4], 4: [5]}),
        (0, 3, 0, [0, 3, 5], {0: [0], 4: [5]}),
        (3, 2, 2, [3, 4, 5], {3: [3, 4], 4: [5]}),
        (1, 3, 0, [1, 3, 5], {1: [1], 4: [5]}),
    ],
)
def test_the_versions_that_are_due_are_published_and_their_evaluations_reported_with_their_step(
    tmp_path: Path,
    first: int,
    publish_every: int,
    evaluate_every: int,
    published: list[int],
    evaluated: dict[int, list[int]],
) -> None:
    scene = Scene(output=tmp_path, first_step=first, publish_every=publish_every, evaluate_every=evaluate_every).run()
    assert scene.steps("publish") == published
    assert scene.evaluated == evaluated


@pytest.mark.parametrize("error", [FULL_DISK, RunError("the replay actor is gone")], ids=["disk", "ledger"])
@pytest.mark.parametrize(("step", "other"), [(2, 4), (4, 2)])
def test_a_checkpoint_that_cannot_be_written_is_reported_and_the_run_goes_on(
    tmp_path: Path, step: int, other: int, error: Exception
) -> None:
    scene = Scene(output=tmp_path, num_steps=4, failures={step: error}).run()
    lost = f"the checkpoint after step {step} can't be written, the last complete one is kept: {error}"
    assert scene.notes == [NOTE, lost]
    assert scene.steps("save") == scene.steps("record") == [other]
    assert scene.steps("report") == [0, 1, 2, 3]
    assert scene.log[-1] == "export policy"


def test_other_ranks_train_publish_and_save_alike_but_neither_report_nor_record(tmp_path: Path) -> None:
    first, other = (
        Scene(output=tmp_path / str(rank), rank=rank, first_step=2, failures={4: FULL_DISK}).run() for rank in (0, 1)
    )
    alike = [entry for entry in first.log if not entry.startswith(("report", "record"))]
    assert other.log == [entry.replace("of group 7", "of group 0") for entry in alike]
    assert not other.notes


@pytest.mark.parametrize(("error", "ends_run"), [(DataError("no rows"), True), (ValueError("a bug"), False)])
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_error_of_rlpipe_ends_the_run_and_any_other_restarts_the_learner(
    monkeypatch: pytest.MonkeyPatch, error: Exception, ends_run: bool, is_remote: bool
) -> None:
    def run() -> None:
        raise RayTaskError("next_batch", "", error) if is_remote else error

    ended: list[Exception] = []
    monkeypatch.setattr(learner, "LearnerLoop", lambda setup: SimpleNamespace(run=run))
    setup: Any = SimpleNamespace(batches=Handle(SimpleNamespace(fail=ended.append)), call_timeout_s=1.0)
    with nullcontext() if ends_run else pytest.raises((ValueError, RayTaskError)):
        run_rank(setup)
    assert ended == [error] * ends_run
