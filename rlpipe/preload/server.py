"""The preloaded processes, which import the libraries once and fork a worker for each request of ``client``.

``python -m rlpipe.preload.server FOLDER STAGE [STAGE ...]`` opens a socket for each stage in the folder. A stage is a
process forked from its parent stage, so that a worker has the imports that it needs and few others. No process starts
a thread or opens a device before it forks. All of them exit at the end of their standard input, a pipe from the process
that started the server.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlpipe.common.imports import without_collection
from rlpipe.preload.client import DEFAULT_STAGE

REQUEST_TIMEOUT_S = 10.0
BACKLOG = 128


@dataclass(frozen=True, kw_only=True)
class PreloadStage:
    """Modules that a stage's process imports in addition to its parent's.

    ``ray_modules`` are imported at the first request, because Ray reads variables such as the job's id on import.
    """

    parent: str | None
    modules: tuple[str, ...]
    ray_modules: tuple[str, ...]


STAGES = {
    DEFAULT_STAGE: PreloadStage(
        parent=None,
        modules=("pandas", "pyarrow", "pydantic", "jsonschema", "rlpipe.replay.store", "rlpipe.scoring.scorer"),
        ray_modules=("ray", "rlpipe.actors.replay", "rlpipe.actors.weights", "rlpipe.actors.reward"),
    ),
    "torch": PreloadStage(
        parent=DEFAULT_STAGE,
        modules=("torch", "transformers.models.auto.modeling_auto"),
        ray_modules=("ray.train.torch", "rlpipe.actors.trainer"),
    ),
    "learner": PreloadStage(
        parent="torch",
        modules=(
            "rlpipe.learner.step",
            "rlpipe.learner.checkpoints",
            "rlpipe.learner.checkpoints",
            "rlpipe.learner.publish",
        ),
        ray_modules=("rlpipe.actors.learner",),
    ),
    "engine": PreloadStage(
        parent="torch", modules=("rlpipe.rollout.vllm.vllm_engine",), ray_modules=("rlpipe.actors.rollout",)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Worker:
    """Worker process that Ray has requested; ``fds`` are its standard input, output and error."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: list[int]


def serve(folder: Path, stages: Sequence[str]) -> Worker:
    """Serve the stages and their parents; return only in each forked worker, with its request."""
    names = _with_parents(stages)
    listeners = {name: _listen(folder / name) for name in names}
    stage: str | None = DEFAULT_STAGE
    while stage is not None:
        with without_ray():
            _import_all(STAGES[stage].modules)
        current, stage = stage, _fork_children(stage, names)
    worker = Server(listeners.pop(current), STAGES[current].ray_modules).run()
    for listener in listeners.values():
        listener.close()
    return worker


def _with_parents(stages: Sequence[str]) -> list[str]:
    names = {DEFAULT_STAGE}
    for name in stages:
        current: str | None = name
        while current is not None:
            names.add(current)
            current = STAGES[current].parent
    return [name for name in STAGES if name in names]


def _listen(path: Path) -> socket.socket:
    """Open a stage's socket, in which requests wait until the stage has finished its imports."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(BACKLOG)
    return listener


@contextmanager
def without_ray() -> Iterator[None]:
    """Make Ray look as if it were not installed, for libraries that check for it when they are imported."""
    before = sys.modules.get("ray")
    sys.modules["ray"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["ray"]
        if before is not None:
            sys.modules["ray"] = before


@contextmanager
def without_ray_ids() -> Iterator[None]:
    """Draw the ids of actor classes, which Ray draws at their definition, by Python.

    Ray's generator of ids is seeded at its first use, and forks inherit its state. If this process used it, all workers
    forked from here would draw the same ids, also those of the objects that they put into the store: one would wait for
    ever for an object of another one's name.
    """
    actor: Any = importlib.import_module("ray.actor")
    id_class = actor.ActorClassID

    class DrawnByPython:
        @staticmethod
        def from_random() -> Any:
            return id_class(os.urandom(id_class.size()))

    actor.ActorClassID = DrawnByPython
    try:
        yield
    finally:
        actor.ActorClassID = id_class


def _import_all(modules: Sequence[str]) -> None:
    with without_collection():
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)
    gc.freeze()  # a collection in a worker would copy all pages


def _fork_children(stage: str, names: Sequence[str]) -> str | None:
    """Fork the stages whose parent is ``stage``; return the stage's name in each child, None in this process."""
    for name in names:
        if STAGES[name].parent == stage and os.fork() == 0:
            return name
    return None


class Server:
    """Process of one stage, from which the workers of one cluster are forked."""

    def __init__(self, listener: socket.socket, ray_modules: Sequence[str]) -> None:
        self._listener, self._ray_modules = listener, ray_modules
        self._cluster: dict[str, str | None] | None = None
        """Variables that all workers forked from here have in common; None before the first request."""

    def run(self) -> Worker:
        """Answer requests until standard input ends, then exit; return only in each forked worker."""
        wake_read, wake_write = socket.socketpair()
        wake_write.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            for file in (self._listener, wake_read, sys.stdin):
                selector.register(file, selectors.EVENT_READ)
            worker = None
            while worker is None:
                ready = {key.fileobj for key, _ in selector.select()}
                if wake_read in ready:
                    wake_read.recv(4096)
                    _reap()
                if sys.stdin in ready and not os.read(0, 4096):
                    os._exit(0)  # libraries would print messages at a normal exit
                if self._listener in ready:
                    worker = self._answer()
        signal.set_wakeup_fd(-1)
        for opened in (wake_read, wake_write, self._listener):
            opened.close()
        return worker

    def _answer(self) -> Worker | None:
        """Answer one client: return the worker in the forked process, None in this process."""
        connection, _ = self._listener.accept()
        with connection, suppress(OSError, ValueError):
            connection.settimeout(REQUEST_TIMEOUT_S)
            size, fds, _, _ = socket.recv_fds(connection, 4, 3)
            worker = Worker(**json.loads(_read(connection, int.from_bytes(size, "big"))), fds=fds)
            serves = self._serves(worker.environment)
            if serves and os.fork() == 0:
                return worker
            connection.sendall(b"+" if serves else b"-")
            for fd in fds:
                os.close(fd)
        return None

    def _serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether a worker is of this process's cluster and job, which the first request sets, importing Ray."""
        cluster = {name: environment.get(name) for name in ("RAY_JOB_ID", "RAY_RAYLET_PID")}
        if self._cluster is None and all(cluster.values()):
            self._cluster = cluster
            _set_environment(environment)
            with without_ray_ids():
                _import_all(self._ray_modules)
        return cluster == self._cluster


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _read(connection: socket.socket, size: int) -> bytes:
    chunks = []
    while size:
        chunk = connection.recv(size)
        if not chunk:
            raise ValueError("the client has closed its connection")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)


def become(worker: Worker) -> None:
    """Run Ray's script for worker processes, as a new interpreter would."""
    os.setpgrp()  # Ray ends the whole process group of a worker that died
    for number, fd in enumerate(worker.fds):
        os.dup2(fd, number)
        os.close(fd)
    for received in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(received, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.unfreeze)  # libraries would report all that is frozen as leaks
    _set_environment(worker.environment)
    os.chdir(worker.folder)
    _draw_seeds()
    script = worker.arguments[0]
    sys.argv, sys.path[0] = worker.arguments, os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


_base_environment = dict(os.environ)
"""Environment without the variables that libraries set when they were imported."""


def _set_environment(environment: Mapping[str, str]) -> None:
    """Set the variables of a worker, and keep those that libraries have set."""
    global _base_environment
    set_by_imports = {name: value for name, value in os.environ.items() if _base_environment.get(name) != value}
    _base_environment = dict(environment)
    os.environ.clear()
    os.environ.update(_base_environment | set_by_imports)


def _draw_seeds() -> None:
    """Seed numpy's generator, which would otherwise be the same in all forks; Python's own reseeds itself."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


if __name__ == "__main__":
    become(serve(Path(sys.argv[1]), sys.argv[2:]))
