"""AppWorld (Trivedi et al. 2024, arXiv:2407.18901): everyday tasks in simulated apps, solved by writing Python.

AppWorld needs an interpreter of its own (pydantic below 2) and a server per episode (one world per process, whose clock
is frozen). This adapter talks HTTP to ``appworld serve environment`` and imports nothing of it.
"""

from __future__ import annotations

import ast
import fcntl
import os
import re
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar
from urllib.parse import urlsplit

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count
from verl_turnkey.envs.errors import EnvironmentKwargsError
from verl_turnkey.envs.http import ServerError, check_url, post_json

REWARDS = ("success", "tests")
KEY = "turnkey.env.kwargs.urls"
LEASE_SECONDS = 30.0
_PORTS = re.compile(r"(.*):(\d+)-(\d+)/*")
_FENCE = re.compile(r"```[\w+]*[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
# Beginnings of the server's answers to code that it did not run.
_FAILED = "Execution failed. Traceback:\n"
_NOT_RUN = (f"{_FAILED}Syntax error", f"{_FAILED}Usage of the following", "No code available to execute.")


class AppWorldText(TextEnv):
    """One task of AppWorld. An action is Python code, run in a shell that lives as long as the episode.

    ``apis.supervisor.complete_task(...)`` in the code ends the episode. Code may have many lines and may stand in a
    Markdown fence; use the action format ``tags``, since ``plain`` takes one line.

    Args:
        urls: servers, each an address or a range of ports such as ``http://127.0.0.1:9000-9015``. An instance takes
            one for itself, so there must be as many as episodes run at the same time on this machine
            (``turnkey.env.hosts`` times ``turnkey.env.instances_per_host`` for each agent-loop worker).
        tasks: task ids, or a text file with one per line, such as ``data/datasets/train.txt`` of AppWorld.
        reward: at the end, ``success`` gives 1 when all tests of the task pass, else 0; ``tests`` the share that pass.
        max_output: characters of a program's output that are shown; of longer ones, beginning and end.
        code_timeout: seconds a piece of code may run; keep it below ``turnkey.env.step_timeout``.
        timeout: seconds for one answer of the server.
        max_steps: steps before truncation; null: never.

    The seed chooses the task. ``success`` is AppWorld's own. ``state_key`` is the task with all the code that has run:
    AppWorld shows no other state over HTTP. Code that was not run (syntax errors, forbidden modules) is invalid.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}

    def __init__(
        self,
        urls: str | Sequence[str],
        tasks: str | Sequence[str],
        reward: str = "success",
        max_output: int = 10_000,
        code_timeout: int = 20,
        timeout: float = 100.0,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        check(is_count(max_output) and max_output >= 100, "max_output", "an integer from 100", max_output)
        check(is_count(code_timeout), "code_timeout", "a positive integer", code_timeout)
        self._urls = [url for text in ([urls] if isinstance(urls, str) else urls) for url in _expand(text)]
        self._tasks = _task_ids(tasks)
        self._only_success = reward == "success"
        self._max_output = max_output
        self._code_timeout = code_timeout
        self._timeout = timeout
        self._lease: tuple[str, IO[str]] | None = None
        self._task = ""
        self._ran: list[str] = []

    def task_ids(self) -> list[str]:
        """AppWorld's own ids."""
        return list(self._tasks)

    def begin(self, seed: int) -> tuple[StepResult, str]:
        if self._lease is None:
            self._lease = _lease(self._urls)
        self._task = self._tasks[seed % len(self._tasks)]
        self._ran = []
        world = self._ask(
            "initialize",
            # A name per server: those that share a folder would overwrite each other's results of the same task.
            experiment_name=f"turnkey-{digest(self._lease[0])}",
            timeout_seconds=self._code_timeout,
        )
        person = world["supervisor"]
        task = (
            f"{world['instruction']}\n(Asked by {person['first_name']} {person['last_name']}, "
            f"e-mail {person['email']}, phone {person['phone_number']}. It is {world['datetime']}.)"
        )
        return self._result("Nothing has run yet."), task

    def act(self, action: str) -> StepResult:
        fenced = _FENCE.findall(action)
        code = (fenced[-1] if fenced else action).strip("\n")
        try:
            ast.parse(code)
        except SyntaxError:
            pass  # left to the server: its message is AppWorld's, and its Python may be another one
        except Exception as error:  # null bytes, deep nesting: the server would fail on them
            return self._result(f"This cannot be read as Python: {error}", invalid=True)
        output = self._ask("execute", code=code)
        if output.startswith(_NOT_RUN):
            return self._result(output, invalid=True)
        self._ran.append(code)
        if not self._ask("task_completed"):
            return self._result(output)
        # Without suppress_errors a test that fails is an error of the server.
        verdict = self._ask("evaluate", suppress_errors=True)
        success = bool(verdict["success"])
        share = float(success) if self._only_success else len(verdict["passes"]) / max(1, verdict["num_tests"])
        return self._result(output, reward=share, success=success, terminated=True)

    def close(self) -> None:
        """Release the server."""
        if self._lease is not None:
            self._lease[1].close()
            self._lease = None

    def _ask(self, route: str, **payload: Any) -> Any:
        assert self._lease is not None
        url = f"{self._lease[0]}/{route}"
        answer = post_json(url, {"task_id": self._task, **payload}, timeout=self._timeout, key=KEY)
        if not isinstance(answer, dict) or "output" not in answer:
            raise ServerError(f'{url} must answer {{"output": ...}} as AppWorld does, got {str(answer)[:200]!r}')
        return answer["output"]

    def _result(self, output: str, **what: Any) -> StepResult:
        half, more = self._max_output // 2, len(output) - self._max_output
        if more > 0:
            output = f"{output[:half]}\n... {more} characters left out ...\n{output[-half:]}"
        return StepResult(output, digest(self._task, self._ran), **what)


def _expand(text: str) -> list[str]:
    """The addresses of one entry of ``urls``."""
    match = _PORTS.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return [check_url(text, KEY)]
    first, last = int(match[2]), int(match[3])
    check(first <= last, KEY, "a range of ports that goes up, such as http://127.0.0.1:9000-9015", text)
    return [check_url(f"{match[1]}:{port}", KEY) for port in range(first, last + 1)]


def _task_ids(tasks: str | Sequence[str]) -> list[str]:
    if isinstance(tasks, str):
        path = Path(tasks)
        if not path.is_file():
            raise EnvironmentKwargsError(
                f"tasks: there is no file {tasks!r} on this machine. It is a list of task ids, or a text file with one "
                "per line; `appworld download data` brings data/datasets/train.txt"
            )
        tasks = read_text(path).split()
    check(bool(tasks) and all(isinstance(id, str) for id in tasks), "tasks", "one task id or more", tasks)
    return list(tasks)


def _lease(urls: Sequence[str]) -> tuple[str, IO[str]]:
    """A server that no other episode on this machine uses, and the lock file that reserves it until it is closed.

    The operating system releases the lock of a process that dies. Raises ``ServerError``: at once when no server can be
    reached, else after half a minute without a free one.
    """
    folder = Path(tempfile.gettempdir(), f"turnkey-appworld-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + LEASE_SECONDS
    while True:
        down = []
        for url in urls:
            lock = open(folder / digest(url), "w")  # noqa: SIM115 - it stays open as long as the lease
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                parts = urlsplit(url)
                socket.create_connection((parts.hostname, parts.port or 80), timeout=5.0).close()
                return url, lock
            except BlockingIOError:
                lock.close()
            except OSError as error:
                lock.close()
                down.append(f"{url} ({error})")
        if len(down) == len(urls) or time.monotonic() > deadline:
            busy = len(urls) - len(down)
            raise ServerError(
                f"no AppWorld server is free: {busy} of {len(urls)} are in use by other episodes on this machine, "
                f"{len(down)} cannot be reached{': ' if down else ''}{', '.join(down)}. Each episode takes one "
                f"(`appworld serve environment --port P`): name more in {KEY}, or lower turnkey.env.instances_per_host"
            )
        time.sleep(0.2)
