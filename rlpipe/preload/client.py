"""The script that Ray runs for each worker: forks a preloaded process, or else starts the worker as usual.

It runs in place of Ray's own ``setup_worker.py`` and takes the same arguments. It imports only the standard library,
because its own start delays the start of every worker.
"""

from __future__ import annotations

import json
import os
import socket
import sys

FOLDER = "RLPIPE_PRELOAD_FOLDER"
"""Environment variable that holds the folder of the preloaded processes' sockets."""
STAGE = "RLPIPE_PRELOAD_STAGE"
"""Environment variable that holds the name of the stage that an actor's process is forked from."""
DEFAULT_STAGE = "actor"
MAX_REQUEST_BYTES = 2**20


def main(arguments: list[str]) -> None:
    context = _runtime_env(arguments)
    if context is not None:
        os.environ.update(context["env_vars"])
        if _request_fork(arguments):
            return
    _start_as_ray_does(arguments)


def _runtime_env(arguments: list[str]) -> dict[str, dict[str, str]] | None:
    """Return the variables of Ray's runtime environment, or None if it needs more, which only Ray can set up."""
    texts = [text.partition("=")[2] for text in arguments if text.startswith("--serialized-runtime-env-context=")]
    context = json.loads(texts[0]) if texts else {}
    variables = context.get("env_vars", {})
    is_plain = (
        "--language=PYTHON" in arguments
        and not context.get("command_prefix")
        and not context.get("override_worker_entrypoint")
        and context.get("py_executable", sys.executable) == sys.executable
        and not {"PYTHONPATH", "LD_PRELOAD", "LD_LIBRARY_PATH"} & variables.keys()
    )
    return {"env_vars": variables} if is_plain else None


def _request_fork(arguments: list[str]) -> bool:
    """Ask the preloaded process to fork the worker, and return whether it did."""
    path = os.path.join(os.environ.get(FOLDER, ""), os.environ.get(STAGE, DEFAULT_STAGE))
    worker = [text for text in arguments if not text.startswith(("--serialized-runtime-env-context=", "--language="))]
    request = json.dumps({"arguments": worker, "environment": dict(os.environ), "folder": os.getcwd()}).encode()
    if not os.path.isabs(path) or len(request) > MAX_REQUEST_BYTES:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(path)
            socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
            connection.sendall(request)
            return connection.recv(1) == b"+"
        except OSError:
            return False


def _start_as_ray_does(arguments: list[str]) -> None:
    from importlib.util import find_spec

    ray = find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    script = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "setup_worker.py")
    os.execv(sys.executable, [sys.executable, script, *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
