"""Harbor task folders: what is read, what is refused, and that only the verifier gives rewards."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.envs.agents import harbor
from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, AgentResult
from verl_turnkey.envs.agents.command import run_job
from verl_turnkey.envs.agents.harbor import HarborRunner, HarborTask, find_tasks, read_reward, sandbox_for
from verl_turnkey.envs.agents.sandboxes import Bubblewrap, Docker, NoSandbox
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.plugins.cli import env_checks
from verl_turnkey.plugins.cli.env_checks import check_task, check_tasks, write_tasks

EXAMPLES = Path(__file__).parents[4] / "examples/harbor"
MEDIAN = EXAMPLES / "median"
HANDLE = AgentHandle("http://127.0.0.1:9/s3cret/v1", "k3y", "policy")
SOLUTION = (MEDIAN / "solution/solve.sh").read_text()


def play(script: str, task: Path = MEDIAN, timeout: float = 60.0, **kwargs: Any) -> AgentResult:
    row = {"env_id": "harbor", "seed": 0, "kwargs": {"path": str(task)}, "script": script}
    runner = HarborRunner(["bash", "-c", "{script}"], timeout=timeout, **{"sandbox": Bubblewrap(), **kwargs})
    return asyncio.run(runner.run(row, HANDLE))


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A copy of a task, to be changed."""
    return shutil.copytree(MEDIAN, tmp_path / "task")


# --- episodes ---------------------------------------------------------------------------------------------------------
def test_an_agent_that_repairs_and_one_that_does_nothing() -> None:
    outcome = play(f"ls; {SOLUTION}")
    assert (outcome.reward, outcome.success, outcome.verified) == (1.0, True, True)
    assert outcome.extra == {"output": "middle.py\n", "exit_code": 0}
    outcome = play("true")
    assert (outcome.reward, outcome.success, outcome.reason) == (0.0, False, "")


@pytest.mark.parametrize(
    "cheat",
    [
        "echo 1 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "rm -rf /logs/verifier; ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
        "(setsid bash -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' &) & sleep 0.2",
        "mkdir -p ~/bin; printf '#!/bin/sh\\nexit 0' > ~/bin/python3; chmod +x ~/bin/python3; cp ~/bin/python3 /tmp",
        "echo 'import os; os._exit(0)' | tee usercustomize.py sitecustomize.py",
        "ls /tests /solution && cp -r /tests . && echo 'exit 0' > /tests/test.sh",
    ],
    ids=["planted", "link", "survivor", "home", "customize", "tests"],
)
def test_a_cheat_gets_nothing(cheat: str) -> None:
    assert play(cheat).reward == 0.0


def test_an_agent_out_of_time_or_in_error_is_scored_as_it_left_the_folder() -> None:
    outcome = play(f"{SOLUTION}\nsleep 1000", timeout=10.0)
    assert (outcome.reward, outcome.truncated) == (1.0, True)
    assert "timeout=10" in outcome.reason
    outcome = play(f"{SOLUTION}\nexit 3")
    assert (outcome.reward, outcome.truncated, outcome.extra["exit_code"]) == (1.0, False, 3)


def test_placeholders_workspace_and_workdir(task: Path, tmp_path: Path) -> None:
    (task / "task.toml").write_text('[environment]\nworkdir = "/work/repo"\nenv = {LEVEL = "3"}\n')
    (task / "tests/test.sh").write_text("cat seen; pwd > /logs/verifier/pwd; echo 0.5 > /logs/verifier/reward.txt")
    (task / "environment/Sub").mkdir()
    (task / "environment/Sub/Dockerfile").touch()
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    handle = AgentHandle(HANDLE.base_url, "k3y", "policy", workspace)
    script = 'echo "$1" > seen; pwd >> seen; echo $LEVEL >> seen; echo {workspace} $OPENAI_MODEL >> seen; ls Sub'
    command = ["bash", "-c", script, "_", "{instruction}"]
    row = {"env_id": "harbor", "kwargs": {"path": str(task)}}
    outcome = asyncio.run(HarborRunner(command, timeout=60.0, sandbox=Bubblewrap()).run(row, handle))
    assert (outcome.reward, outcome.success) == (0.5, False)
    assert outcome.extra["output"] == "Dockerfile\n"
    *instruction, folder, level, last = (workspace / "seen").read_text().splitlines()
    assert "\n".join(instruction) == (task / "instruction.md").read_text().strip()
    assert (folder, level, last) == ("/work/repo", "3", "/work/repo policy")


def test_rewards_of_several_names(task: Path) -> None:
    (task / "tests/test.sh").write_text('echo \'{"speed": 0.5, "reward": 1}\' > /logs/verifier/reward.json')
    outcome = play("true", task)
    assert (outcome.reward, outcome.success) == (1.0, True)
    assert outcome.extra["rewards"] == {"speed": 0.5, "reward": 1.0}
    assert play("true", task, reward_key="speed").reward == 0.5
    nested = {"reward": 0.5, "tests": {"passed": 3, "names": ["a"]}, "note": "fine", "whole": True}
    (task / "tests/test.sh").write_text(f"echo '{json.dumps(nested)}' > /logs/verifier/reward.json")
    outcome = play("true", task)
    assert (outcome.reward, outcome.extra["rewards"]) == (0.5, {"reward": 0.5, "tests.passed": 3.0})
    assert play("true", task, reward_key="tests.passed").reward == 3.0
    for key in ("note", "whole", "tests.names"):
        with pytest.raises(AgentFailure, match=f"{key} must hold a finite number"):
            play("true", task, reward_key=key)
    with pytest.raises(AgentFailure, match=r"has no 'tests' among \['note', 'reward', 'tests.names'"):
        play("true", task, reward_key="tests")


BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    "script",
    [
        b"#!/usr/bin/env python3\nopen('/logs/verifier/reward.txt', 'w').write('1')",
        b"#!/bin/bash -e\necho 1 > /logs/verifier/reward.txt\nfalse\necho 0 > /logs/verifier/reward.txt\n",
        b"if true; then\r\n  echo 1 > /logs/verifier/reward.txt\r\nfi\r\n",
        BOM + b"#!/bin/bash\r\necho 1 > /logs/verifier/reward.txt\r\n",
        b"printf '\xef\xbb\xbf1\\r\\n' > /logs/verifier/reward.txt",
    ],
    ids=["python", "options", "crlf", "bom", "reward"],
)
def test_scripts_run_as_their_first_line_says_whoever_wrote_them(task: Path, script: bytes) -> None:
    (task / "tests/test.sh").write_bytes(script)
    (task / "solution/solve.sh").write_bytes(script.replace(b"/logs/verifier/reward.txt", b"/app/solved"))
    (task / "instruction.md").write_bytes(BOM + b"Do it.\r\n")
    (task / "task.toml").write_bytes(BOM + b'version = "1.0"\r\n')
    assert HarborTask.load(str(task)).instruction == "Do it."
    assert play("true", task).reward == 1.0
    solution = HarborRunner([], timeout=60.0, sandbox=Bubblewrap())
    outcome = asyncio.run(solution.play(HarborTask.load(str(task)), {}, HANDLE, solution=True))
    assert "exit_code" in outcome.extra
    assert outcome.reason in ("", "the agent ended with exit status 1:")


@pytest.mark.parametrize("workdir", ["/home/agent", "/home", "/tmp", "/tmp/work", "/home/agent/app/", "/root", "//app"])
def test_a_working_folder_may_lie_anywhere(task: Path, workdir: str) -> None:
    """It is neither covered by HOME or /tmp, nor do these write into it."""
    (task / "task.toml").write_text(f'[environment]\nworkdir = "{workdir}"\n')
    (task / "environment/given").write_text("given")
    (task / "tests/test.sh").write_text("[ $(cat made) = given ] && echo 1 > /logs/verifier/reward.txt")
    outcome = play("pwd; ls; cp given made; ls -A ~; touch ~/x /tmp/y; echo ~", task, files={".agent": ""})
    folder, *names, home = outcome.extra["output"].split()
    assert outcome.reward == 1.0
    assert folder == f"/{workdir.strip('/')}"
    assert ".agent" in names
    assert home == ("/root" if "/home/agent".startswith(folder) else "/home/agent")


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ("echo gone >&2; exit 4", "left neither reward.txt nor reward.json in /logs/verifier (exit status 4: gone)"),
        ("echo fine > /logs/verifier/reward.txt", "reward.txt must hold a finite number, not 'fine'"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "reward.txt cannot be read: Too many levels"),
        ("sleep 100", "ran longer than 1 s"),
    ],
)
def test_a_verifier_without_a_reward_fails_the_episode(task: Path, tests: str, message: str) -> None:
    if "sleep" in tests:
        (task / "task.toml").write_text("[verifier]\ntimeout_sec = 1.0\n")
    (task / "tests/test.sh").write_text(tests)
    with pytest.raises(AgentFailure) as failure:
        play("true", task)
    assert failure.value.reason.startswith("the verifier of task")
    assert message in failure.value.reason


def test_variables_of_this_process_reach_the_verifier_alone(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (task / "task.toml").write_text('[verifier.env]\nJUDGE = "${THE_JUDGE}"\nOTHER = "${NOT_SET:-other}"\n')
    (task / "tests/test.sh").write_text('[ "$JUDGE$OTHER" = theirsother ] && echo 1 > /logs/verifier/reward.txt')
    monkeypatch.delenv("THE_JUDGE", raising=False)
    needs = r"verifier\.env needs the environment variable THE_JUDGE"
    with pytest.raises(AgentFailure, match=f"{needs}: set it"):
        play("true", task, inherit=["THE_JUDGE"])
    monkeypatch.setenv("THE_JUDGE", "theirs")
    outcome = play("echo [$JUDGE]", task, inherit=["THE_JUDGE"])
    assert (outcome.reward, outcome.extra["output"]) == (1.0, "[]\n")
    with pytest.raises(AgentFailure, match=rf"{needs}: tasks may read it with turnkey\.agent\.inherit=\[THE_JUDGE\]"):
        play("true", task)


def test_a_task_takes_no_secret_of_the_trainer(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor by an argument of its row; a default counts as if the variable were not set."""
    monkeypatch.setenv("WANDB_API_KEY", "theirs")
    (task / "task.toml").write_text('[environment.env]\nSTOLEN = "${WANDB_API_KEY:-nothing}"\nWAY = "${PATH}"\n')
    assert HarborTask.load(str(task)).filled().env == {"STOLEN": "nothing", "WAY": os.environ["PATH"]}
    row = {"env_id": "harbor", "kwargs": {"path": str(task), "inherit": ["WANDB_API_KEY"]}}
    with pytest.raises(AgentFailure, match="inherit"):
        asyncio.run(HarborRunner(["true"], timeout=60.0, sandbox=Bubblewrap()).run(row, HANDLE))


def test_tasks_of_other_kinds_run_as_commands() -> None:
    runner = HarborRunner(["echo", "{n}"], timeout=60.0)
    assert asyncio.run(runner.run({"n": 7}, HANDLE)).extra["output"] == "7\n"


def test_a_sandbox_is_needed() -> None:
    with pytest.raises(AgentFailure, match=r"Harbor tasks need a sandbox: set turnkey\.agent\.sandbox=bwrap"):
        play("true", sandbox=NoSandbox())


@pytest.fixture
def steps(task: Path) -> Path:
    """A task of two steps, each of which wants its name in a file, with tests of its own or the task's."""
    (task / "tests/test.sh").write_text("cat seen 2>/dev/null | grep -c $WANTED > /logs/verifier/reward.txt")
    (task / "tests/helper").write_text("the task's")
    (task / "task.toml").write_text(
        "[verifier.env]\nWANTED = 'one'\n[[steps]]\nname = 'one'\nmin_reward = 1.0\n"
        "[[steps]]\nname = 'two'\n[steps.healthcheck]\ncommand = 'test -e ready'\n"
    )
    for name in ("one", "two"):
        for folder in ("solution", "tests", "workdir"):
            (task / "steps" / name / folder).mkdir(parents=True)
        (task / "steps" / name / "instruction.md").write_text(f"echo {name} >> seen")
        (task / "steps" / name / "solution/solve.sh").write_text(f"echo {name} >> seen")
    two = task / "steps/two"
    (two / "workdir/setup.sh").write_text("[ $(cat seen) = one ] && touch ready")
    report = '{"reward": $(grep -c two seen), "part": 0.5}'
    (two / "tests/test.sh").write_text(f"cat > /logs/verifier/reward.json <<END\n{report}\nEND\n")
    return task


def obey(task: Path) -> AgentResult:
    """Of an agent that runs its instruction."""
    runner = HarborRunner(["bash", "-c", "{instruction}"], timeout=60.0, sandbox=Bubblewrap())
    return asyncio.run(runner.run({"env_id": "harbor", "kwargs": {"path": str(task)}}, HANDLE))


def test_steps_of_one_name_are_refused(steps: Path) -> None:
    (steps / "task.toml").write_text("[[steps]]\nname = 'one'\n[[steps]]\nname = 'one'\n")
    with pytest.raises(TaskFormatError, match="each of the steps needs a name of its own"):
        HarborTask.load(str(steps))


def test_steps_are_played_one_after_another_in_one_folder(steps: Path) -> None:
    outcome = obey(steps)
    assert (outcome.reward, outcome.success, outcome.verified) == (1.0, True, True)
    assert outcome.extra["rewards"] == {"one": 1.0, "two": 1.0, "two.reward": 1.0, "two.part": 0.5}
    outcome = play("echo one >> seen; touch ~/two", steps)
    assert (outcome.reward, outcome.success) == (0.5, False)
    (steps / "task.toml").write_text(f"multi_step_reward_strategy = 'final'\n{(steps / 'task.toml').read_text()}")
    assert play("echo one >> seen", steps).reward == 0.0
    assert asyncio.run(check_task(HarborTask.load(str(steps)), Bubblewrap())) == []
    assert HarborTask.load(str(steps)).instruction == "echo one >> seen\n\necho two >> seen"
    assert (
        HarborRunner([], timeout=60.0).scoring_seconds({"env_id": "harbor", "kwargs": {"path": str(steps)}}) == 1260.0
    )


def test_a_step_that_gets_too_little_is_the_last(steps: Path) -> None:
    outcome = play("true", steps)
    assert (outcome.reward, outcome.success, outcome.extra["rewards"]) == (0.0, False, {"one": 0.0})


@pytest.mark.parametrize("strategy", ["mean", "final"])
def test_a_later_step_that_cannot_begin_gets_nothing(steps: Path, strategy: str) -> None:
    """The agent may have caused it, so a low score must not become a failed episode."""
    toml = f"multi_step_reward_strategy = '{strategy}'\n{(steps / 'task.toml').read_text()}"
    (steps / "task.toml").write_text(toml)
    (steps / "steps/two/workdir/setup.sh").write_text("echo broken >&2; exit 3")
    outcome = obey(steps)
    assert (outcome.reward, outcome.success, outcome.verified) == (0.5 if strategy == "mean" else 0.0, False, True)
    assert outcome.extra == {"rewards": {"one": 1.0, "two": 0.0}}
    assert outcome.reason == "the setup of two failed (exit status 3): broken"
    (steps / "steps/two/workdir/setup.sh").write_text("true")
    outcome = obey(steps)
    assert (outcome.extra["rewards"], outcome.reason) == (
        {"one": 1.0, "two": 0.0},
        "the healthcheck of two failed (exit status 1):",
    )
    (steps / "steps/one/workdir/setup.sh").write_text("echo broken >&2; exit 3")
    with pytest.raises(AgentFailure, match=r"the setup of one failed \(exit status 3\): broken"):
        obey(steps)


def test_what_comes_before_the_agent_takes_of_its_time(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def noted(sandbox: Any, job: Any, timeout: float) -> Any:
        seconds.append(timeout)
        return run_job(sandbox, job, timeout)

    monkeypatch.setattr(harbor, "run_job", noted)
    (steps / "steps/one/workdir/setup.sh").write_text("sleep 2")
    outcome = play("sleep 60", steps, timeout=10.0)
    assert (outcome.reward, outcome.truncated) == (0.0, True)
    setup, agent, _ = seconds
    assert agent <= setup - 2 <= 8
    (steps / "steps/one/workdir/setup.sh").write_text("sleep 60")
    with pytest.raises(AgentFailure, match=r"the setup of one failed \(ran longer than .* s\)"):
        play("true", steps, timeout=1.0)


def test_the_check_gives_each_step_its_time(steps: Path) -> None:
    (steps / "task.toml").write_text(f"{(steps / 'task.toml').read_text()}[steps.agent]\ntimeout_sec = 5000\n")
    seen: list[float] = []

    class Watched(HarborRunner):
        def __init__(self, command: Any, *, timeout: float, **further: Any) -> None:
            seen.append(timeout)
            super().__init__(command, timeout=timeout, **further)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_checks, "HarborRunner", Watched)
        assert asyncio.run(check_task(HarborTask.load(str(steps)), Bubblewrap())) == []
    assert {*seen} == {5600.0}


def test_files_of_a_step_stay_in_its_folders(steps: Path, tmp_path: Path) -> None:
    """Whatever links the agent has left there."""
    (tmp_path / "outside").mkdir()
    (steps / "steps/two/workdir/link").mkdir()
    (steps / "steps/two/workdir/link/file").touch()
    outcome = play(f"echo one >> seen; ln -s {tmp_path}/outside link", steps)
    assert "the setup of two failed" in outcome.reason
    shutil.rmtree(steps / "steps/two/workdir/link")
    leaves_links = f"echo one >> seen; rm -r ~/.agent; ln -s {tmp_path}/outside ~/.agent; true"
    assert play(leaves_links, steps, files={".agent/config": "text"}).reward == 0.5
    assert not list((tmp_path / "outside").iterdir())


def test_links_of_a_task_lead_nowhere(steps: Path, tmp_path: Path) -> None:
    """Neither those that files are copied over, nor those in the place of its own folders."""
    outside, tests = tmp_path / "outside", steps / "steps/two/tests"
    outside.mkdir()
    (outside / "file").write_text("kept")
    (steps / "tests/folder").symlink_to(outside)
    (steps / "tests/file").symlink_to(outside / "file")
    (tests / "folder").mkdir()
    for path in ("folder/file", "file", "helper"):
        (tests / path).write_text("the task's")
    assert obey(steps).reward == 1.0
    assert [(path.name, path.read_text()) for path in outside.iterdir()] == [("file", "kept")]
    (steps / "environment/folder").mkdir()
    (steps / "environment/folder/file").write_text("the task's")
    (workspace := tmp_path / "workspace").mkdir()
    (workspace / "folder").symlink_to(outside)
    HarborTask.load(str(steps)).fill(workspace)
    assert (outside / "file").read_text() == "kept"
    for name in ("environment", "steps/two/workdir", "steps/one/solution", "steps/two/tests/test.sh", "tests"):
        (steps / name).rename(aside := tmp_path / "aside")
        (steps / name).symlink_to(aside)
        with pytest.raises(TaskFormatError, match=f"task: {name} is a link out of this folder"):
            HarborTask.load(str(steps))
        (steps / name).unlink()
        aside.rename(steps / name)


def test_the_agent_starts_where_the_healthcheck_succeeds(task: Path) -> None:
    (task / "task.toml").write_text("[environment.healthcheck]\ncommand = 'ls; test -e /app/middle.py'\n")
    assert play(SOLUTION, task).reward == 1.0
    (task / "task.toml").write_text("[environment.healthcheck]\ncommand = 'echo no server >&2; false'\n")
    with pytest.raises(AgentFailure, match=r"the healthcheck of task failed \(exit status 1\): no server"):
        play("true", task)


@pytest.mark.parametrize(
    ("toml", "networks"),
    [
        ("", [True, True]),
        ("[environment]\nallow_internet = false", [False, False]),
        ("[environment]\nnetwork_mode = 'public'\n[agent]\nnetwork_mode = 'no-network'", [False, True]),
    ],
)
def test_a_task_can_do_without_the_network_of_the_machine(task: Path, toml: str, networks: list[bool]) -> None:
    (task / "task.toml").write_text(f"{toml}\n")
    number = "$(readlink /proc/self/ns/net | tr -dc 0-9)"
    (task / "tests/test.sh").write_text(f"echo {number} > /logs/verifier/reward.txt")
    outcome = play(f"echo {number}", task, sandbox=Bubblewrap(network="host"))
    machine = os.stat("/proc/self/ns/net").st_ino
    assert [number == machine for number in (int(outcome.extra["output"]), outcome.reward)] == networks


# --- reading ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("toml", "names"),
    [
        ("[[steps]]\nname = 'a'\nretries = 2\n[steps.agent]\nuser = 'me'", "steps.retries, steps.agent.user"),
        ("[[steps]]\nname = 'a'\nnetwork_mode = 'no-network'", "steps.network_mode"),
        ("steps = 3", "steps = 3"),
        ("multi_step_reward_strategy = 'best'", "multi_step_reward_strategy = 'best'"),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org']",
         "environment.network_mode, environment.allowed_hosts"),
        ("[environment]\ngpus = 1\nmcp_servers = [{name = 'x'}]", "environment.gpus, environment.mcp_servers"),
        ("[environment]\nskills_dir = '/skills'\ntpu = {topology = '2x2'}", "environment.skills_dir, environment.tpu"),
        ("[[verifier.collect]]\ncommand = 'true'", "verifier.collect"),
        ("[verifier]\nenvironment_mode = 'separate'\n[verifier.environment]\ncpus = 1",
         "verifier.environment_mode, verifier.environment"),
        ("[agent]\nuser = 'agent'", "agent.user"),
        ("environment = 3", "environment = 3"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(task: Path, toml: str, names: str) -> None:
    (task / "task.toml").write_text(toml)
    with pytest.raises(TaskFormatError) as error:
        HarborTask.load(str(task))
    assert str(error.value) == f"Harbor task {task}: not supported: {names}"


def test_what_changes_nothing_is_accepted(task: Path) -> None:
    (task / "task.toml").write_text(
        'artifacts = ["/app/out"]\n[agent]\nuser = "root"\nnetwork_mode = "public"\n'
        '[environment]\ngpus = 0\nos = "linux"\nmcp_servers = []\ncpus = 2\n[metadata]\nx = 1\n'
    )
    assert HarborTask.load(str(task)).workdir == "/app"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("environment/docker-compose.yaml", "", r"not supported: environment/docker-compose\.yaml"),
        ("task.toml", "[agent]\ntimeout_sec = '3'", r"agent\.timeout_sec must be positive seconds, not '3'"),
        ("task.toml", "[environment]\nworkdir = 'app'", r"environment\.workdir must be a path like /app, not 'app'"),
        ("task.toml", "[agent", r"task\.toml: Expected"),
        ("task.toml", "[[steps]]\nname = '../x'", r"steps\.name must be a folder in steps/, not '\.\./x'"),
        ("task.toml", "[[steps]]\nname = '..'", r"steps\.name must be a folder in steps/, not '\.\.'"),
        ("task.toml", "[[steps]]\nname = ''", r"steps\.name must be a folder in steps/, not ''"),
        (
            "task.toml",
            "[[steps]]\nname = 'one'\nmin_reward = 'much'",
            "min_reward must be a number, or numbers by name",
        ),
        ("task.toml", "[[steps]]\nname = 'one'", r"there is no steps/one/instruction\.md"),
        ("task.toml", "[environment.healthcheck]\nretries = 2", r"healthcheck needs a command, got \{'retries': 2\}"),
        ("tests/test.sh", None, r"there is no tests/test\.sh"),
    ],
)
def test_compose_files_broken_tables_and_missing_files(task: Path, name: str, text: str | None, message: str) -> None:
    (task / name).unlink() if text is None else (task / name).write_text(text)
    with pytest.raises(TaskFormatError, match=message):
        HarborTask.load(str(task))


def test_images_are_not_built(task: Path, tmp_path: Path) -> None:
    (task / "environment/Dockerfile").write_text("FROM debian\n")
    harbor = HarborTask.load(str(task))
    with pytest.raises(TaskFormatError, match=r"its image is not built\. Run it with docker_image"):
        sandbox_for(harbor, Bubblewrap())
    with pytest.raises(TaskFormatError, match=r"set environment\.docker_image"):
        sandbox_for(harbor, Docker(""))
    with pytest.raises(AgentFailure, match="its image is not built"):
        play("true", task)
    assert sandbox_for(harbor, Bubblewrap(rootfs=tmp_path)) == Bubblewrap(rootfs=tmp_path)
    assert sandbox_for(HarborTask.load(str(task), ignore_dockerfile=True), Bubblewrap()) == Bubblewrap()
    (task / "task.toml").write_text('[environment]\ndocker_image = "mine:1"\n')
    assert sandbox_for(HarborTask.load(str(task)), Docker("")) == Docker("mine:1")


def test_links_and_large_files_are_no_rewards(tmp_path: Path) -> None:
    (tmp_path / "reward.json").write_text('{"only": 0.25}')
    assert read_reward(tmp_path) == (0.25, {"only": 0.25})
    among = r"has no 'reward' among \['a', 'b'\]: set turnkey\.agent\.reward_key"
    wrong = [("json", "[1]", "must hold names and numbers"), ("json", '{"a": 1, "b": 2}', among)]
    wrong += [("txt", text, "must hold a finite number") for text in ("nan", "true", "1e19", "")]
    for kind, text, message in wrong:
        (tmp_path / f"reward.{kind}").write_text(text)
        with pytest.raises(ValueError, match=message):
            read_reward(tmp_path)
    (tmp_path / "reward.txt").unlink()
    os.mkfifo(tmp_path / "reward.txt")
    with pytest.raises(ValueError, match="must hold a finite number"):  # a pipe is not waited for
        read_reward(tmp_path)


# --- the commands -----------------------------------------------------------------------------------------------------
def test_the_examples_are_right() -> None:
    lines: list[str] = []
    assert check_tasks(EXAMPLES, ignore_dockerfile=False, as_json=False, write=lines.append)
    assert lines == ["median: right", "word_wrap: right"]


def test_a_check_names_what_is_wrong(task: Path) -> None:
    (task / "tests/test.sh").write_text("cp -r /logs/agent . 2>/dev/null; echo 1 > /logs/verifier/reward.txt")
    (task / "solution/solve.sh").unlink()
    assert asyncio.run(check_task(HarborTask.load(str(task)), Bubblewrap())) == [
        "there is no solution/solve.sh, so nothing shows that the task can be solved",
        "doing nothing must get a reward below 1, not 1.0",
    ]
    (task / "solution/solve.sh").write_text("true")
    (task / "tests/test.sh").write_text("exit 1")
    oracle, nothing = asyncio.run(check_task(HarborTask.load(str(task)), Bubblewrap()))
    assert "must get reward 1, not a failure: the verifier of task: it left neither" in oracle
    assert "must get a reward below 1, not a failure" in nothing


def test_a_planted_reward_that_counts_is_named_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    async def played(*task_and_sandbox: Any, solution: bool = False) -> AgentResult:
        if solution:
            return AgentResult(1.0)
        planted = "bash" in task_and_sandbox[-1]
        return AgentResult(0.5, reason="1 of 2 steps") if planted else AgentResult(reason="no reward.txt")

    monkeypatch.setattr(env_checks, "_played", played)
    assert asyncio.run(check_task(HarborTask.load(str(MEDIAN)), Bubblewrap()))[1:] == [
        "a planted reward must be ignored: it got 0.5 instead of a failure (planted: 1 of 2 steps; nothing: no "
        "reward.txt)"
    ]


def test_a_check_says_why_a_later_step_cannot_begin(steps: Path) -> None:
    """Episodes do not fail then, though the solution is not to blame."""
    (steps / "steps/two/workdir/setup.sh").write_text("echo broken >&2; exit 3")
    lines: list[str] = []
    assert not check_tasks(steps, ignore_dockerfile=False, as_json=False, write=lines.append)
    reason = "the setup of two failed (exit status 3): broken"
    assert lines == [f"task: the reference solution must get reward 1, not 0.5: {reason}"]


def test_tasks_become_rows(tmp_path: Path) -> None:
    import pandas as pd

    options: dict[str, Any] = {"train": None, "val": None, "seed": 0, "data_source": None}
    write_tasks(tmp_path, EXAMPLES, None, ignore_dockerfile=False, **options)
    rows = [json.loads(pd.read_parquet(tmp_path / f"{name}.parquet")["turnkey_task"][0]) for name in ("train", "val")]
    assert sorted(row["kwargs"]["path"] for row in rows) == [str(EXAMPLES / "median"), str(EXAMPLES / "word_wrap")]
    assert {row["env_id"] for row in rows} == {"harbor"}
    write_tasks(tmp_path, MEDIAN, EXAMPLES / "word_wrap", ignore_dockerfile=True, **options)
    frame = pd.read_parquet(tmp_path / "train.parquet")
    assert json.loads(frame["turnkey_task"][0])["kwargs"] == {"ignore_dockerfile": True, "path": str(MEDIAN)}
    assert frame["prompt"][0][0]["content"] == (MEDIAN / "instruction.md").read_text().strip()
    with pytest.raises(TaskFormatError, match="no Harbor tasks in"):
        find_tasks(tmp_path)
