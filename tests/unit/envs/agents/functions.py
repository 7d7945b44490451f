"""Functions that behave in every way an agent may."""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

CALLS = [0]


async def plays(task: Any, agent: Any) -> float:
    await asyncio.sleep(0)
    return task["value"] * 2


def plays_sync(task: Any, agent: Any) -> dict[str, Any]:
    extra = {"url": agent.base_url, "folder": str(agent.workspace), "scores": np.arange(2)}
    return {"reward": np.float32(0.5), "success": np.True_, "turns": {0: 1, "2": 0.25}, "extra": extra}


def returns(task: Any, agent: Any) -> Any:
    values = {"none": None, "nan": float("nan"), "text": "1.0", "typo": {"rewards": 1.0}, "turn": {"turns": {-1: 1}}}
    values |= {"success": {"success": 1}, "coroutine": plays(task, agent), "extra": {"extra": {"x": object()}}}
    values.pop("coroutine").close() if task["what"] != "coroutine" else None
    return values[task["what"]]


def takes_the_task_alone(task: Any) -> float:
    return 1.0


def raises(task: Any, agent: Any) -> None:
    raise ValueError("x" * 1000)


def exits(task: Any, agent: Any) -> None:
    sys.exit("enough")


def dies(task: Any, agent: Any) -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def hangs(task: Any, agent: Any) -> None:
    while True:
        time.sleep(0.001) if task.get("gently") else None


async def sleeps(task: Any, agent: Any) -> None:
    await asyncio.sleep(1000)


def counts(task: Any, agent: Any) -> dict[str, Any]:
    CALLS[0] += 1
    variables = {name: os.environ.get(name) for name in ("MY_API_KEY", "GIVEN", "PATH")}
    return {"reward": CALLS[0], "extra": {"pid": os.getpid(), "variables": variables}}


def leaves_a_process(task: Any, agent: Any) -> dict[str, Any]:
    started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return {"reward": 1, "extra": {"pid": os.getpid(), "child": started.pid}}


def proxies(task: Any, agent: Any) -> dict[str, Any]:
    return {"reward": 1, "extra": {"bypassed": bool(urllib.request.proxy_bypass("127.0.0.1"))}}


def sees(task: Any, agent: Any) -> dict[str, Any]:
    """What of this machine and of the process that trains can be read."""
    variables = []
    for path in [folder / "environ" for folder in Path("/proc").iterdir() if folder.name.isdigit()]:
        with contextlib.suppress(OSError):
            variables.append(path.read_text(errors="replace"))
    files = {path: Path(path).exists() for path in (*task["files"], "/etc/shadow")}
    paths = {"url": agent.base_url, "workspace": str(agent.workspace), "cwd": os.getcwd()}
    return {"reward": 1, "extra": {"secret": task["secret"] in "".join(variables), "files": files, **paths}}


def uses(task: Any, agent: Any) -> float:
    """What ``task`` names, then waits."""
    mebibyte = os.urandom(1 << 20)  # a file system that compresses would give zeros no blocks
    if "allocates" in task:
        return float(len(bytearray(task["allocates"] << 20)) > 0)
    for number in range(task.get("files", 0)):
        Path(f"file{number}").write_bytes(mebibyte * 20)
    with open("/dev/shm/file" if "shared" in task else os.devnull, "wb") as file:
        for _ in range(task.get("shared", 0)):
            file.write(mebibyte)
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(task.get("processes", 0))]
    if "forks" in task:
        for _ in range(4):
            if os.fork() == 0:
                held = bytearray(os.urandom(16)) * (task["forks"] << 16)
                time.sleep(60)
                os._exit(len(held) == 0)
    time.sleep(60)
    return float(len(started))
