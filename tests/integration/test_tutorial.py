"""Every command and code block of docs/tutorial runs, in order, in an empty folder, as a reader would copy it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from run_cases import free_ports, read_jsonl, trained_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1500)]  # runs one after another

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "tutorial"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
FILES, SHOWN = ("python", "yaml", "json"), ("text", "console")
SECOND_TERMINAL = "second terminal"
MAX_S = 1000


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: a command, or a file if it has a title."""

    language: str
    title: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(*found) for found in BLOCK.findall((PAGES / page).read_text())]


class Terminal:
    """A reader's terminal in an empty folder; what one block exports is there for the next."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.output = ""
        self._environment = environment
        self.exports = folder.with_suffix(".exports")
        self.exports.touch()

    def follow(self, page: list[Block]) -> None:
        """Write the files and run the commands of a page, until one fails."""
        for block in page:
            if block.language in FILES:
                assert block.title, f"a {block.language} block without a file's name: {block.text}"
                (self.folder / block.title).write_text(block.text)
            elif block.title != SECOND_TERMINAL and block.language not in SHOWN:
                self.run(block.text)

    def run(self, text: str) -> None:
        script = f"set -e\n{text}\nexport -p > {self.exports}"
        with self.start(script, subprocess.PIPE) as process:
            try:
                output, _ = process.communicate(timeout=MAX_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # its run, too
                output, _ = process.communicate(timeout=60)
        self.output += output
        assert process.returncode == 0, f"{text}\n{self.output[-4000:]}"

    def start(self, script: str, output: int | IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"source {self.exports}\n{script}"],
            cwd=self.folder,
            env=self._environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    (folder := tmp_path / "reader").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_ADDRESS", "RAY_API"))}
    return Terminal(
        folder,
        {
            **kept,
            "PATH": f"{sysconfig.get_path('scripts')}:{kept['PATH']}",
            "PYTHONPATH": str(ROOT),
            "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        },
    )


def test_every_block_has_a_known_language() -> None:
    for page in sorted(PAGES.glob("*.md")):
        assert {block.language for block in blocks(page.name)} <= {"bash", *FILES, *SHOWN}
        assert page.read_text().count("```") == 2 * len(blocks(page.name))


def test_first_run(terminal: Terminal) -> None:
    terminal.follow(blocks("first_run.md"))
    assert len(trained_steps(terminal.folder / "outputs" / "first")) == 100
    assert "rollout 0: reward" in terminal.output
    assert (terminal.folder / "merged" / "model.safetensors").is_file()
    assert (terminal.folder / "first.html").is_file()


def test_own_reward(terminal: Terminal) -> None:
    terminal.follow(blocks("own_reward.md"))
    first, better = (trained_steps(terminal.folder / "outputs" / name) for name in ("vowels", "better"))
    assert first[-1]["rewards/vowels/mean"] > 0.8 > first[0]["rewards/vowels/mean"]
    assert better[-1]["rewards/variety/mean"] > better[0]["rewards/variety/mean"] + 0.2
    assert "logged/characters" in better[-1]
    assert "did you mean scoring.rewards.vowels.weight?" in terminal.output
    assert "exit code 2" in terminal.output


def test_own_environment(terminal: Terminal) -> None:
    terminal.follow(blocks("own_environment.md"))
    steps = trained_steps(terminal.folder / "outputs" / "escape")
    assert mean_reward(steps[-5:]) > mean_reward(steps[:5]) + 0.1
    assert "⟦" in terminal.output
    assert "group 235  " in terminal.output


def test_agents(terminal: Terminal) -> None:
    """Run the commands of the page on agents, whose program and config are an example's, with a shorter run."""
    (terminal.folder / "examples").symlink_to(ROOT / "examples")
    played, trained = [block.text for block in blocks("../agents.md") if block.language in ("console", "bash")]
    (command,) = [line.removeprefix("$ ") for line in played.splitlines() if line.startswith("$ ")]
    terminal.run(command)
    assert "row 0, sequence 0: end: done" in terminal.output
    assert "⟦" in terminal.output
    shorter = "algorithm.num_steps=3 data.held_out.every_steps=3 learner.schedule.warmup_steps=0"
    terminal.run(f"{trained.strip()} {shorter}")
    (output,) = (terminal.folder / "outputs").glob("*/metrics.jsonl")
    steps = trained_steps(output.parent)
    assert [step["episodes/branches"] for step in steps] == [1.0] * 3


def mean_reward(steps: list[dict]) -> float:
    return sum(step["reward"] for step in steps) / len(steps)


def test_cluster(terminal: Terminal) -> None:
    page = with_free_ports(blocks("cluster.md"))
    at = next(index for index, block in enumerate(page) if block.title == SECOND_TERMINAL)
    terminal.follow(page[:at])
    with second_terminal(terminal, page[at].text):
        terminal.follow(page[at + 1 :])
    assert len(trained_steps(terminal.folder / "outputs" / "digits")) == 20
    assert read_jsonl(terminal.folder / "outputs" / "digits" / "completions.jsonl")
    assert (terminal.folder / "digits.html").is_file()


def with_free_ports(page: list[Block]) -> list[Block]:
    """Return a page with other ports than Ray's usual ones, which another cluster may have."""
    port, dashboard = free_ports(2)
    return [
        Block(block.language, block.title, block.text.replace("6379", str(port)).replace("8265", str(dashboard)))
        for block in page
    ]


@contextmanager
def second_terminal(terminal: Terminal, command: str) -> Iterator[None]:
    """Run a command that stays in the foreground, and end it as Ctrl-C does."""
    client_port, agent_port = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        apart = f"--temp-dir={folder} --ray-client-server-port={client_port} --dashboard-agent-listen-port={agent_port}"
        log = terminal.folder.with_suffix(".log")
        with log.open("w") as file:
            process = terminal.start(f"exec {command.strip()} --num-cpus=4 {apart}", file)
        try:
            wait_for_head(process, log)
            yield
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def wait_for_head(process: subprocess.Popen[str], log: Path, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.2)
