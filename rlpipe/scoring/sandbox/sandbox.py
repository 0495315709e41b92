"""Calls of reward functions in processes of their own, with limits and no network, for code that models wrote."""

from __future__ import annotations

import json
import logging
import pickle
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlpipe.common.temporary_folders import ScratchFolder
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import ConfigError, RewardImportError
from rlpipe.scoring.processes import run_server

logger = logging.getLogger(__name__)

OVERHEAD_S = 15.0
"""Seconds beyond ``timeout_s`` that a call may take to begin, to end its processes, and to start another server."""
FROZEN_AFTER_S = 10.0
"""Seconds beyond the call's own limit after which its server, which ends late calls itself, counts as frozen.

It is below ``OVERHEAD_S``, so that the server is replaced before the caller stops waiting.
"""
START_TIMEOUT_S = 300.0
"""Seconds for the server to import the functions' modules."""
MADE_INSIDE = frozenset({"log_metric", "log_extra"})
"""Arguments that are created in the call's own process."""
MAX_REASON_CHARS = 400
MAX_SHOWN_BYTES = 60


class SandboxFailed(Exception):
    """Raised when a sandboxed call has no scores; the message is the whole reason.

    ``is_crash`` is set if the call's process ended, or was ended, without an answer of the function.
    """

    def __init__(self, reason: str, *, is_crash: bool = False) -> None:
        super().__init__(reason)
        self.is_crash = is_crash


@dataclass(kw_only=True, slots=True)
class Answer:
    """Values that a call returned, and metrics that it gave to ``log_metric``."""

    values: list[Any]
    logged: list[tuple[str, float]]


class Sandbox:
    """Functions of some rewards, called in fresh processes, one at a time.

    Raises ``ConfigError`` if the machine can't confine a process.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig]) -> None:
        self._rewards = dict(rewards)
        self._start()

    def call(self, name: str, arguments: Mapping[str, Any], num_values: int, timeout_s: float | None = None) -> Answer:
        """Call a reward's function and return its values, as unchecked JSON; raise ``SandboxFailed`` on failure.

        The call may take ``timeout_s`` seconds, if given, and never more than the reward's own ``timeout_s``.
        """
        if self._connection.closed:
            self._start()
        call_arguments = {key: None if key in MADE_INSIDE else value for key, value in arguments.items()}
        job = pickle.dumps((num_values, call_arguments), protocol=pickle.HIGHEST_PROTOCOL)
        limit_s = self._rewards[name].timeout_s
        limit_s = (limit_s if timeout_s is None else min(limit_s, timeout_s)) + FROZEN_AFTER_S
        try:
            with self._killed_after(limit_s):
                self._connection.send_bytes(json.dumps([name, timeout_s]).encode())
                self._connection.send_bytes(job)
                reason = json.loads(self._connection.recv_bytes())
                answer = self._connection.recv_bytes()
        except (EOFError, ConnectionError):
            self.close()
            raise SandboxFailed("the server of its sandbox died; the next call starts another") from None
        except BaseException:  # the rest of this exchange would be taken for the next call's
            self.close()
            raise
        if reason is not None:
            raise SandboxFailed(reason, is_crash=True)
        return read_answer(answer)

    def close(self) -> None:
        """End the server and what it runs."""
        self._connection.close()
        try:
            self._server.wait(FROZEN_AFTER_S)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()  # nothing outlives SIGKILL
        self._folder.close()

    @contextmanager
    def _killed_after(self, limit_s: float) -> Iterator[None]:
        """Kill the server if the block takes longer: reads and writes of the connection have no limits of their own."""
        alarm = threading.Timer(limit_s, self._server.kill)
        alarm.daemon = True
        alarm.start()
        try:
            yield
        finally:
            alarm.cancel()

    def _start(self) -> None:
        self._folder = ScratchFolder("rlpipe-sandbox-")
        self._server, parent_end = run_server("rlpipe.scoring.sandbox.sandbox_server", self._folder.path)
        self._connection = Connection(parent_end.detach())
        try:
            with self._killed_after(START_TIMEOUT_S):
                self._connection.send_bytes(pickle.dumps(self._rewards))
                report = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            report = {
                "wrong": "the server of the sandbox died at its start, or did not import the functions within "
                f"{START_TIMEOUT_S:g} seconds; its output says why"
            }
        except BaseException:
            self.close()
            raise
        names = ", ".join(self._rewards)
        if "obstacle" in report:
            self.close()
            raise ConfigError(
                f"isolation=sandbox of {names} can't be used on this machine: {report['obstacle']}; set process"
            )
        if "wrong" in report:
            self.close()
            raise RewardImportError(f"isolation=sandbox of {names}: {report['wrong']}")
        logger.info("the programs that %s start are confined by %s", names, report["confinement"])
        if report["num_threads"] > 1:
            logger.warning(
                "the modules of %s start %d threads when they are imported; forks of such a process may hang",
                names,
                report["num_threads"] - 1,
            )


def read_answer(written: bytes) -> Answer:
    """Parse what the call's process wrote, which may be anything; raise ``SandboxFailed`` unless it has values."""
    try:
        answer = json.loads(written)
    except (ValueError, RecursionError):
        answer = None
    match answer:
        case {"failure": str(reason)}:
            raise SandboxFailed(" ".join(reason.split())[:MAX_REASON_CHARS])
        case {"values": list(values), "logged": list(logged)} if all(map(_is_metric, logged)):
            return Answer(values=values, logged=[(name, float(value)) for name, value in logged])
    raise SandboxFailed(f"its sandboxed process wrote no answer, but {written[:MAX_SHOWN_BYTES]!r}", is_crash=True)


def _is_metric(entry: Any) -> bool:
    match entry:
        case [str(), float()]:
            return True
    return False
