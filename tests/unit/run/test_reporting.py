"""The terminal messages of a run, and the order in which its metrics are reported."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.rollout_config import SamplingConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.replay.step_queue import StepReport
from rlpipe.run.reporting import Reporter, cut_notice
from rlpipe.tracking.health import HealthWatch
from rlpipe.tracking.jsonl import CompletionsLog
from rlpipe.tracking.progress import PlainProgress


def test_a_changed_distribution_is_reported_with_the_options_that_change_it() -> None:
    notice = cut_notice(SamplingConfig(top_p=0.9, top_k=20))
    assert notice is not None
    assert "(top_p, top_k)" in notice


def test_the_whole_distribution_needs_no_notice() -> None:
    assert cut_notice(SamplingConfig(temperature=0.7)) is None


def test_an_evaluation_of_the_policy_that_a_step_makes_comes_after_the_step(tmp_path: Path) -> None:
    rows: list[tuple[int, list[str]]] = []

    class Kept:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            rows.append((step, [name for name in metrics if name in ("loss", "eval/loss")]))

        def log_completions(self, table: object) -> None: ...

        def close(self, *, failed: bool = False) -> None: ...

    config, stream = Config(algorithm=AlgorithmConfig(kind="sft")), io.StringIO()
    none = CompletionsLog(tmp_path / "none.jsonl", num_groups=0, tokenizer=None, first_step=0)  # type: ignore[arg-type]
    reporter = Reporter(Kept(), PlainProgress(stream), none, none, HealthWatch(config))
    reporter.start(2, 0)
    reporter.trained(StepReport(step=0, metrics={"loss": 3.0}, evaluations={0: {"eval/loss": 3.5}}))
    reporter.trained(StepReport(step=1, metrics={"loss": 2.0}, evaluations={2: {"eval/loss": 2.5}}, last=True))
    assert rows == [(0, ["eval/loss"]), (1, ["loss"]), (2, ["loss"]), (2, ["eval/loss"])]
    first, last = (line for line in stream.getvalue().splitlines() if line.startswith("step 2/2"))
    assert "loss 2.000" in first
    assert "held-out loss 3.500 (step 0)" in first
    assert "held-out loss 2.500" in last
