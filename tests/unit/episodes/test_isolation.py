"""Tests of environments and tools in processes of their own: what hangs, dies or floods costs nothing else."""

from __future__ import annotations

import asyncio
import itertools
import os
import textwrap
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.isolated_host import HostSetup
from rlpipe.episodes.isolation import Isolation, MethodRaised, ProcessEnded, isolate
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.episodes.tools import Environment, Step, Toolbox, ToolCall
from rlpipe.errors import ConfigError
from rlpipe.scoring.sandbox.confinement import find_obstacle

SOURCE = """
import asyncio, os, pathlib, signal, socket, subprocess, sys, time
import numpy
import rlpipe

async def later():
    await asyncio.sleep(0)
    return rlpipe.Step("later")

class Counter(rlpipe.Environment):
    plays = 0

    def __init__(self, start=0):
        self.count = start

    async def reset(self, row, seed):
        await asyncio.sleep(0)
        self.row = row
        Counter.plays += 1
        return [{"role": "user", "content": f"{row['word']} {seed} {os.getpid()} {Counter.plays}"}]

    def step(self, action):
        if action == "raise":
            raise ValueError("no such action")
        if action == "hang":
            time.sleep(1000)
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            sys.exit("enough")
        if action == "children":
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        if action == "flood":
            return rlpipe.Step("x" * 2**25)
        if action == "tuple":
            return "so", 1.0, True
        if action == "odd":
            return rlpipe.Step([{("a", 1): 0.5}])
        if action == "write":
            pathlib.Path(self.row["file"]).write_text("x")
        if action == "connect":
            socket.create_connection(("127.0.0.1", 9), 0.1)
        if action == "later":
            return asyncio.ensure_future(later())
        if action == "numpy":
            return rlpipe.Step("so", reward=numpy.float32(0.25), done=numpy.bool_(False))
        self.count += 1
        return rlpipe.Step(str(self.count), reward=0.5 * self.count, done=self.count == 3)

    @rlpipe.tool
    async def add(self, amount: int) -> rlpipe.Step:
        "Add to the count."
        self.count += amount
        return rlpipe.Step(f"now {self.count}", reward=0.1)

    @rlpipe.tool
    def flood(self) -> rlpipe.Step:
        "Return a lot."
        return rlpipe.Step("x" * 2**25, reward=0.5)

    @rlpipe.tool
    def look(self) -> dict:
        "Look."
        return {"count": self.count}

    def final_reward(self):
        return numpy.int64(7)

def double(number: int) -> int:
    "Double a number."
    return 2 * number

def stuck() -> str:
    "Hang."
    time.sleep(1000)

def spawn() -> str:
    "Leave a process behind."
    return str(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True).pid)

def risky(code: str) -> str:
    "Run code."
    return str(eval(code))
risky.needs_sandbox = True
"""
ISOLATIONS = [
    "process",
    pytest.param("sandbox", marks=pytest.mark.skipif(find_obstacle() is not None, reason="no sandbox here")),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "own.py"
    file.write_text(textwrap.dedent(SOURCE))
    return file


@pytest.fixture(params=ISOLATIONS)
def kind(file: Path, request: pytest.FixtureRequest) -> Iterator[EpisodeKind]:
    config = EnvironmentConfig(
        path=f"{file}:Counter",
        kwargs={"start": 0},
        tools=[f"{file}:{name}" for name in ("double", "stuck", "spawn")],
        isolation=request.param,
        timeout_s=20,
    )
    found = isolate(import_kind(config), config)
    yield found
    found.make.__self__.close()  # type: ignore[attr-defined]
    wait_for(lambda: not own_processes())


def own_processes() -> list[str]:
    """Return the command lines of this process's descendants."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found.append(" ".join(child.cmdline()))
    return [line for line in found if line and "resource_tracker" not in line]


def is_quiet(kind: EpisodeKind) -> bool:
    """Return whether there are no processes but the host and those that wait for an episode or call, two for each."""
    idle = sum(map(len, kind.make.__self__._idle.values()))  # type: ignore[attr-defined]
    return len(own_processes()) == 1 + 2 * idle


def wait_for(condition: Any, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, own_processes()
        time.sleep(0.02)


@pytest.mark.covering(0)
def test_an_environment_plays_as_it_does_here(kind: EpisodeKind) -> None:
    async def play() -> None:
        environments = [kind.make(), kind.make()]
        firsts = [await environment.reset({"word": "go"}, 3) for environment in environments]  # type: ignore[misc]
        words = [first[0]["content"].split() for first in firsts]
        assert [own[:2] for own in words] == [["go", "3"]] * 2
        assert os.getpid() not in {int(own[2]) for own in words}
        first, second = environments
        assert await first.step("a") == Step("1", reward=0.5)  # type: ignore[misc]
        assert await second.step("a") == Step("1", reward=0.5)  # type: ignore[misc]
        tools = {tool.name: tool for tool in first.tools()}
        assert list(tools) == ["add", "flood", "look"]
        assert tools["add"].schema["function"]["parameters"]["properties"] == {"amount": {"type": "integer"}}
        assert await tools["add"].call({"amount": 1}) == Step("now 2", reward=0.1)
        assert await tools["look"].call({}) == '{"count": 2}'
        found = await first.step("numpy")  # type: ignore[misc]
        assert (found.reward, found.done) == (0.25, False)
        assert await first.step("b") == Step("3", reward=1.5, done=True)  # type: ignore[misc]
        assert await first.final_reward() == 7.0  # type: ignore[misc]
        for environment in environments:
            await environment.close()  # type: ignore[misc]

    asyncio.run(play())
    wait_for(lambda: is_quiet(kind))


def test_a_process_serves_one_episode_after_the_other_outside_of_a_sandbox(file: Path) -> None:
    for isolation, count in [("process", 4), ("sandbox", 1)] if find_obstacle() is None else [("process", 4)]:
        config = EnvironmentConfig(path=f"{file}:Counter", tools=[f"{file}:double"], isolation=isolation, timeout_s=20)
        kind = isolate(import_kind(config), config)

        async def play(kind: EpisodeKind = kind) -> set[str]:
            found = set()
            for _ in range(4):
                environment = kind.make()
                first = await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
                found.add(first[0]["content"].split()[3])
                assert (await environment.step("a")).observation == "1"  # type: ignore[misc]
                await environment.close()  # type: ignore[misc]
                assert await kind.tools[0].call({"number": 4}) == "8"
            return found

        assert len(asyncio.run(play())) == count
        kind.make.__self__.close()  # type: ignore[attr-defined]


def test_an_environment_that_can_no_longer_be_made_says_why_and_is_closed(file: Path) -> None:
    config = EnvironmentConfig(path=f"{file}:Counter", kwargs={"start": 5}, timeout_s=20)
    kind = isolate(import_kind(config), config)

    async def play() -> None:
        environment = kind.make()
        with pytest.raises(MethodRaised, match="KeyError"):
            await environment.reset({}, 3)  # type: ignore[misc]
        await environment.close()  # type: ignore[misc]
        unused = kind.make()
        await unused.close()  # type: ignore[misc]

    asyncio.run(play())
    kind.make.__self__.close()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_a_method_raises_is_reported_and_the_episode_can_continue(kind: EpisodeKind) -> None:
    async def play() -> None:
        environment = kind.make()
        await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
        with pytest.raises(MethodRaised, match="no such action"):
            await environment.step("raise")  # type: ignore[misc]
        with pytest.raises(MethodRaised, match="can't be sent as JSON: TypeError: keys must be"):
            await environment.step("odd")  # type: ignore[misc]
        assert (await environment.step("a")).observation == "1"  # type: ignore[misc]
        assert (await environment.step("later")).observation == "later"  # type: ignore[misc]
        box = Toolbox(environment.tools(), timeout_s=5)
        result = await box.call(ToolCall(id="1", name="add", arguments={"amount": "many"}))
        assert result.failure == "invalid"
        assert "amount" in result.text
        await environment.close()  # type: ignore[misc]

    asyncio.run(play())


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("action", "words"),
    [("die", "SIGKILL|ended"), ("exit", "SystemExit: enough"), ("flood", "33554"), ("hang", "too long")],
)
def test_what_ends_or_hangs_costs_its_own_episode(kind: EpisodeKind, action: str, words: str) -> None:
    async def play() -> None:
        bad, good = kind.make(), kind.make()
        for environment in (bad, good):
            await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
        began = time.monotonic()
        with pytest.raises((ProcessEnded, TimeoutError)):
            async with asyncio.timeout(1.0 if action == "hang" else 20.0):
                await bad.step(action)  # type: ignore[misc]
        assert action != "hang" or time.monotonic() - began < 3
        with pytest.raises(ProcessEnded, match=words):
            await bad.step("a")  # type: ignore[misc]
        if action == "hang":
            assert await bad.final_reward() == 0.0  # type: ignore[misc]
        else:
            # The episode fails, in place of one that was worth 0.
            with pytest.raises(ProcessEnded, match=words):
                await bad.final_reward()  # type: ignore[misc]
        await bad.close()  # type: ignore[misc]
        assert (await good.step("a")).observation == "1"  # type: ignore[misc]
        await good.close()  # type: ignore[misc]

    asyncio.run(play())
    wait_for(lambda: is_quiet(kind))


@pytest.fixture
def one_kind(file: Path) -> Iterator[EpisodeKind]:
    config = EnvironmentConfig(path=f"{file}:Counter", timeout_s=20)
    found = isolate(import_kind(config), config)
    yield found
    found.make.__self__.close()  # type: ignore[attr-defined]
    wait_for(lambda: not own_processes())


def test_a_long_result_is_cut_off_in_its_process_and_what_is_no_step_is_named(one_kind: EpisodeKind) -> None:
    async def play() -> None:
        environment = one_kind.make()
        await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
        result = await Toolbox(environment.tools(), timeout_s=10).call(ToolCall(id="1", name="flood"))
        assert (result.failure, result.reward) == (None, 0.5)
        assert result.text == "x" * 16384 + f"\n[cut off: {2**25 - 16384} more characters]"
        with pytest.raises(MethodRaised, match=r"step returned \('so', 1.0, True\): return rlpipe.Step"):
            await environment.step("tuple")  # type: ignore[misc]
        assert (await environment.step("a")).observation == "1"  # type: ignore[misc]
        await environment.close()  # type: ignore[misc]

    asyncio.run(play())


@pytest.mark.parametrize("dying", ["host", "link", "replaced"])
def test_no_episode_gets_an_idle_process_that_is_about_to_end(one_kind: EpisodeKind, dying: str) -> None:
    isolation = one_kind.make.__self__  # type: ignore[attr-defined]

    async def first_pid() -> int:
        environments = [one_kind.make(), one_kind.make()]
        firsts = [await own.reset({"word": "go"}, 3) for own in environments]  # type: ignore[misc]
        await environments[0].close()  # type: ignore[misc]
        pid = int(firsts[0][0]["content"].split()[2])
        if dying == "replaced":
            await asyncio.to_thread(isolation._replace, isolation._host)
            with suppress(ProcessEnded):
                await environments[1].close()  # type: ignore[misc]
        elif dying == "host":
            isolation._host.process.kill()
            isolation._host.process.wait()
        else:
            psutil.Process(pid).kill()
            wait_for(lambda: not psutil.pid_exists(pid))
            await asyncio.sleep(0.2)
        return pid

    async def play() -> None:
        pid = await first_pid()
        environment = one_kind.make()
        first = await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
        assert int(first[0]["content"].split()[2]) != pid
        assert len(isolation._idle.get(None, [])) == 0
        assert (await environment.step("a")).observation == "1"  # type: ignore[misc]
        await environment.close()  # type: ignore[misc]

    asyncio.run(play())


@pytest.mark.slow
def test_an_episode_ends_with_all_processes_that_it_started(kind: EpisodeKind) -> None:
    async def play() -> None:
        environment = kind.make()
        await environment.reset({"word": "go"}, 3)  # type: ignore[misc]
        await environment.step("children")  # type: ignore[misc]
        wait_for(lambda: any("sleep(1000)" in line for line in own_processes()))
        await environment.close()  # type: ignore[misc]

    asyncio.run(play())
    wait_for(lambda: is_quiet(kind))


@pytest.mark.covering(0)
def test_a_function_that_hangs_is_killed_and_others_continue(kind: EpisodeKind) -> None:
    async def play() -> None:
        box = Toolbox(kind.tools, timeout_s=1.0)
        calls = [("stuck", {}), ("double", {"number": 21}), ("spawn", {}), ("double", {"number": "x"})]
        began = time.monotonic()
        results = await asyncio.gather(
            *(box.call(ToolCall(id=str(n), name=name, arguments=given)) for n, (name, given) in enumerate(calls))
        )
        assert time.monotonic() - began < 3
        assert [own.failure for own in results] == ["timeout", None, None, "invalid"]
        assert results[1].text == "42"

    asyncio.run(play())
    wait_for(lambda: is_quiet(kind))


@pytest.mark.skipif(find_obstacle() is not None, reason="no sandbox here")
def test_a_sandboxed_environment_reaches_neither_files_nor_the_network(file: Path, tmp_path: Path) -> None:
    found = {}
    for isolation in ("process", "sandbox"):
        config = EnvironmentConfig(path=f"{file}:Counter", isolation=isolation, timeout_s=20)
        kind = isolate(import_kind(config), config)

        async def play(kind: EpisodeKind = kind) -> list[str]:
            environment, errors = kind.make(), []
            await environment.reset({"word": "go", "file": str(tmp_path / "written")}, 3)  # type: ignore[misc]
            for action in ("write", "connect"):
                try:
                    await environment.step(action)  # type: ignore[misc]
                    errors.append("")
                except MethodRaised as error:
                    errors.append(str(error))
            await environment.close()  # type: ignore[misc]
            return errors

        found[isolation] = asyncio.run(play())
        kind.make.__self__.close()  # type: ignore[attr-defined]
    assert found["process"][0] == ""
    assert "refused" in found["process"][1]
    assert all("Permission denied" in error or "not permitted" in error for error in found["sandbox"]), found


def test_what_cannot_be_isolated_is_named(file: Path) -> None:
    config = EnvironmentConfig(tools=[f"{file}:risky"])
    with pytest.raises(
        ConfigError, match=r"own\.py:risky runs code that the model wrote: set environment\.isolation=sandbox"
    ):
        import_kind(config)
    broken = file.with_name("broken.py")
    broken.write_text("import os\nif os.environ.get('OMP_NUM_THREADS') == '1': os._exit(3)\n" + SOURCE)
    config = EnvironmentConfig(path=f"{broken}:Counter")
    os.environ.pop("OMP_NUM_THREADS", None)
    with pytest.raises(ConfigError, match=r"environment\.isolation=process: its process died at 3 starts"):
        Isolation(config)


def test_while_a_dead_host_is_replaced_others_continue(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EnvironmentConfig(path=f"{file}:Counter", tools=[f"{file}:double"], timeout_s=20)
    kind = isolate(import_kind(config), config)
    isolation = kind.make.__self__  # type: ignore[attr-defined]

    def slow_setup(**setup: Any) -> HostSetup:
        time.sleep(0.3)  # on a busy machine other episodes begin before the new process has its setup
        return HostSetup(**setup)

    monkeypatch.setattr("rlpipe.episodes.isolation.HostSetup", slow_setup)

    async def play() -> None:
        folder = isolation._host.scratch.path
        isolation._host.process.kill()
        isolation._host.process.wait()
        resets = [asyncio.ensure_future(kind.make().reset({"word": "go"}, 3))]  # type: ignore[arg-type]
        longest, before = 0.0, time.monotonic()
        for tick in itertools.count():
            if resets[0].done():
                break
            if tick % 50 == 0:  # others begin at any moment of the replacement
                resets.append(asyncio.ensure_future(kind.make().reset({"word": "go"}, 3)))  # type: ignore[arg-type]
            await asyncio.sleep(0.001)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        assert {first[0]["content"].split()[0] for first in await asyncio.gather(*resets)} == {"go"}
        assert longest < 0.5, "the loop was held up while the process imported its modules"
        assert not Path(folder).exists()

    asyncio.run(play())
    isolation.close()
    wait_for(lambda: not own_processes())


NO_FORK = """
import os
from pathlib import Path

fork = os.fork

def fork_if_possible():
    if Path(__file__).with_name("full").exists():
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = fork_if_possible
"""


def test_a_process_that_cannot_be_started_costs_its_call_alone(file: Path) -> None:
    file.write_text(NO_FORK + file.read_text())
    fork = os.fork
    config = EnvironmentConfig(path=f"{file}:Counter", tools=[f"{file}:double"], timeout_s=20)
    kind = isolate(import_kind(config), config)
    isolation = kind.make.__self__  # type: ignore[attr-defined]
    full = file.with_name("full")

    async def play() -> None:
        begun = kind.make()
        await begun.reset({"word": "go"}, 3)  # type: ignore[misc]
        full.touch()
        with pytest.raises(ProcessEnded, match="no process could be started for it: Resource temporarily unavailable"):
            await kind.tools[0].call({"number": 21})
        full.unlink()
        assert await kind.tools[0].call({"number": 21}) == "42"
        assert await begun.final_reward() is not None  # type: ignore[misc]
        await begun.close()  # type: ignore[misc]

    try:
        asyncio.run(play())
    finally:
        isolation.close()
        os.fork = fork


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_the_policy_reads_the_same_of_an_error_wherever_it_was_raised(file: Path, isolation: str) -> None:
    file.write_text(file.read_text() + "\ndef lost(at: str) -> str:\n    return {}[at]\n")
    config = EnvironmentConfig(tools=[f"{file}:lost"], timeout_s=20, isolation=isolation)
    kind = isolate(import_kind(config), config)
    result = asyncio.run(Toolbox(kind.tools, timeout_s=10.0).call(ToolCall(id="1", name="lost", arguments={"at": "x"})))
    assert result.text == "Error: KeyError: 'x'"
    if isolation == "process":
        kind.tools[0].tool._isolation.close()  # type: ignore[attr-defined]


def test_calls_have_a_limited_number_of_processes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlpipe.episodes.isolation.MAX_CALLS", 1)
    config = EnvironmentConfig(tools=[f"{file}:double"], timeout_s=20, concurrency=2)
    kind = isolate(import_kind(config), config)
    box = Toolbox(kind.tools, timeout_s=10.0)

    async def play() -> None:
        calls = [ToolCall(id=str(n), name="double", arguments={"number": n}) for n in range(8)]
        results = await asyncio.gather(*(box.call(call) for call in calls))
        assert [result.text for result in results] == [str(2 * n) for n in range(8)]

    asyncio.run(play())
    isolation = kind.tools[0].tool._isolation  # type: ignore[attr-defined]
    assert len(isolation._idle["double"]) <= 2
    isolation.close()


@pytest.mark.slow
def test_an_accident_at_the_start_is_tried_again(file: Path, tmp_path: Path) -> None:
    met = tmp_path / "met"
    once = f"from pathlib import Path\nimport os\nmet = Path({str(met)!r})\n"
    once += "if os.environ.get('OMP_NUM_THREADS') == '1' and not met.exists(): met.touch(); os._exit(9)\n"
    file.write_text(once + SOURCE)
    os.environ.pop("OMP_NUM_THREADS", None)
    isolation = Isolation(EnvironmentConfig(path=f"{file}:Counter"))
    isolation.close()
    assert met.exists()


def test_in_threads_nothing_is_isolated(file: Path) -> None:
    config = EnvironmentConfig(path=f"{file}:Counter", isolation="thread")
    environment = isolate(import_kind(config), config).make()
    assert type(environment).__name__ == "Counter"
    assert isinstance(environment, Environment)


@pytest.mark.skipif(find_obstacle() is not None, reason="no sandbox here")
def test_programs_of_the_policy_run_in_a_sandbox() -> None:
    path = "rlpipe.episodes.builtin_tools:python"
    config = EnvironmentConfig(tools=[path], isolation="sandbox", memory_gb=1.0)
    kind = isolate(import_kind(config), config)
    box = Toolbox(kind.tools, timeout_s=3.0)

    async def run(code: str) -> tuple[str, str | None]:
        result = await box.call(ToolCall(id="1", name="python", arguments={"code": code}))
        return result.text, result.failure

    async def run_all() -> list[tuple[str, str | None]]:
        return [
            await run(code)
            for code in (
                "print(6 * 7)",
                "open('own', 'w').write('kept'); print(open('own').read())",
                "1 / 0",
                "import socket; socket.create_connection(('127.0.0.1', 9))",
                "print(open('/etc/hostname').read())",
                "print('x' * 10**7)",
                "while True: pass",
            )
        ]

    product, kept, failed, network, outside, flood, endless = asyncio.run(run_all())
    assert (product, kept) == (("42\n", None), ("kept\n", None))
    assert failed[0].endswith("ZeroDivisionError: division by zero\n")
    assert 'File "program.py", line 1' in failed[0]
    assert "PermissionError" in network[0]
    assert "PermissionError" in outside[0]
    assert "cut off" in flood[0]
    assert endless == ("Error: python took longer than 3 seconds", "timeout")
    kind.tools[0].tool._isolation.close()  # type: ignore[attr-defined]
    wait_for(lambda: not own_processes())
    with pytest.raises(ConfigError, match=r"set environment\.isolation=sandbox"):
        import_kind(EnvironmentConfig(tools=[path]))
