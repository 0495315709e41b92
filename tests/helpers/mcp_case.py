"""An MCP server with a few tools, which counts its calls."""

import os
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
def hang() -> str:
    """Hang."""
    time.sleep(300)
    return ""


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\n")
    server.run()
