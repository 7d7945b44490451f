"""Commands in bubblewrap: what they see, the one way out, and how a sandbox is chosen."""

import ast
import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from gateways import completion, gateway
from test_command_runner import marked

from verl_turnkey.envs.agents import relay, sandboxes
from verl_turnkey.envs.agents.base import AgentHandle, AgentResult
from verl_turnkey.envs.agents.command import CommandRunner
from verl_turnkey.envs.agents.sandboxes import Bubblewrap, Docker, NoSandbox, Sandbox, choose, installation
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.process_tree import Limits

HANDLE = AgentHandle("http://127.0.0.1:9/s3cret/v1", "secret-of-the-episode", "policy")


def run(*command: str, handle: AgentHandle = HANDLE, box: Sandbox | None = None, timeout: float = 30.0) -> AgentResult:
    return asyncio.run(CommandRunner(command, timeout=timeout, sandbox=box or Bubblewrap()).run({}, handle))


def play(script: str, **kwargs: Any) -> AgentResult:
    return run("bash", "-c", script, **kwargs)


def printed(script: str, **kwargs: Any) -> list[str]:
    outcome = play(script, **kwargs)
    assert outcome.reason == ""
    return outcome.extra["output"].split("\n")[:-1]


def test_it_sees_the_same_paths_in_every_episode() -> None:
    script = "pwd; echo $HOME; ls -A ~ . /tmp; whoami; hostname; env | cut -d= -f1 | sort | grep -v ^_"
    first, second = printed(script), printed(script)
    assert first == second
    assert first[:2] == ["/app", "/home/agent"]
    below_tmp = [path.parts[2] for path in [Path(sys.prefix)] if path.is_relative_to("/tmp")]  # as in a clone there
    expected = [".:", "", "/home/agent:", "", "/tmp:", *below_tmp, "root", "sandbox", "ANTHROPIC_API_KEY"]
    assert first[2 : 2 + len(expected)] == expected


def test_it_sees_no_other_process_no_network_and_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HARMLESS", "theirs")
    (tmp_path / "private").write_text("secret")
    script = f"""
        ls -d /proc/[0-9]* | wc -l
        tail -n +3 /proc/net/dev | wc -l
        (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null || echo no port
        cat {tmp_path}/private 2>/dev/null || echo no file
        cat /etc/shadow 2>/dev/null || echo no shadow
        touch /usr/x 2>/dev/null || echo read-only
        ls /home; ls -A /root 2>/dev/null | grep -v pyenv || echo no home
        echo ${{HARMLESS-scrubbed}}
        unshare --mount true 2>/dev/null || echo no mounts
        grep CapEff /proc/self/status
    """
    processes, *lines = printed(script)
    assert int(processes) < 10
    refusals = ["no port", "no file", "no shadow", "read-only", "agent", "no home", "scrubbed", "no mounts"]
    assert lines == ["1", *refusals, "CapEff:\t0000000000000000"]


@pytest.mark.parametrize("end", ["exit", "timeout"])
def test_nothing_survives(end: str) -> None:
    word = f"76{os.getpid()}{len(end)}"
    script = f"(env -i setsid nohup sleep {word} >/dev/null 2>&1 &)\n" + (f"sleep {word}" if end == "timeout" else "")
    outcome = play(script, timeout=30.0 if end == "exit" else 1.0)
    assert not marked(word)
    assert outcome.truncated == (end == "timeout")


@pytest.mark.parametrize("box", [NoSandbox(), Bubblewrap()], ids=["none", "bwrap"])
def test_a_command_that_exceeds_a_limit_is_killed_with_its_reason(box: Sandbox) -> None:
    limits, word = Limits(processes=8, disk=1 << 20), f"78{os.getpid()}"
    scripts = {
        "processes=8": f"for i in $(seq 20); do sleep {word} & done; wait",
        "disk_gb=0.000976562": "for i in $(seq 9); do head -c 300K /dev/urandom > ~/$i; done; sleep 60",
    }
    for limit, script in scripts.items():
        runner = CommandRunner(["bash", "-c", script], timeout=60.0, sandbox=box, limits=limits)
        outcome = asyncio.run(runner.run({}, HANDLE))
        assert outcome.reason == f"the agent ended with exit status 137: it used more than turnkey.agent.{limit}"
        assert not outcome.truncated
    assert not marked(word)


def test_processes_that_fork_on_and_on_end_with_their_episode() -> None:
    word = f"77{os.getpid()}"
    fork = f'f() {{ sleep {word} & [ "$1" -eq 0 ] || {{ f $(($1 - 1)) & f $(($1 - 1)) & }}; }}; f 5; wait; sleep {word}'

    async def both() -> tuple[AgentResult, AgentResult]:
        hostile, honest = (
            CommandRunner(["bash", "-c", script], timeout=timeout, sandbox=Bubblewrap())
            for script, timeout in ((fork, 10.0), ("echo fine", 60.0))
        )
        forking = asyncio.ensure_future(hostile.run({}, HANDLE))
        while len(marked(word)) < 32 and not forking.done():
            await asyncio.sleep(0.05)
        return await honest.run({}, HANDLE), await forking

    honest, hostile = asyncio.run(both())
    assert honest.extra["output"] == "fine\n"
    assert hostile.truncated
    assert not marked(word)


ASK = """
import json, os, urllib.request
def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request))
for size in (1, 3_000_000):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": "x" * size}]}
    print(post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"])
post(os.environ["TURNKEY_URL"] + "/reward", {"reward": 1})
print(os.environ["OPENAI_BASE_URL"])
"""


def test_the_gateway_is_the_only_way_out() -> None:
    reports = []

    def answer(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/reward"):
            reports.append((path, body))
            return {}
        return completion({"content": f"{path} {len(body['messages'][0]['content'])}"})

    with gateway(answer) as handle:
        lines = printed(f"{sys.executable} - <<'END'\n{ASK}\nEND", handle=handle)
    chat = "/s3cret/v1/chat/completions"
    assert lines == [f"{chat} 1", f"{chat} 3000000", "http://127.0.0.1:8000/s3cret/v1"]
    assert reports == [("/s3cret/reward", {"reward": 1})]


def test_a_real_client_through_the_relay() -> None:
    """Parallel calls, and a virtual environment of this machine whose interpreter may lie below a home."""
    script = """
import asyncio, openai
async def main():
    async with openai.AsyncOpenAI() as client:
        ask = lambda text: client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
        replies = await asyncio.gather(*(ask(str(i)) for i in range(20)))
        print(*(reply.choices[0].message.content for reply in replies))
asyncio.run(main())
"""
    with gateway(lambda path, body: completion({"content": body["messages"][0]["content"]})) as handle:
        outcome = run(sys.executable, "-c", script, handle=handle, timeout=120.0)
    assert outcome.extra["output"].split() == [str(number) for number in range(20)], outcome.reason


def test_connections_through_the_relay_take_little_of_the_limit_of_memory() -> None:
    script = """
import http.client, os
path = os.environ["OPENAI_BASE_URL"].partition(":8000")[2] + "/chat/completions"
connections = [http.client.HTTPConnection("127.0.0.1", 8000, timeout=20) for _ in range(40)]
for connection in connections:
    connection.connect()
for connection in connections:
    connection.request("POST", path, '{"messages": [{"content": "x"}]}', {"Content-Type": "application/json"})
print(sum(connection.getresponse().status == 200 for connection in connections))
"""
    command, limits = [sys.executable, "-c", script], Limits(memory=1 << 27)
    with gateway(lambda path, body: completion({"content": "fine"})) as handle:
        runner = CommandRunner(command, timeout=60.0, sandbox=Bubblewrap(), limits=limits)
        outcome = asyncio.run(runner.run({}, handle))
    assert outcome.extra["output"] == "40\n", outcome.reason


def test_the_relay_closes_a_connection_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_memory)
    ours, theirs = socket.socketpair()
    assert relay.start(relay.connect, ours, "socket", ends=[ours]) is None
    with theirs:
        assert theirs.recv(1) == b""


def test_the_relay_does_not_wait_for_acknowledgements(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as gateway:
        gateway.bind(path := str(tmp_path / "s"))
        gateway.listen()
        with socket.create_connection(server.getsockname()) as client:
            (accepted, _) = server.accept()
            thread = threading.Thread(target=relay.connect, args=(accepted, path))
            thread.start()
            (end, _) = gateway.accept()
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            end.close()
            client.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_status_and_words_come_through_the_relay() -> None:
    with gateway(lambda path, body: {}) as handle:
        outcome = play("echo why >&2; exit 3", handle=handle)
        assert outcome.reason == "the agent ended with exit status 3: why"
        reason = run("no-such-agent", handle=handle).reason
    missing = "the agent ended with exit status 127: cannot start no-such-agent: No such file or directory"
    assert reason == f"{missing}; of this machine's files the sandbox shows those in turnkey.agent.readable"


def test_the_network_of_this_machine_when_asked_for() -> None:
    with gateway(lambda path, body: completion({"content": "hello"})) as handle:
        lines = printed(f"{sys.executable} - <<'END'\n{ASK}\nEND", handle=handle, box=Bubblewrap(network="host"))
    assert lines == ["hello", "hello", handle.base_url]


def test_an_unpacked_image_is_the_root_and_stays_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "image"
    for folder in ("etc", "opt", "app"):
        (root / folder).mkdir(parents=True)
    (root / "opt/mark").write_text("of the image\n")
    (root / "etc/os-release").write_text("NAME=image\n")
    (root / "usr").symlink_to("/host/usr")  # this machine's programs stand in for those of an image
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    outcome = play("cat /opt/mark /etc/os-release; touch /opt/x || echo no; ls -A /app; echo >f", box=_WithHost(root))
    assert outcome.extra["output"] == "of the image\nNAME=image\nno\n"
    assert not (root / "opt/x").exists()
    assert not list((root / "app").iterdir())


class _WithHost(Bubblewrap):
    def _root(self, job: Any) -> list[str]:
        return [*super()._root(job), "--ro-bind", "/usr", "/host/usr"]


def test_what_an_interpreter_needs(tmp_path: Path) -> None:
    base, venv, tools = tmp_path / "base", tmp_path / "venv", tmp_path / "home"
    for folder in (base / "bin", base / "lib", base / "conda-meta", venv / "bin", tools / "bin"):
        folder.mkdir(parents=True)
    (base / "bin/python3").touch()
    (venv / "bin/python").symlink_to(base / "bin/python3")
    (venv / "pyvenv.cfg").touch()
    (venv / "bin/agent").touch()
    (tools / "bin/agent").symlink_to(venv / "bin/agent")
    (tools / "private").touch()
    assert installation(venv / "bin/python") == [venv, base]
    assert installation(venv / "bin/agent") == [venv, base]
    assert installation(tools / "bin/agent") == [tools / "bin/agent", venv, base]
    assert installation(base / "bin/python3") == [base]


def program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_a_program_of_ones_own_is_found_and_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also below /tmp, where the sandbox has a folder of its own."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    program(venv / "bin/agent", "helper; python3 -c 'print(7)'; echo $PATH")
    program(venv / "bin/helper", "echo helps")
    program(venv / "bin/python3", "")
    monkeypatch.setenv("PATH", f"{venv}/bin:{os.environ['PATH']}")
    outcome = run("agent")
    helps, seven, path = outcome.extra["output"].split()
    assert (helps, seven) == ("helps", "7"), outcome.reason
    assert path.split(":")[-1] == f"{venv}/bin"
    assert "." not in printed("echo $PATH")[0].split(":")


# --- the choice -------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_docker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "docker_problem", lambda: "docker's daemon does not answer: no socket")


@pytest.mark.usefixtures("no_docker")
def test_bwrap_where_no_daemon_answers() -> None:
    assert choose("none") == NoSandbox()
    assert choose("bwrap") == choose("auto") == choose("auto", image="debian") == Bubblewrap()
    with pytest.raises(SandboxError, match=r"sandbox=docker: docker's daemon does not answer: no socket"):
        choose("docker", image="debian")
    with pytest.raises(SandboxError, match="must be auto, none, bwrap or docker, not 'podman'"):
        choose("podman")


@pytest.mark.usefixtures("no_docker")
def test_an_error_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "bwrap_problem", lambda _: "bwrap is not installed (Debian's package bubblewrap)")
    with pytest.raises(SandboxError) as error:
        choose("auto", image="debian")
    assert str(error.value) == (
        "turnkey.agent.sandbox=auto: docker's daemon does not answer: no socket; bwrap is not installed (Debian's "
        "package bubblewrap). sandbox=none runs agents without one"
    )
    with pytest.raises(SandboxError, match="docker is not used without an image"):
        choose("auto")


def test_docker_where_its_daemon_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "docker_problem", lambda: None)
    assert choose("auto", image="debian") == choose("docker", image="debian") == Docker("debian")
    assert choose("auto") == Bubblewrap()
    with pytest.raises(SandboxError, match="needs an image"):
        choose("docker")


@pytest.mark.usefixtures("no_docker")
def test_a_bwrap_that_cannot_limit_memory_is_refused_where_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program(tmp_path / "bwrap", 'case "$*" in *--size*) echo "bwrap: Unknown option --size" >&2; exit 1; esac')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandboxes.bwrap_problem.cache_clear()
    assert choose("bwrap") == Bubblewrap()
    with pytest.raises(SandboxError, match=r"memory_gb needs bubblewrap 0\.7 or newer: bwrap: Unknown option --size"):
        choose("bwrap", limits=Limits(memory=1 << 30))
    sandboxes.bwrap_problem.cache_clear()


def test_checks_of_this_machine() -> None:
    assert sandboxes.bwrap_problem() is sandboxes.bwrap_problem(memory=True) is None
    assert shutil.which("bwrap") is not None


def test_a_container_gets_its_mounts_and_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program in the place of docker writes down how it is called; the commands are not run."""
    log = tmp_path / "log"
    program(tmp_path / "docker", f'printf \'%s\\n\' "$*" >> {log}\necho "$OPENAI_API_KEY"')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    handle = AgentHandle(HANDLE.base_url, "secret-of-the-episode", "policy", tmp_path, str(tmp_path / "socket"))
    limits = Limits(memory=1 << 30, processes=9, disk=1 << 20)
    runner = CommandRunner(["agent", "{workspace}"], timeout=30.0, sandbox=Docker("debian"), limits=limits)
    outcome = asyncio.run(runner.run({}, handle))
    launched, removal = log.read_text().splitlines()
    name = launched.split("--name ")[1].split()[0]
    assert removal == f"rm --force {name}"
    assert launched.startswith("run --rm --init")
    assert (
        "--network none --memory 1073741824 --memory-swap 1073741824 --pids-limit 9 --ulimit fsize=1048576" in launched
    )
    assert f"--mount type=bind,source={tmp_path},target=/app " in launched
    assert f"--mount type=bind,source={tmp_path}/socket,target=/run/turnkey/gateway.sock " in launched
    assert launched.endswith("debian python3 -I -S /run/turnkey/relay.py /run/turnkey/gateway.sock 8000 agent /app")
    assert "secret-of-the-episode" not in launched
    assert outcome.extra["output"] == "***\n"  # the secret, which no log shows
    assert json.dumps(outcome.extra)


def test_the_containers_of_a_dead_process_are_removed(tmp_path: Path) -> None:
    """As above; the process ends while its container runs, and leaves the removal to the reaper."""
    log = tmp_path / "log"
    program(tmp_path / "docker", f'printf \'%s\\n\' "$*" >> {log}\n[ "$1" = ps ] && echo c1 c2')
    code = (
        "import os; from pathlib import Path; from verl_turnkey.envs.agents import sandboxes; "
        "sandboxes._END_SECONDS = 0; job = sandboxes.Job(['true'], Path(), Path(), {}); "
        "print(sandboxes.Docker('debian').launch(job).command, flush=True); os._exit(9)"
    )
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 9, ended.stderr
    command = ast.literal_eval(ended.stdout)
    label = command[command.index("--label") + 1]
    end = time.monotonic() + 30
    while not (log.exists() and "rm" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert log.read_text().splitlines() == [f"ps --all --quiet --filter label={label}", "rm --force c1 c2"]
