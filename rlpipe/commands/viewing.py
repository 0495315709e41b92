"""``rlpipe view``: a local page on runs, while they go on and afterwards."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, add_command, add_trust_argument, at_least
from rlpipe.errors import InputError

if TYPE_CHECKING:
    from rlpipe.viewer.viewed_run import ViewedRuns

EXAMPLES = """\
examples:
  rlpipe view outputs/run                        # one run
  rlpipe view outputs/first outputs/second       # two runs, overlaid
  rlpipe view outputs                            # all runs in a folder, including later ones
  rlpipe view outputs/run --export run.html      # one file to send to someone

For runs on another machine: start it there with --port 8400, run ssh -N -L 8400:127.0.0.1:8400 MACHINE here, and open
the address that it has printed.
"""
HOST = "127.0.0.1"
LAST_PORT = 65535


def add_view(commands: Commands) -> None:
    parser = add_command(commands, "view", run_view, "show runs on a local page in the browser", epilog=EXAMPLES)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="the output folder of a run, a checkpoint, a ledger, or a folder of runs"
    )
    parser.add_argument(
        "--port", type=at_least(int, 0), default=0, metavar="N", help="port of the page; default: a free one"
    )
    parser.add_argument("--export", metavar="FILE", help="write one HTML file instead of serving the page")
    add_trust_argument(parser)


def run_view(arguments: argparse.Namespace) -> None:
    from rlpipe.viewer.viewed_run import ViewedRuns

    runs = ViewedRuns([Path(run) for run in arguments.runs], trusted=arguments.trust_remote_code)
    if arguments.export is not None:
        from rlpipe.viewer.exported_page import write_page

        size, omitted = write_page(runs, Path(arguments.export))
        print(f"{arguments.export}: {size / 2**20:.1f} MiB")
        for line in omitted:
            print(f"  {line}")
        return
    with suppress(KeyboardInterrupt):  # the usual way to end it
        serve(runs, arguments.port)


def serve(runs: ViewedRuns, port: int) -> None:
    """Serve the page until the process is interrupted; raise ``InputError`` if the port is taken."""
    import uvicorn

    from rlpipe.viewer.web_app import Refresher, make_app

    if port > LAST_PORT:
        raise InputError(f"--port {port}: the last port is {LAST_PORT}")
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise InputError(
            f"--port {port} can't be used ({os.strerror(error.errno or 0)}): give another one, or 0"
        ) from None
    token = secrets.token_urlsafe(24)
    sys.setswitchinterval(0.0005)  # answers should not wait for the thread that indexes a large run
    app = make_app(runs, token)
    refresher = Refresher(runs, lambda: app.is_asked)
    refresher.start()
    print(f"http://{HOST}:{listener.getsockname()[1]}/{token}/", flush=True)
    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", ws="none", server_header=False, proxy_headers=False
    )
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        refresher.stop()
