"""The report's section on a whole step: sampling, scoring and training, in turns or at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from rlpipe.configs.schema.root_config import Config
from rlpipe.plan.engine_plan import EnginePlan
from rlpipe.plan.learner_plan import LearnerPlan
from rlpipe.plan.scorer_plan import ScorerPlan
from rlpipe.plan.section import Section


@dataclass(kw_only=True, slots=True, frozen=True)
class Loop:
    sampling_s: float
    scoring_s: float
    """Seconds of scoring by models whose time is known."""
    training_s: float
    tokens: int
    """Tokens of a step."""
    takes_turns: bool
    """Whether nothing is sampled during training, because the run is synchronous or both share a GPU."""
    scores_after: bool
    """Whether scoring adds to sampling: it waits for all groups of a step, or shares the engines' device."""

    @property
    def generating_s(self) -> float:
        """Seconds of sampling and scoring."""
        both = (self.sampling_s, self.scoring_s)
        return sum(both) if self.scores_after else max(both)

    @property
    def seconds(self) -> float:
        """Seconds of a step in the steady state."""
        both = (self.generating_s, self.training_s)
        return sum(both) if self.takes_turns else max(both)

    @property
    def bottleneck(self) -> str:
        parts = {"training": self.training_s, "scoring": self.scoring_s, "sampling": self.sampling_s}
        if not self.takes_turns and self.training_s < self.generating_s:
            del parts["training"]
        return max(parts, key=lambda name: parts[name])


def read_loop(
    config: Config, engine: EnginePlan, learner: LearnerPlan, scorers: Sequence[ScorerPlan] = ()
) -> Loop | None:
    """Return the times of a step; None if the engine, the learner or a scorer does not fit."""
    if engine.speed is None or learner.time is None or not all(scorer.fits for scorer in scorers):
        return None
    in_turns = [scorer.seconds or 0.0 for scorer in scorers if scorer.may_share]
    apart = [scorer.seconds or 0.0 for scorer in scorers if not scorer.may_share]
    return Loop(
        sampling_s=engine.speed.seconds,
        scoring_s=max(sum(in_turns), *apart, 0.0),
        training_s=learner.time.seconds,
        tokens=learner.work.step_tokens,
        takes_turns=config.replay.max_staleness == 0 or learner.room.engines > 0,
        scores_after=not config.replay.streaming or any(_is_beside_engines(config, scorer) for scorer in scorers),
    )


def _is_beside_engines(config: Config, scorer: ScorerPlan) -> bool:
    """Return whether engine and scorer may share a GPU, or are both on the CPU."""
    parts = (config.rollout.num_gpus, scorer.setup.num_gpus)
    return parts == (0, 0) or (all(0 < part < 1 for part in parts) and sum(parts) <= 1 + 1e-9)


def loop_section(loop: Loop) -> Section:
    data = {
        **asdict(loop),
        "generating_s": loop.generating_s,
        "seconds": loop.seconds,
        "bottleneck": loop.bottleneck,
        "tokens_per_s": loop.tokens / loop.seconds,
    }
    return Section(name="step", title="a step", rows=[*_rows(loop)], data=data)


def _rows(loop: Loop) -> Iterator[tuple[str, str]]:
    how = "one after the other" if loop.takes_turns else "at the same time"
    generating = f"sampling {loop.sampling_s:.1f}"
    if loop.scoring_s:
        generating += f" {'and then' if loop.scores_after else 'beside'} scoring {loop.scoring_s:.1f}"
    yield "time", f"{loop.seconds:.1f} s: {generating}, training {loop.training_s:.1f}, {how}"
    yield "speed", f"{loop.tokens / loop.seconds:,.0f} tokens/s; bottleneck: {loop.bottleneck}"
