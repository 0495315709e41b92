"""Tests of runs that train on environments which servers of other frameworks have: verifiers and OpenEnv."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_servers import framework_server
from run_cases import HOLDS_LOGP_TO, make_config, trained_steps
from signal_cases import assert_accounts_add_up

import rlpipe

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STEPS, GROUPS_PER_STEP = 3, 4
OPTIONS = ("environment.num_cpus=0.1", "data.max_prompt_tokens=400", f"algorithm.num_steps={NUM_STEPS}")


def train(policy: Path, rows: Path, output: Path, *options: str) -> list[dict[str, float]]:
    """Train on a server's episodes, and return the metrics of the steps."""
    summary = rlpipe.train(make_config(policy, rows, output, *OPTIONS, *options))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(output, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    return trained_steps(output)


@pytest.mark.usefixtures("local_ray")
def test_rollouts_of_verifiers_are_trained(tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    with framework_server("verifiers", "1", home=tmp_path) as server:
        agent = f"environment.agent={{verifiers: '{server.address}'}}"
        steps = train(tiny_policy, prompts_file, tmp_path / "run", agent, "scoring.rewards={}")
    assert all(step["episodes/turns"] == step["episodes/branches"] == 1 for step in steps)
    assert all(step["rewards/environment/mean"] > 0 for step in steps), "short answers are rewarded"


@pytest.mark.usefixtures("local_ray")
def test_episodes_of_openenv_are_trained(tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    with framework_server("openenv", "text", "32", home=tmp_path) as server:
        file = tmp_path / "guess.py"
        file.write_text(f"import rlpipe\n\nGuess = rlpipe.from_openenv({server.address!r})\n")
        environment = [f"environment.path={file}:Guess", "environment.max_turns=3"]
        steps = train(tiny_policy, prompts_file, tmp_path / "run", *environment)
    assert all(step["episodes/turns"] == 3 and step["episodes/branches"] == 1 for step in steps)
    assert any(step["reward"] > 0 for step in steps), "the reward of the digits is added to the environment's"
