"""Reports of a run: metrics for the trackers, lines for the terminal, and figures for the summary."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.replay.step_queue import StepReport
from rlpipe.tracking.completion_table import CompletionTable
from rlpipe.tracking.health import HealthFinding, HealthWatch
from rlpipe.tracking.jsonl import CompletionsLog
from rlpipe.tracking.phases import PHASES
from rlpipe.tracking.progress import Progress
from rlpipe.tracking.trackers import Tracker
from rlpipe.types import RolloutGroup

logger = logging.getLogger(__name__)

MAX_REASONS_SHOWN = 5
SAMPLE_EVERY_S = 30.0
"""Shortest time between two completions that are shown, in seconds."""


def cut_notice(sampling: SamplingConfig) -> str | None:
    """Return a notice that sampling changes the policy's distribution, or None if it does not."""
    options = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    options["repetition_penalty"] = sampling.repetition_penalty != 1
    changed = [name for name, is_set in options.items() if is_set]
    if not changed:
        return None
    return (
        f"rollout.sampling changes the distribution that tokens are sampled from ({', '.join(changed)}): the engine's "
        "log-probs are those of the changed distribution, the learner's those of the original one, so they differ"
    )


class Reporter:
    """Reporter of one run; steps are counted from 1, and step n produces policy version n."""

    def __init__(
        self,
        tracker: Tracker,
        progress: Progress,
        completions: CompletionsLog,
        evaluations: CompletionsLog,
        health: HealthWatch,
    ) -> None:
        self._tracker, self._progress, self._health = tracker, progress, health
        self._completions, self._evaluations = completions, evaluations
        self.found: Callable[[HealthFinding], None] = lambda finding: progress.message(finding.message)
        """Called with what the health rules find."""
        self._total = 0
        self._sync_s = 0.0
        self._sampled = -math.inf
        self._started = self._last = time.monotonic()
        self._reasons: Counter[str] = Counter()
        self._num_tokens = 0.0
        self.max_logprob_difference = math.nan
        """Largest log-prob difference of engine and learner after the last step, when both hold the same version."""

    @property
    def tokens_per_second(self) -> float:
        """Trained tokens per second from the first admission to the last step."""
        return self._num_tokens / max(self._last - self._started, 1e-9)

    def start(self, total: int, done: int) -> None:
        PHASES.hand_over(self._progress.message)
        self._total = total
        self._progress.start(total, done)
        self.admitting()

    def admitting(self) -> None:
        """Start the clock, because the first groups are about to be admitted."""
        self._started = self._last = time.monotonic()

    def served(self, sync_s: float) -> None:
        """Note that all engines have loaded a version, ``sync_s`` seconds after its publication."""
        PHASES.end_all()
        self._sync_s = sync_s

    def trained(self, report: StepReport) -> None:
        step = report.step + 1
        for version, evaluation in report.evaluations.items():
            if version < step:  # the initial policy
                self.evaluated(version, evaluation)
        PHASES.first_step()
        now = time.monotonic()
        tokens = report.metrics.get("num_tokens", 0.0)
        metrics = {
            **report.metrics,
            "time/sync": self._sync_s,
            "time/step": now - self._last,
            "tokens_per_second": tokens / max(now - self._last, 1e-9),
        }
        self._last = now
        self._num_tokens += tokens
        self._tracker.log(step, metrics)
        self._progress.update(step, metrics)
        if rows := self._completions.log(step, report.samples):
            self._tracker.log_completions(CompletionTable.of(step, rows))
        self._check_health(step, metrics)
        if report.samples and now - self._sampled >= SAMPLE_EVERY_S:
            self._sampled = now
            self.message(self._completions.describe(report.samples[0]))
        for version, evaluation in report.evaluations.items():
            if version >= step:  # the policy that this step has made
                self.evaluated(version, evaluation)

    def evaluated(self, version: int, metrics: dict[str, float], groups: Sequence[RolloutGroup] = ()) -> None:
        """Log an evaluation, with the answers of engines, if they have given any."""
        PHASES.end("evaluating the initial policy")
        self._tracker.log(version, metrics)
        self._progress.update(version, metrics)
        self._evaluations.log(version, groups)
        self._check_health(version, metrics)

    def _check_health(self, step: int, metrics: Mapping[str, float]) -> None:
        """Pass on what the rules find; after the last step nothing is left to be stopped."""
        for finding in self._health.update({"step": step, **metrics}):
            self.found(replace(finding, stops=finding.stops and step < self._total))

    def compared(self, report: StepReport) -> None:
        self.max_logprob_difference = report.metrics.get("sampling/logp_difference/max", math.nan)

    def discarded(self, group_id: int, reason: str) -> None:
        """Log that a group will not be trained, and show the first few different reasons in the terminal."""
        self._reasons[reason] += 1
        logger.info("group %d discarded: %s", group_id, reason)
        if self._reasons[reason] == 1 and len(self._reasons) <= MAX_REASONS_SHOWN:
            self._progress.message(f"group {group_id} is not trained: {reason}")

    def message(self, text: str) -> None:
        """Show a line in the terminal."""
        self._progress.message(text)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._progress.close()
        self._tracker.close(failed=error is not None)
