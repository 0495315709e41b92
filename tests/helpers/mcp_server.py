"""An MCP server with a few tools, which counts its calls."""

import os
import subprocess
import sys
import time

from mcp.server.mcpserver import MCPServer

server = MCPServer("cases")
calls = 0


@server.tool()
def count(step: int) -> str:
    """Count on."""
    global calls
    calls += step
    return f"{calls} {os.environ.get('WORD', '')}"


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("there is no such thing")


@server.tool()
def start() -> str:
    """Start a process that leaves the session."""
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], start_new_session=True, **quiet)
    note(started.pid)
    return "started"


@server.tool()
def litter() -> str:
    """Write what is no text where the server answers."""
    os.write(1, b"\xff\xfe\n")
    return "written"


@server.tool()
def hang() -> str:
    """Hang."""
    time.sleep(300)
    return ""


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


def note(pid: int) -> None:
    with open(sys.argv[1], "a") as file:
        file.write(f"{pid}\n")


if __name__ == "__main__":
    note(os.getpid())
    server.run()
