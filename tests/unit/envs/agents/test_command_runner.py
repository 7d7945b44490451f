"""Agents that are commands, without a sandbox: what they are given, and that nothing of them is left."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult
from verl_turnkey.envs.agents.command import CommandRunner, filled
from verl_turnkey.envs.agents.sandboxes import NoSandbox
from verl_turnkey.envs.process_tree import Limits

HANDLE = AgentHandle("http://127.0.0.1:9/s3cret/v1", "k3y", "policy")
DUMP = """
import json, os, sys
json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(), "files": os.listdir(),
           "home": os.listdir(os.environ["HOME"]), "stdin": sys.stdin.read(), "session": os.getsid(0) == os.getpid()},
          sys.stdout)
"""


def play(command: list[str], task: dict[str, Any] | None = None, timeout: float = 30.0, **kwargs: Any) -> AgentResult:
    handle = kwargs.pop("handle", HANDLE)
    return asyncio.run(CommandRunner(command, timeout=timeout, **kwargs).run(task or {}, handle))


def shell(script: str, **kwargs: Any) -> AgentResult:
    return play(["bash", "-c", script], **kwargs)


def marked(word: str) -> list[int]:
    """Processes whose command line holds ``word``."""
    pids = []
    for path in [folder / "cmdline" for folder in Path("/proc").iterdir() if folder.name.isdigit()]:
        try:
            if word.encode() in path.read_bytes():
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def test_what_a_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = "HF_TOKEN GITHUB_PAT DATABASE_URL SLACK_WEBHOOK OPENAI_API_KEY OPENAI_ORG_ID RAY_ADDRESS XDG_CACHE_HOME"
    for name in (*secrets.split(), "ANY_OTHER"):
        monkeypatch.setenv(name, "theirs")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:theirs@proxy:3128")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("MY_API_KEY", "wanted")
    monkeypatch.setenv("NO_PROXY", "example.org")
    task = {"instruction": 'fix $(touch /tmp/x) `id` "it\'s"', "n": 3, "files": ["a"]}
    command = [sys.executable, "-c", DUMP, "--task={instruction}", "{n}", "{files}", "{{n}}", '{"a": {"b": 1}}']
    outcome = play(command, task, env={"MODEL": "openai/{model}"}, sandbox=NoSandbox(("MY_API_KEY",)))
    dump = json.loads(outcome.extra["output"])
    assert dump["argv"] == [f"--task={task['instruction']}", "3", '["a"]', "{n}", '{"a": {"b": 1}}']
    assert "theirs" not in " ".join(dump["env"].values())
    wanted = {
        "OPENAI_BASE_URL": "http://127.0.0.1:9/s3cret/v1",
        **dict.fromkeys(("ANTHROPIC_BASE_URL", "TURNKEY_URL"), "http://127.0.0.1:9/s3cret"),
        **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), "k3y"),
        **dict.fromkeys(("OPENAI_MODEL", "ANTHROPIC_MODEL"), "policy"),
        "MODEL": "openai/policy",
        "MY_API_KEY": "wanted",
        "HTTP_PROXY": "http://proxy:3128",
        "NO_PROXY": "example.org,127.0.0.1,localhost,::1",
    }
    assert wanted.items() <= dump["env"].items()
    assert (dump["files"], dump["home"], dump["stdin"], dump["session"]) == ([], [], "", True)
    assert dump["env"]["HOME"] not in (os.environ["HOME"], dump["cwd"])
    assert not Path(dump["cwd"]).exists()
    assert not Path(dump["env"]["HOME"]).exists()
    assert (outcome.reward, outcome.extra["exit_code"], outcome.reason) == (None, 0, "")


def test_a_workspace_of_the_episode_is_used_and_stays(tmp_path: Path) -> None:
    handle = AgentHandle(HANDLE.base_url, HANDLE.key, HANDLE.model, tmp_path)
    outcome = play(["bash", "-c", "pwd; echo {workspace}; touch made"], handle=handle)
    assert outcome.extra["output"].split() == [str(tmp_path)] * 2
    assert (tmp_path / "made").exists()


def test_files_in_its_home() -> None:
    files = {".config/agent.json": '{"url": "{base_url}", "model": "{model}"}'}
    outcome = shell("cat ~/.config/agent.json", files=files)
    assert json.loads(outcome.extra["output"]) == {"url": HANDLE.base_url, "model": "policy"}


def test_exit_status_and_last_words() -> None:
    outcome = shell("echo fine; echo first >&2; echo 'no such model' >&2; echo >&2; exit 3")
    assert (outcome.reward, outcome.success, outcome.truncated) == (None, None, False)
    assert outcome.extra == {"output": "fine\n", "exit_code": 3}
    assert outcome.reason == "the agent ended with exit status 3: no such model"
    assert shell("kill -9 $$").reason == "the agent ended with exit status 137:"
    for script, reward, success in (("exit 3", 0.0, False), ("true", 1.0, True)):
        done = shell(script, reward="exit_code")
        assert (done.reward, done.success, not done.reason) == (reward, success, success)


def test_a_failure_does_not_show_the_secret_of_the_episode() -> None:
    """Nor most of it, where the reason or the output is cut."""
    secret = "Zk3-9qPw_7LmX2vB8cRt4yNd"
    handle = AgentHandle(f"http://127.0.0.1:9/{secret}/v1", secret, "policy")
    for before in (200, 240, 252):
        script = f"printf 'x%.0s' $(seq {before}) >&2; echo $OPENAI_BASE_URL >&2; echo $OPENAI_API_KEY; exit 1"
        outcome = shell(script, handle=handle)
        assert secret[:8] not in outcome.reason
        assert outcome.extra["output"] == "***\n"


def test_a_folder_of_any_depth_is_removed_with_its_episode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Paths in it are longer than the system takes, and it is read-only."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = "import os\nfor _ in range(1200): os.mkdir('deep'); os.chdir('deep')\nos.chmod('..', 0o500); print('deep')"
    assert play([sys.executable, "-c", script]).extra["output"] == "deep\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("script", "fits"),
    [
        ("open('file', 'wb').write(bytes(1 << 19))\nfor n in range(9): os.link('file', str(n))", True),
        ("for _ in range(1200): os.mkdir('deep'); os.chdir('deep')", False),
        ("os.mkdir('locked'); os.chmod('locked', 0o300); os.chdir('locked')\n"
         "for n in range(9): open(str(n), 'wb').write(bytes(1 << 19))", False),
    ],
    ids=["links", "deep", "locked"],
)  # fmt: skip
def test_no_file_is_hidden_from_the_limit_of_the_disk_or_counts_twice(script: str, fits: bool) -> None:
    command = [sys.executable, "-c", f"import os, time\n{script}\ntime.sleep({1 if fits else 60})"]
    reason = play(command, limits=Limits(disk=1 << 20)).reason
    assert reason == "" if fits else "it used more than turnkey.agent.disk_gb" in reason


def test_a_command_that_is_not_there() -> None:
    reason = play(["no-such-agent"]).reason
    assert reason == "the agent ended with exit status 127: cannot start no-such-agent: No such file or directory"


def test_output_is_bounded() -> None:
    outcome = shell("yes | head -c 30000000; yes no | head -c 10000000 >&2; echo end; exit 1")
    assert len(outcome.extra["output"]) == 4000
    assert outcome.extra["output"].endswith("y\nend\n")
    assert outcome.reason.endswith(": no") or outcome.reason.endswith(": n")


@pytest.mark.parametrize(
    "how",
    [
        "sleep {word} & disown",
        "setsid nohup sleep {word} >/dev/null 2>&1 &",
        "(env -i setsid setsid sleep {word} </dev/null >/dev/null 2>&1 &) &",
        "trap '' TERM HUP INT; (trap '' TERM HUP INT; setsid bash -c 'while :; do sleep {word}; done' &)",
    ],
    ids=["background", "nohup", "empty_environment", "traps"],
)
@pytest.mark.parametrize("end", ["exit", "timeout"])
def test_nothing_survives(how: str, end: str, request: pytest.FixtureRequest) -> None:
    word = f"77{os.getpid()}{abs(hash(request.node.name)) % 10**6}"
    script = how.format(word=word) + ("" if end == "exit" else f"\nsleep {word}")
    outcome = shell(script, timeout=30.0 if end == "exit" else 2.0)
    assert not marked(word)
    assert outcome.truncated == (end == "timeout")


def test_nothing_survives_an_agent_that_kills_its_guard() -> None:
    word = f"75{os.getpid()}"
    outcome = shell(f"setsid sleep {word} & sleep {word} & sleep 0.1; kill -9 $PPID; sleep {word}")
    assert not marked(word)
    assert outcome.extra["exit_code"] == 137


def test_a_timeout_is_said() -> None:
    late = "the agent ran longer than turnkey.agent.timeout=3"
    outcome = shell("echo begun; sleep 1000", timeout=3.0)
    assert outcome == AgentResult(extra={"output": "begun\n"}, truncated=True, reason=late)


def test_a_cancelled_episode_leaves_nothing() -> None:
    word = f"78{os.getpid()}"

    async def run() -> None:
        task = asyncio.ensure_future(CommandRunner(["sleep", word], timeout=60.0).run({}, HANDLE))
        while not marked(word):
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert not marked(word)


def test_nothing_outlives_the_process_that_trains(tmp_path: Path) -> None:
    word = f"79{os.getpid()}"
    script = tmp_path / "trains.py"
    script.write_text(f"""
import asyncio
from verl_turnkey.envs.agents.base import AgentHandle
from verl_turnkey.envs.agents.command import CommandRunner
asyncio.run(CommandRunner(["bash", "-c", "setsid sleep {word} & sleep {word}"], timeout=60.0).run(
    {{}}, AgentHandle("http://127.0.0.1:9/s/v1", "k", "m")))
""")

    async def run() -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(script), env=os.environ | {"PYTHONPATH": "src"}
        )
        while len(marked(word)) < 3:
            await asyncio.sleep(0.02)
        process.kill()
        await process.wait()
        for _ in range(500):
            if not marked(word):
                break
            await asyncio.sleep(0.02)

    asyncio.run(run())
    assert not marked(word)


def test_placeholders_without_a_value_are_refused() -> None:
    words = r"the task has no field 'instrution' for \{instrution\}; did you mean 'instruction'"
    with pytest.raises(AgentFailure, match=words):
        play(["echo", "{instrution}"], {"instruction": "x"})
    assert filled("{a}{{a}}", {"a": "{b}"}) == "{b}{a}"


def test_a_null_byte_costs_the_episode() -> None:
    with pytest.raises(AgentFailure, match="the agent's process could not be started: embedded null byte"):
        play(["echo", "{instruction}"], {"instruction": "a\0b"})
