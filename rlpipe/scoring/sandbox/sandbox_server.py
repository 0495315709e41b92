"""Clean, single-threaded process that forks another for every sandboxed call, watches it, and ends what it leaves."""

from __future__ import annotations

import gc
import json
import os
import pickle
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlpipe.common.temporary_folders import remove_folder
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.errors import InputError
from rlpipe.scoring.processes import MemoryLimit, lift_memory_limit
from rlpipe.scoring.rewards import load_reward
from rlpipe.scoring.sandbox.call_runner import CallRunner, raise_priority
from rlpipe.scoring.sandbox.confinement import describe_confinement, find_obstacle
from rlpipe.scoring.sandbox.namespaces import usable_namespaces
from rlpipe.scoring.sandbox.sandbox_child import Limits, leave_server, lock_in

IDLE_S = 1.0


class SandboxServer:
    """Server of one scoring process, one call at a time, until the connection closes."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection = connection
        rewards: Mapping[str, RewardConfig] = pickle.loads(connection.recv_bytes())
        self._runner = CallRunner(connection, folder)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._limits = {}
        for name, reward in rewards.items():
            self._functions[name] = function = load_reward(reward.path, reward.kwargs)
            for module in getattr(function, "imports", ()):  # that the function imports late: once, not in each call
                with suppress(ImportError):
                    import_module(module)
            memory = None if reward.memory_gb is None else MemoryLimit(option="memory_gb", gb=reward.memory_gb)
            self._limits[name] = Limits(timeout_s=reward.timeout_s, memory=memory)

    def serve(self) -> None:
        gc.collect()
        gc.freeze()
        raise_priority()
        while True:
            while not self._connection.poll(IDLE_S):
                self._runner.check_parent()
            name, timeout_s = json.loads(self._connection.recv_bytes())
            limits = self._limits[name]
            if timeout_s is not None:
                limits = replace(limits, timeout_s=min(timeout_s, limits.timeout_s))
            reason, answer = self._runner.run(self._functions[name], self._connection.recv_bytes(), limits)
            self._connection.send_bytes(json.dumps(reason).encode())
            self._connection.send_bytes(answer)


def try_confinement() -> str | None:
    """Confine a process for a try, and return why this machine can't, or None if it can."""
    if (reason := find_obstacle()) is not None:
        return reason
    usable_namespaces()  # tried once, for this process and all that it forks
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="rlpipe-sandbox-") as scratch:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                leave_server([read_end])
                lock_in(Limits(timeout_s=1, memory=None), scratch, [])
                with suppress(PermissionError):
                    socket.socket(socket.AF_INET).close()
                    os.write(write_end, b"its filter of system calls has no effect")
                status = 0
            except Exception as error:  # noqa: BLE001 - whatever it is, each call would fail in the same way
                os.write(write_end, (str(error) or repr(error)).encode())
            finally:
                os._exit(status)
        os.close(write_end)
        with open(read_end) as file:
            reason = file.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return reason or (f"a process that was confined for a try ended with exit code {code}" if code else None)


def main() -> None:
    lift_memory_limit()  # inherited from the scoring process
    connection, folder = Connection(int(sys.argv[1])), sys.argv[2]
    try:
        if (obstacle := try_confinement()) is not None:
            connection.send_bytes(json.dumps({"obstacle": obstacle}).encode())
            return
        server = SandboxServer(connection, folder)
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        report = {"num_threads": num_threads, "confinement": describe_confinement()}
        connection.send_bytes(json.dumps(report).encode())
        server.serve()
    except InputError as error:
        connection.send_bytes(json.dumps({"wrong": str(error)}).encode())
    except (EOFError, ConnectionError):
        pass  # the scoring process has ended
    finally:
        remove_folder(folder)


if __name__ == "__main__":
    main()
