"""AppWorld's adapter against a server of ours with the same routes: one world per server, code as actions, leases."""

import contextlib
import io
import subprocess
import sys
import traceback

import pytest
from gymnasium.utils.env_checker import check_env
from loopback import Refusal, serve

from verl_turnkey.envs import EpisodeOverError, make
from verl_turnkey.envs.adapters import appworld
from verl_turnkey.envs.http import ServerError

ID = "turnkey/AppWorld-v0"
TASKS = {"sum_1": ("How much is 20 + 22?", 42), "sum_2": ("How much is 1 + 2?", 3)}
PERSON = {"first_name": "Ann", "last_name": "Lee", "email": "ann@example.com", "phone_number": "555"}


class World:
    """What ``appworld serve environment`` does, as far as it was observed: one task at a time, others are an error."""

    def __init__(self):
        self.task, self.answer, self.names = None, None, {}
        self.routes = {f"/{name}": getattr(self, name) for name in ("initialize", "execute", "evaluate")}
        self.routes["/task_completed"] = lambda payload: self.output(payload, self.answer is not None)

    def output(self, payload, output):
        if payload["task_id"] != self.task:
            raise Refusal(500, "Internal Server Error")
        return {"output": output}

    def initialize(self, payload):
        if payload["task_id"] not in TASKS:
            raise Refusal(500, "Internal Server Error")
        self.task, self.answer = payload["task_id"], None
        self.names = {"complete_task": lambda answer: setattr(self, "answer", answer)}
        text = TASKS[self.task][0]
        return self.output(payload, {"instruction": text, "supervisor": PERSON, "datetime": "2023-05-18T12:00:00"})

    def execute(self, payload):
        printed = io.StringIO()
        try:
            code = compile(payload["code"], "<python-input>", "exec")
        except SyntaxError as error:
            return self.output(payload, f"Execution failed. Traceback:\nSyntax error in line:\n{error.text}")
        if not payload["code"].strip():
            return self.output(payload, "No code available to execute.")
        try:
            with contextlib.redirect_stdout(printed):
                exec(code, self.names)
        except Exception:
            return self.output(payload, "Execution failed. Traceback:\n" + traceback.format_exc(limit=0))
        return self.output(payload, printed.getvalue() or "Execution successful.")

    def evaluate(self, payload):
        if not payload.get("suppress_errors"):
            raise Refusal(500, "Internal Server Error")
        right = [{"requirement": "answer is right"}] if self.answer == TASKS[self.task][1] else []
        passes = [{"requirement": "nothing else changed"}, *right]
        return self.output(payload, {"success": len(passes) == 2, "num_tests": 2, "passes": passes})


@pytest.fixture(autouse=True)
def locks(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(appworld, "LEASE_SECONDS", 0.3)


@pytest.fixture
def server():
    with serve(World().routes) as (url, requests):
        yield {"urls": url, "tasks": list(TASKS)}, requests


def test_an_episode(server):
    kwargs, requests = server
    env = make(ID, kwargs)
    observation, info = env.reset(seed=2)
    assert info["task"].startswith("How much is 20 + 22?\n(Asked by Ann Lee, e-mail ann@example.com, phone 555.")
    assert observation == "Nothing has run yet."
    assert requests[0][1]["timeout_seconds"] == 20
    code = "total = 0\nfor n in (20, 22):\n    total += n\nprint(total)"
    observation, reward, terminated, truncated, info = env.step(code)
    assert requests[1] == ("/execute", {"task_id": "sum_1", "code": code})
    assert (observation, reward, terminated, info["invalid"]) == ("42\n", 0.0, False, False)
    observation, reward, terminated, truncated, info = env.step("Done:\n```python \ncomplete_task(total)\n")
    assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
    with pytest.raises(EpisodeOverError):
        env.step("print(1)")


def test_gymnasium_accepts_it(server):
    check_env(make(ID, server[0]).unwrapped, skip_render_check=True)


@pytest.mark.parametrize(("reward", "expected"), [("success", 0.0), ("tests", 0.5)])
def test_a_wrong_answer(server, reward, expected):
    env = make(ID, {**server[0], "reward": reward})
    env.reset(seed=1)
    _, earned, over, _, info = env.step("complete_task(0)")
    assert (earned, over, info["success"]) == (expected, True, False)


def test_the_key_is_the_code_that_has_run(server):
    env = make(ID, server[0])

    def key_after(seed, *codes):
        _, info = env.reset(seed=seed)
        for code in codes:
            *_, info = env.step(code)
        return info["state_key"]

    assert (
        key_after(0, "x = 1", "y = 2") == key_after(2, "```\nx = 1\n```", "y = ", "y = 2", "") != key_after(0, "x = 1")
    )
    assert key_after(0) != key_after(1)
    assert key_after(0, "1 / 0") != key_after(0)


def test_code_that_did_not_run_is_invalid_and_code_that_failed_is_not(server):
    env = make(ID, {**server[0], "max_steps": 5})
    env.reset(seed=0)
    odd = ("for", "# nothing\x00", "print('\ud83d')", "-" * 100_000 + "1")
    for code, invalid in (*((code, True) for code in odd), ("print(missing)", False)):
        observation, reward, terminated, truncated, info = env.step(code)
        assert (reward, terminated, info["invalid"]) == (0.0, False, invalid), observation
    assert truncated


def test_long_output_is_cut_in_the_middle(server):
    env = make(ID, {**server[0], "max_output": 100})
    env.reset(seed=0)
    observation, *_ = env.step("print('a' * 1_000_000 + 'b' * 50)")
    assert observation == "a" * 50 + "\n... 999951 characters left out ...\n" + "b" * 49 + "\n"


def test_each_instance_has_a_server_of_its_own():
    with serve(World().routes) as (url, requests), serve(World().routes) as (other_url, other_requests):
        kwargs = {"urls": [url, other_url], "tasks": ["sum_1"]}
        first, second, third = (make(ID, kwargs) for _ in range(3))
        first.reset(seed=0)
        second.reset(seed=0)
        first.step("complete_task(42)")
        assert not second.step("print(1)")[2]
        assert requests[0][1]["experiment_name"] != other_requests[0][1]["experiment_name"]
        with pytest.raises(ServerError, match=r"2 of 2 are in use .* lower turnkey\.env\.instances_per_host"):
            third.reset(seed=0)
        first.reset(seed=1)  # it keeps its server
        first.close()
        third.reset(seed=0)
        assert third.step("complete_task(42)")[1] == 1.0
        assert second.step("complete_task(42)")[1] == 1.0


def test_a_lease_ends_with_its_process_and_a_dead_server_is_passed_over(server, tmp_path):
    code = f"""
from verl_turnkey.envs import make
env = make({ID!r}, {server[0]!r})
env.reset(seed=0)
print("leased", flush=True)
input()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "leased\n"
        with pytest.raises(ServerError, match="1 of 1 are in use"):
            make(ID, server[0]).reset(seed=0)
        other.kill()
    env = make(ID, {**server[0], "urls": ["http://127.0.0.1:1", server[0]["urls"]]})
    env.reset(seed=0)
    env.close()
    with pytest.raises(ServerError, match=r"1 cannot be reached: http://127\.0\.0\.1:1 \("):
        make(ID, {**server[0], "urls": "http://127.0.0.1:1"}).reset(seed=0)


def test_tasks_from_a_file_and_a_task_that_the_server_lacks(server, tmp_path):
    (tmp_path / "train.txt").write_text("sum_2\n\nsum_1\n")
    env = make(ID, {**server[0], "tasks": str(tmp_path / "train.txt")})
    assert [env.reset(seed=seed)[1]["task"][:16] for seed in range(3)] == [
        "How much is 1 + ", "How much is 20 +", "How much is 1 + ",
    ]  # fmt: skip
    env.close()
    with pytest.raises(ServerError, match="answered 500"):
        make(ID, {**server[0], "tasks": ["sum_9"]}).reset(seed=0)


def test_a_range_of_ports_is_a_server_each():
    assert appworld._expand("http://h:9000-9002/") == [f"http://h:{port}" for port in (9000, 9001, 9002)]


def test_something_else_on_that_port():
    with serve({"/initialize": lambda payload: ["hello"]}) as (url, _), pytest.raises(ServerError, match="as AppWorld"):
        make(ID, {"urls": url, "tasks": ["sum_1"]}).reset(seed=0)
