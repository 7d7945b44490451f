"""An MCP server with state: a pad of notes. ``notes_server.py [NAME]`` speaks on stdio, with ``--port N`` on HTTP."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from mcp.server.mcpserver import Image, MCPServer
from pydantic import Field

NOTES: list[str] = []


def make(name: str) -> MCPServer:
    server = MCPServer(name)

    @server.tool()
    def note(text: str, times: int | None = Field(default=None, ge=1)) -> str:
        """Write a note."""
        NOTES.extend([text] * (times or 1))
        return f"{len(NOTES)} notes"

    @server.tool(structured_output=False)
    def read() -> list[str]:
        """Read all notes."""
        return NOTES

    @server.tool()
    def fails() -> str:
        """Raise an error."""
        raise ValueError("the pad is wet")

    @server.tool(structured_output=False)
    def picture() -> list[object]:
        """A text and a picture."""
        return ["a red dot", Image(data=b"not really", format="png")]

    @server.tool()
    def variables() -> str:
        """The names of the environment's variables, and the seed."""
        return f"{' '.join(sorted(os.environ))}; seed {os.environ.get('SEED')}"

    @server.tool()
    def wait(seconds: float) -> str:
        """Wait."""
        time.sleep(seconds)
        return "waited"

    @server.tool()
    def flood(bytes: int) -> str:
        """Answer with many bytes."""
        return "x" * bytes

    @server.tool()
    def noise(bytes: int) -> str:
        """Print what is no message."""
        print("y" * bytes, flush=True)
        return "printed"

    @server.tool()
    def leave_behind() -> str:
        """Start a process that outlives its parent, and return its number."""
        command = ["setsid", "nohup", sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env={})
        return f"{os.getpid()} {child.pid}"

    @server.tool()
    def die() -> str:
        """End the server."""
        print("out of paper", file=sys.stderr, flush=True)
        os._exit(3)

    return server


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?", default="notes")
    parser.add_argument("--port", type=int)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.port is None:
        make(arguments.name).run("stdio")
    else:
        make(arguments.name).run("streamable-http", port=arguments.port, json_response=arguments.json)
