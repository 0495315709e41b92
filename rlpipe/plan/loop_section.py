"""What a report says of a whole step: sampling and training, one after the other or at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rlpipe.configs.schema import Config
from rlpipe.plan.engine import EnginePlan
from rlpipe.plan.learner import LearnerPlan
from rlpipe.plan.section import Section


@dataclass(kw_only=True, slots=True, frozen=True)
class Loop:
    sampling_s: float
    training_s: float
    tokens: int
    """Of a step."""
    takes_turns: bool
    """Nothing is sampled while a step is trained: the run is synchronous, or both are on the same GPU."""

    @property
    def seconds(self) -> float:
        """Of a step, once the run is under way."""
        both = (self.sampling_s, self.training_s)
        return sum(both) if self.takes_turns else max(both)

    @property
    def bottleneck(self) -> str:
        return "sampling" if self.sampling_s > self.training_s else "training"


def read_loop(config: Config, engine: EnginePlan, learner: LearnerPlan) -> Loop | None:
    """None where one of them does not fit."""
    if engine.speed is None or learner.time is None:
        return None
    return Loop(
        sampling_s=engine.speed.seconds,
        training_s=learner.time.seconds,
        tokens=learner.work.step_tokens,
        takes_turns=config.replay.max_staleness == 0 or learner.room.engines > 0,
    )


def loop_section(loop: Loop) -> Section:
    data = {
        **asdict(loop),
        "seconds": loop.seconds,
        "bottleneck": loop.bottleneck,
        "tokens_per_s": loop.tokens / loop.seconds,
    }
    return Section(name="step", title="a step", rows=[*_rows(loop)], data=data)


def _rows(loop: Loop) -> Iterator[tuple[str, str]]:
    how = "one after the other" if loop.takes_turns else "at the same time"
    parts = f"sampling {loop.sampling_s:.1f}, training {loop.training_s:.1f}, {how}"
    yield "time", f"{loop.seconds:.1f} s: {parts}"
    yield "speed", f"{loop.tokens / loop.seconds:,.0f} tokens/s; bottleneck: {loop.bottleneck}"
