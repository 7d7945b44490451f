"""The guard of a server: none of the server's processes outlives it."""

import subprocess
import sys

from live_processes import dead_soon

SIGNALLED = """
import os, signal
from verl_turnkey.envs import process_tree

def signalled(root):
    process_tree._descendants = descendants
    os.kill(root, signal.SIGTERM)
    return descendants(root)

descendants, process_tree._descendants = process_tree._descendants, signalled
process_tree.serve(1000, ["sh", "-c", "setsid sleep 600 & echo $!"])
"""


def test_a_guard_that_is_asked_to_end_while_it_ends_its_children_ends_them_all() -> None:
    """As mcp's client does two seconds after it closed a server's stdin."""
    command = [sys.executable, "-c", SIGNALLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as guard:
        assert guard.stdout is not None
        child = int(guard.stdout.readline())
        assert guard.wait() == 143
        assert dead_soon(child, seconds=1)
