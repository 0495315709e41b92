"""Rewards in a run: bad ones are survived or stop it, as their config says, and good ones run on several processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from run_cases import REWARDS_FILE, diagnosed, make_config, read_jsonl, trained_steps

import rlpipe
from rlpipe.replay.ledger.query import find_ledger, reading
from rlpipe.replay.ledger.run_ledger import GroupState

pytestmark = pytest.mark.ray

BAD_ROWS = ["sleep", "die", "raise", "nan", "short"]
REASONS = [
    "took longer than 1 seconds (timeout_s) for 1 groups",
    "died while it scored 1 groups",
    "RuntimeError: no such judge (reward_cases.py:",
    "value 0 is nan",
    "it returned 1 values for 4 completions",
]


@pytest.fixture
def prompts_with_bad_rows(tmp_path: Path) -> Path:
    rows = [{"prompt": f"say {how}", "how": how} for how in [*BAD_ROWS, *["behave"] * 15]]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_run_survives_bad_rewards_and_scores_on_several_processes(
    local_ray: None, tiny_policy: Path, prompts_with_bad_rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, seen, actors = (tmp_path / name for name in ("run", "seen", "actors"))
    seen.mkdir()
    actors.mkdir()
    rewards = {
        "misbehave": f"{{path: '{REWARDS_FILE}:misbehave', timeout_s: 1, num_processes: 1}}",
        "lenient": f"{{path: '{REWARDS_FILE}:always_raises', fail: zero}}",
        "patient": f"{{path: '{REWARDS_FILE}:patient', weight: 2}}",
        "witness": f"{{path: '{REWARDS_FILE}:witness', weight: 0, kwargs: {{folder: '{seen}'}}}}",
        "length": f"{{path: '{REWARDS_FILE}:Length', num_processes: 2, kwargs: {{folder: '{actors}'}}}}",
    }
    config = make_config(
        tiny_policy,
        prompts_with_bad_rows,
        output,
        "data.shuffle=false",
        "scoring.num_processes=2",
        "tracking.log_completions=4",
        *(f"+scoring.rewards.{name}={value}" for name, value in rewards.items()),
    )

    def handed_over(completions: list[Any], **columns: Any) -> list[float]:
        return [0.25] * len(completions)

    rlpipe.train(config, rewards=[handed_over])

    steps = trained_steps(output)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[-1]["groups/failed"] == len(BAD_ROWS)
    for row in steps:
        assert row["rewards/lenient/mean"] == 0
        assert row["rewards/patient/mean"] == 0.5
        assert row["rewards/handed_over/mean"] == 0.25
        assert 0 < row["rewards/length/mean"] <= 1
        assert row["rewards/misbehave/mean"] == 1.5  # the mean of 0, 1, 2, 3
    trained = {row["prompt_id"] for row in read_jsonl(output / "completions.jsonl")}
    assert trained == set(range(len(BAD_ROWS), len(BAD_ROWS) + 12))
    printed = capsys.readouterr().out
    for reason in REASONS:
        assert reason in printed
    assert len(list(seen.glob("*.jsonl"))) == 2
    assert len(list(actors.glob("*.setup"))) == 2
    assert len(list(actors.glob("*.scored"))) == 2


@pytest.mark.slow
def test_a_failing_reward_can_stop_the_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(
        tiny_policy,
        prompts_file,
        tmp_path,
        f"+scoring.rewards.strict={{path: '{REWARDS_FILE}:always_raises', fail: raise}}",
    )
    with pytest.raises(rlpipe.RewardFailed, match=r"^group \d+ \(row \d+\): reward 'strict' failed: ValueError: never"):
        rlpipe.train(config)


def test_a_reward_that_fails_for_every_group_stops_the_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(
        tiny_policy, prompts_file, tmp_path, f"+scoring.rewards.broken={{path: '{REWARDS_FILE}:always_raises'}}"
    )
    with pytest.raises(
        rlpipe.RewardFailed,
        match=r"^\d+ groups in a row failed, the last one with: reward 'broken' .*ValueError: never",
    ):
        rlpipe.train(config)
    assert re.search("RewardFailed: .*ValueError: never.*; fix the reward; .*--state DISCARDED", diagnosed(tmp_path))
    with reading(find_ledger(tmp_path)) as ledger:
        assert ledger.counts()[GroupState.DISCARDED] < 40
