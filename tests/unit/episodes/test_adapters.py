"""Tests of other libraries' environments as rlpipe's."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from framework_servers import HELPERS, FrameworkServer, framework_server
from player_cases import play

import rlpipe
from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.adapters import OpenEnvFailed, OpenEnvSession, read_action, read_fields
from rlpipe.episodes.isolation import isolate
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.errors import ConfigError
from rlpipe.types import RolloutGroup

LEFT, DOWN, RIGHT, UP = "0", "1", "2", "3"
MAP = ["SF", "HG"]


def kind(made: type[rlpipe.Environment]) -> EpisodeKind:
    return EpisodeKind(make=made, tools=[], has_reward=True)


def test_a_gymnasium_environment_is_played_by_its_actions() -> None:
    lake = rlpipe.from_gymnasium("FrozenLake-v1", render_mode="ansi", is_slippery=False)
    row = {"make": {"desc": MAP}, "seed": 5}
    group, _ = play([RIGHT, "jump", "9", DOWN], [DOWN], kind=kind(lake), row=row)
    first, second = (rollout.episode for rollout in group)
    assert first is not None
    assert second is not None
    assert (first.reward, first.end, second.reward, second.end) == (1.0, "done", 0.0, "done")
    assert "\x1b[41mS\x1b[0m" in group.prompt.prompt[-1]["content"]  # type: ignore[index]
    answers = [message["content"] for message in first.messages if message["role"] == "user"]
    assert "(Right)" in answers[0]
    assert answers[1:] == [
        "'jump' is not an action; actions are Discrete(4)",
        "'9' is not an action; actions are Discrete(4)",
    ]


def test_columns_that_a_row_leaves_empty_are_not_given() -> None:
    class Lake(rlpipe.from_gymnasium("FrozenLake-v1", render_mode="ansi", desc=MAP, is_slippery=False)):  # type: ignore[misc]
        def reset(self, row: Any, seed: int) -> str:
            shown = super().reset(row, seed)
            assert self.env.np_random_seed == seed
            return str(shown)

    group, _ = play([DOWN], [DOWN], kind=kind(Lake), row={"make": None, "seed": None})
    assert [rollout.episode is not None and rollout.episode.end for rollout in group] == ["done", "done"]


def test_without_gymnasium_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r"gymnasium is not installed: pip install 'rlpipe\[gymnasium\]'"):
        rlpipe.from_gymnasium("FrozenLake-v1")


def test_actions_and_observations_may_be_shown_in_other_words() -> None:
    words = {"left": 0, "right": 1}
    pole = rlpipe.from_gymnasium(
        "CartPole-v1", show=lambda env, seen: f"{len(seen)} numbers", read=lambda text, space: words[text]
    )
    group, _ = play(["left"] * 5, ["right"] * 5, kind=kind(pole), row={})
    assert group.prompt.prompt[-1]["content"] == "4 numbers"  # type: ignore[index]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [5.0, 5.0]


def test_actions_of_other_spaces_are_json() -> None:
    from gymnasium import spaces

    box = spaces.Box(-1, 1, (2,))
    assert read_action("[0.5, -1]", box).tolist() == [0.5, -1.0]
    assert read_action("look", spaces.Text(10)) == "look"
    parts = spaces.Dict({"to": box, "how": spaces.Tuple((spaces.Discrete(3), spaces.Text(4)))})
    found = read_action('{"to": [1, 0], "how": [2, "fast"]}', parts)
    assert (found["to"].tolist(), found["how"]) == ([1.0, 0.0], (2, "fast"))
    for text in ('{"to": [1, 0]}', '{"to": [1, 0], "how": [3, "fast"]}', '{"to": [1, 0], "how": [2]}', "[1, 2]", "4"):
        with pytest.raises(ValueError, match="is not an action"):
            read_action(text, parts)
    for text in ("[2, 0]", "[0]", "x", "[" * 9999, '{"a": 1}'):
        with pytest.raises(ValueError, match="is not an action"):
            read_action(text, box)
    with pytest.raises(ValueError, match="is not an action"):
        read_action("[300]", spaces.Box(-128, 127, (1,), "int8"))


class Counter:
    """An environment as TRL's trainer takes it."""

    def reset(self, **row: Any) -> str:
        self.count = int(row["number"])
        return f" Start: {self.count}"

    def add(self, amount: int) -> int:
        """Add to the count.

        Args:
            amount: how much
        """
        self.count += amount
        return self.count

    def _hidden(self) -> None:
        pass

    async def get_reward(self) -> float:
        return float(self.count)


def test_a_class_for_trl_has_its_methods_as_tools_and_its_own_reward() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"amount": 5}}</tool_call>'
    row = {"number": 20, "prompt": [{"role": "user", "content": "Count."}]}
    group, _ = play([call, "done"], [call] * 5, kind=kind(rlpipe.from_trl(Counter)), row=row)
    assert group.prompt.prompt[-1]["content"] == "Count. Start: 20"  # type: ignore[index]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [25.0, 45.0]
    assert [rollout.finish_reason for rollout in group] == ["done", "max_turns"], "a truncated one has its reward, too"
    assert group.logged["tools/add/calls"] == 3.0
    with pytest.raises(ConfigError, match="has no method reset"):
        rlpipe.from_trl(dict)


class Silent:
    def reset(self, **row: Any) -> None:
        pass


def test_the_prompt_of_a_class_for_trl_may_be_in_another_column() -> None:
    row = {"question": "Count."}
    group, _ = play(["1"], ["2"], kind=kind(rlpipe.from_trl(Silent, prompt_column="question")), row=row)
    assert group.prompt.prompt[-1]["content"] == "Count."  # type: ignore[index]
    group, _ = play(["1"], ["2"], kind=kind(rlpipe.from_trl(Silent)), row=row)
    assert group.failure is not None
    assert "the row has no text in 'prompt', and reset returned none: set prompt_column" in group.failure


PARTS = [{"type": "text", "text": "Count."}]


def test_a_prompt_of_parts_gets_the_text_of_a_class_for_trl() -> None:
    row: dict[str, Any] = {"number": 20, "prompt": [{"role": "user", "content": PARTS}]}
    found = asyncio.run(rlpipe.from_trl(Counter)().reset(row, 0))  # type: ignore[arg-type]
    assert found == [{"role": "user", "content": [*PARTS, {"type": "text", "text": " Start: 20"}]}]


class Listing:
    def reset(self, **row: Any) -> list[int]:
        return [4]


@pytest.mark.parametrize(
    ("factory", "prompt", "says"),
    [(Listing, "Count.", r"reset returned \[4\].*: return a text or None"), (Counter, [4], "the row's 'prompt' is")],
)
def test_what_is_no_prompt_or_text_of_a_class_for_trl_is_named(factory: Any, prompt: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        asyncio.run(rlpipe.from_trl(factory)().reset({"number": 20, "prompt": prompt}, 0))  # type: ignore[arg-type]


def reaches(environments: list[Counter], goal: list[int], **_: Any) -> list[float | None]:
    return [1.0 if environment.count >= most else None for environment, most in zip(environments, goal, strict=True)]


async def costs(environments: list[Counter], prompts: list[Any], completions: object = None, **_: Any) -> list[float]:
    assert prompts == [[{"role": "user", "content": "Count."}]]
    assert completions is None
    return [-0.5 for _ in environments]


def test_rewards_of_trl_that_read_environments_count() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"amount": 5}}</tool_call>'
    row = {"number": 20, "goal": 25, "prompt": [{"role": "user", "content": "Count."}]}
    own = rlpipe.from_trl(Counter, rewards=[reaches, costs])
    group, _ = play([call, "done"], ["done"], kind=kind(own), row=row)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [25.5, 19.5]


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completions, environments: [0.0], "needs completions, which environments don't have"),
        (lambda prompts, **columns: [0.0], "takes no environments: put it under scoring.rewards"),
    ],
)
def test_rewards_of_trl_that_read_no_environments_are_refused(function: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rlpipe.from_trl(Counter, rewards=function)


ROW = {"reset": {"number": 7}, "seed": 3}


@pytest.fixture(scope="module")
def text_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrameworkServer]:
    with framework_server("openenv", "text", "4", home=tmp_path_factory.mktemp("home")) as running:
        yield running


@pytest.fixture(scope="module")
def board_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrameworkServer]:
    with framework_server("openenv", "board", "4", home=tmp_path_factory.mktemp("home")) as running:
        yield running


def openenv_kind(server: Any, **options: Any) -> EpisodeKind:
    return EpisodeKind(make=rlpipe.from_openenv(server, **options), tools=[], has_reward=True)


def answers(group: RolloutGroup, index: int = 0) -> list[str]:
    episode = group.rollouts[index].episode
    assert episode is not None
    return [message["content"] for message in episode.messages if message["role"] == "user"]


def test_an_environment_of_texts_is_played_as_it_is(text_server: FrameworkServer) -> None:
    group, _ = play(["8", "7"], ["7"], kind=openenv_kind(text_server.address), row=ROW)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]
    assert [rollout.episode.end for rollout in group if rollout.episode] == ["done", "done"]
    assert str(group.prompt.prompt[-1]["content"]).startswith("1-32? (seed 3, open ")  # type: ignore[index]
    assert answers(group) == ["wrong"]


def test_each_episode_has_a_session_of_its_own_and_gives_it_back(text_server: FrameworkServer) -> None:
    for _ in range(3):
        group, _ = play(*[["7"]] * 4, kind=openenv_kind(text_server.address), row=ROW)
        assert group.failure is None, "the server takes four sessions at one time"
        opened = str(group.prompt.prompt[-1]["content"])  # type: ignore[index]
        assert int(opened.split("open ")[1][0]) <= 4


@pytest.mark.parametrize("row", [{"question": 1}, {"question": 1, "seed": None}])
def test_the_siblings_of_a_group_have_its_seed(text_server: FrameworkServer, row: dict[str, Any]) -> None:
    group, _ = play(["20"], ["20"], kind=openenv_kind(text_server.address), row=row)
    assert "(seed 0, " in str(group.prompt.prompt[-1]["content"])  # type: ignore[index]
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]


@pytest.mark.slow
def test_other_actions_and_observations_are_json(board_server: FrameworkServer) -> None:
    said = ["7", '{"number": "many"}', '{"number": 8}', '{"number": 7, "is_last": true}']
    group, _ = play(said, ['{"number": 7}'], kind=openenv_kind(board_server.address), row=ROW)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]
    first, second, third = answers(group)
    assert first == "'7' is not an action; actions are JSON objects with the fields number (integer), is_last (boolean)"
    assert second.startswith('\'{"number": "many"}\' is not an action: number: Input should be a valid integer')
    assert json.loads(third) == {"hint": "wrong", "left": 4}


@pytest.mark.slow
def test_actions_and_observations_of_openenv_may_be_shown_in_other_words(board_server: FrameworkServer) -> None:
    options = {"show": lambda seen: f"{seen['left']} left", "read": lambda text: {"number": {"seven": 7}[text]}}
    group, _ = play(["seven"], ["seven"], kind=openenv_kind(board_server.address, **options), row=ROW)
    assert group.failure is None
    assert group.prompt.prompt[-1]["content"] == "5 left"  # type: ignore[index]


def test_it_plays_in_a_process_of_its_own(text_server: FrameworkServer, tmp_path: Path) -> None:
    file = tmp_path / "made.py"
    file.write_text(f"import rlpipe\n\nGuess = rlpipe.from_openenv({text_server.address!r})\n")
    config = EnvironmentConfig(path=f"{file}:Guess")
    group, _ = play(["8", "7"], ["7"], kind=isolate(import_kind(config), config), row=ROW)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]


def test_an_environment_that_fails_fails_its_episode(text_server: FrameworkServer) -> None:
    group, _ = play(["break"], ["break"], kind=openenv_kind(text_server.address), row=ROW)
    assert f"OpenEnv at {text_server.address}: the board is gone (EXECUTION_ERROR)" in str(group.failure)


@pytest.mark.slow
def test_a_server_without_room_is_named(tmp_path: Path) -> None:
    with framework_server("openenv", "text", "1", home=tmp_path) as small:
        group, _ = play(["8", "7"], ["8", "7"], kind=openenv_kind(small.address), row=ROW)
    assert "raise max_concurrent_envs there, or lower environment.concurrency" in str(group.failure)


def test_a_server_that_ends_is_named(tmp_path: Path) -> None:
    with framework_server("openenv", "text", "4", home=tmp_path) as ending:
        group, _ = play(["exit"], ["exit"], kind=openenv_kind(ending.address), row=ROW)
        # The server may have ended before the other episode began.
        broke = f"OpenEnv at {ending.address}: the connection broke before it answered to (step|reset)"
        assert re.search(broke, str(group.failure))
        ending.process.wait(10)
        group, _ = play(["7"], ["7"], kind=openenv_kind(ending.address), row=ROW)
        assert f"OpenEnv at {ending.address}: it gives no schema of its actions" in str(group.failure)
        group, _ = play(["7"], ["7"], kind=openenv_kind(ending.address, read=json.loads), row=ROW)
        assert f"OpenEnv at {ending.address}: it can't be reached" in str(group.failure)


@pytest.mark.slow
def test_a_client_of_openenv_plays_too(text_server: FrameworkServer, tmp_path: Path) -> None:
    path = f"{Path(sys.prefix) / 'openenv'}:{Path(rlpipe.__file__).parents[1]}"
    played = subprocess.run(
        [sys.executable, str(HELPERS / "openenv_client.py"), text_server.address],
        env={**os.environ, "PYTHONPATH": path, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    shown = json.loads(played.stdout)
    opening, wrong, refused, right = shown["generic"]
    assert opening.startswith("1-32? (seed 3, ")
    assert wrong == ["'7' is not an action; actions are JSON objects", 0.0, False]
    assert "is not an action: " in refused[0]
    assert "(code: VALIDATION_ERROR)" in refused[0]
    assert right == ["right", 1.0, True]
    assert [*shown["own"][1:]] == [["WRONG", 0.0, False], ["RIGHT", 1.0, True]]


@pytest.mark.parametrize("server", ["127.0.0.1:8000", "", 7, None])
def test_what_is_neither_a_url_nor_a_function_is_refused(server: Any) -> None:
    with pytest.raises(ConfigError, match="from_openenv: "):
        rlpipe.from_openenv(server)


def test_an_environment_that_never_began_can_be_closed() -> None:
    environment: Any = rlpipe.from_openenv("ws://127.0.0.1:9")()
    asyncio.run(environment.close())


@pytest.mark.parametrize("text", ["x", "[" * 9999, "[1]", '"a"', ""])
def test_what_is_no_object_is_no_action(text: str) -> None:
    with pytest.raises(ValueError, match="is not an action; actions are JSON objects with the fields a "):
        read_fields(text, {"a": {"type": "integer"}, "b": {"type": "string"}}, ["a", "b"])


@asynccontextmanager
async def served_socket(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    """Yield the address, without a scheme, of a server whose ``/ws`` is answered as given."""
    app = web.Application()
    app.router.add_get("/ws", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    "answer", ["x", "[]", "{}", '{"type": "observation", "data": 3}', '{"type": "error", "data": 1}']
)
def test_what_is_no_server_of_openenv_is_named(answer: str) -> None:
    async def say(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        await socket.send_str(answer)
        return socket

    async def reset() -> None:
        async with served_socket(say) as address:
            session = OpenEnvSession(f"ws://{address}/")
            try:
                with pytest.raises(OpenEnvFailed, match="its answer to reset is not in the form of OpenEnv"):
                    await session.reset()
            finally:
                await session.close()

    asyncio.run(reset())


PINGED = """
import rlpipe
from rlpipe.episodes.adapters import OpenEnvSession


class Pinged(rlpipe.Environment):
    def __init__(self):
        self.session = OpenEnvSession(ADDRESS)

    async def reset(self, row, seed):
        return str((await self.session.reset()).observation)

    async def step(self, action):
        answer = await self.session.step({"message": action})
        return rlpipe.Step(observation=str(answer.observation), reward=answer.reward, done=answer.done)

    async def close(self):
        await self.session.close()
"""


async def serve_pinged(request: web.Request) -> web.WebSocketResponse:
    """Give up a client that does not answer a ping, as uvicorn does after 20 seconds."""
    connection = web.WebSocketResponse(heartbeat=1.5)
    await connection.prepare(request)
    async for message in connection:
        kind = json.loads(message.data)["type"]
        if kind == "close":
            break
        found = {"observation": kind, "reward": 1.0, "done": kind == "step"}
        await connection.send_json({"type": "observation", "data": found})
    return connection


@pytest.mark.covering(0)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_server_is_answered_while_the_policy_has_its_turn(isolation: str, tmp_path: Path) -> None:
    async def scenario() -> float:
        async with served_socket(serve_pinged) as address:
            (tmp_path / "pinged.py").write_text(PINGED.replace("ADDRESS", repr(f"http://{address}")))
            config = EnvironmentConfig(path=f"{tmp_path / 'pinged.py'}:Pinged", isolation=isolation)
            environment = isolate(import_kind(config), config).make()
            assert await environment.reset({}, 0) == "reset"
            await asyncio.sleep(4.0)
            step = await environment.step("x")
            await environment.close()
            return float(step.reward)

    assert asyncio.run(scenario()) == 1.0
