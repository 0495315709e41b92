"""Tests of runs that train on environments of other frameworks: servers of verifiers, OpenEnv and NeMo Gym, and TRL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal
from framework_servers import framework_server
from gym_servers import TOOL, GymServers
from run_cases import HOLDS_LOGP_TO, free_ports, make_config, trained_steps
from signal_cases import assert_accounts_add_up

import rlpipe

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STEPS, GROUPS_PER_STEP = 3, 4
FILE = Path(__file__).parents[1] / "helpers" / "environment_cases.py"
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


@pytest.mark.usefixtures("local_ray")
def test_episodes_of_a_class_for_trl_are_trained(tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    environment = [
        f"environment.path={FILE}:Looking",
        f"environment.parser={FILE}:call_often",
        "environment.max_turns=3",
    ]
    steps = train(tiny_policy, prompts_file, tmp_path / "run", *environment, "~scoring.rewards.digits")
    assert all(step["episodes/branches"] == 1 and step["tools/look/calls"] > 0 for step in steps)
    for step in steps:
        own, other = step["tools/look/calls"], step["rewards/environment/mean"]
        assert other == pytest.approx(own + 0.5), "get_reward counts the calls, and the reward function adds a half"


@pytest.mark.usefixtures("local_ray")
def test_episodes_of_nemo_gym_are_trained(tiny_policy: Path, tmp_path: Path) -> None:
    parameters = {"input": "6 * 7?", "tools": [TOOL]}
    row = {"responses_create_params": parameters, "verifier_metadata": {"answer": "even"}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({**row, "agent_ref": {"name": "calculator"}}) + "\n") * 24)
    (port,) = free_ports(1)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(GymServers()) as servers:
        servers.policy_base_url = f"http://127.0.0.1:{port}/v1"
        options = [
            f"environment.agent={{nemo_gym: '{servers.urls['head']}'}}",
            f"environment.port={port}",
            f"environment.parser={FILE}:multiply_twice",
            "scoring.rewards={}",
            "rollout.sampling.max_tokens=64",  # the agent stops at a turn that is cut off
            f"rollout.sampling.stop_token_ids={[*range(17, 37)]}",  # letters
            "rollout.max_model_len=1000",
        ]
        steps = train(tiny_policy, rows, tmp_path / "run", *options)
    assert all(step["episodes/turns"] == 3 and step["episodes/branches"] == 1 for step in steps)
    assert any(0 < step["rewards/environment/mean"] < 1 for step in steps), "half of the answers are even"
