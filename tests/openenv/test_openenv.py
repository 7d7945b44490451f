"""The OpenEnv client against servers of the package itself, on loopback: a frozen lake, and a box of MCP tools."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters.openenv import OpenEnvText
from verl_turnkey.envs.http import ServerError

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
LAKES = (("SF", "FH", "FG"), ("SFF", "HHF", "GFF"))


class Move(Action):
    message: str
    repeat: int = 1


class View(Observation):
    board: tuple[str, ...] = ()
    row: int = 0
    column: int = 0
    message: str = ""
    task: dict[str, str]
    solved: bool = False
    out_of_time: bool = False


class Lake(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, lake: int | None = None) -> View:
        self.board = LAKES[(seed or 0) % len(LAKES) if lake is None else lake]
        self.at, self.steps = (0, 0), 0
        return self.view()

    def step(self, action: Move, timeout_s: float | None = None) -> View:
        if action.message == "break":
            raise RuntimeError("the ice machine is broken")
        if action.message == "sleep":
            time.sleep(2)
        self.steps += 1
        for _ in range(action.repeat):
            dy, dx = MOVES.get(action.message, (0, 0))
            self.at = (
                min(max(self.at[0] + dy, 0), len(self.board) - 1),
                min(max(self.at[1] + dx, 0), len(self.board[0]) - 1),
            )
        return self.view(action.message if action.message not in MOVES else "")

    def view(self, message: str = "") -> View:
        here = self.board[self.at[0]][self.at[1]]
        late = self.steps >= 8
        return View(
            board=self.board,
            row=self.at[0],
            column=self.at[1],
            message=message,
            task={"text": "Reach G."},
            solved=here == "G",
            out_of_time=late and here not in "GH",
            done=here in "GH" or late,
            reward=float(here == "G") if here in "GH" else None,
            metadata={"note": str(self.steps)},
        )

    @property
    def state(self) -> State:
        return State(step_count=self.steps)


class Boxes(MCPEnvironment):
    """A coin in one of three boxes, and two tools; who takes it gets the reward."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("boxes")

        @tools.tool
        def look(box: int) -> str:
            """Look into
            a box."""
            return "a coin" if box == self.place else "nothing"

        @tools.tool
        def take(box: int) -> dict:
            """Take what is in a box."""
            self.taken = box == self.place
            return {"taken": self.taken}

        super().__init__(tools)
        self.place, self.taken = 0, False

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self.place, self.taken = (seed or 0) % 3, False
        return Observation(metadata={"task": "Take the coin.", "at": time.monotonic()})

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError("tools only")

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        observation = await super().step_async(action, timeout_s, **kwargs)
        observation.done = self.taken
        observation.reward = float(self.taken)
        return observation

    @property
    def state(self) -> State:
        return State()


@contextlib.contextmanager
def serving(app: Any, port: int) -> Iterator[str]:
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


def lake_app(sessions: int = 16) -> Any:
    return create_fastapi_app(Lake, Move, View, max_concurrent_envs=sessions)


@pytest.fixture(scope="module")
def url(free_port):
    with serving(lake_app(), free_port()) as url:
        yield url


@pytest.fixture
def env(url):
    env = OpenEnvText(url, fields=FIELDS, max_steps=20)
    yield env
    env.close()


FIELDS = {"observation": "board", "task": "task.text", "success": "solved", "truncated": "out_of_time"}


def test_a_lake_is_crossed(env):
    observation, info = env.reset(seed=0)
    assert observation == '["SF", "FH", "FG"]'
    assert info["task"] == "Reach G."
    answers = [env.step(action) for action in ["down", "down", "right"]]
    assert [answer[1:4] for answer in answers] == [(0.0, False, False), (0.0, False, False), (1.0, True, False)]
    assert [answer[4]["success"] for answer in answers] == [False, False, True]
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("down")


def test_a_hole_ends_the_episode_without_success(env):
    env.reset(seed=0)
    env.step("right")
    _, reward, terminated, truncated, info = env.step("down")
    assert (reward, terminated, truncated, info["success"]) == (0.0, True, False, False)


@pytest.mark.parametrize("name", ["success", "won"])
def test_a_text_is_no_flag(url, name):
    env = OpenEnvText(url, fields={name: "task.text"})
    try:
        with pytest.raises(TypeError, match=r"fields=\{'success': 'task.text'\} must be true or false, not 'Reach G.'"):
            env.reset(seed=0)
    finally:
        env.close()


def test_without_fields_all_of_them_are_shown_and_a_reward_means_success(url):
    env = OpenEnvText(url)
    try:
        observation, info = env.reset(seed=0)
        lines = observation.split("\n")
        assert lines[:3] == ['board: ["SF", "FH", "FG"]', "row: 0", "column: 0"]
        assert not any("note" in line for line in lines)
        assert info["task"] == ""
        for action in ["down", "down"]:
            assert not env.step(action)[4]["success"]
        assert env.step("right")[4]["success"]
    finally:
        env.close()


def test_seeds_reproduce_in_sessions_side_by_side(env, url):
    other = OpenEnvText(url, fields=FIELDS, max_steps=20)

    def play(env: OpenEnvText, seed: int) -> list:
        seen = [env.reset(seed=seed)]
        for action in random.Random(seed).choices(list(MOVES), k=6):
            seen.append(env.step(action))
            if seen[-1][2] or seen[-1][3]:
                break
        return seen

    state = random.getstate()
    try:
        other.reset(seed=5)
        first = [play(env, seed) for seed in (3, 4, 7)]
        other.step("down")  # its own session, its own board
        assert [play(other, seed) for seed in (7, 3, 4)] == [first[2], first[0], first[1]]
    finally:
        other.close()
    assert env.reset(seed=0)[0] != env.reset(seed=1)[0]
    assert random.getstate() == state


def test_state_key_repeats_exactly_where_the_state_does(env):
    _, info = env.reset(seed=0)
    keys = [info["state_key"]] + [env.step(action)[4]["state_key"] for action in ["down", "up", "left"]]
    assert keys[0] == keys[2] == keys[3]
    assert keys[1] != keys[0]


def test_a_path_to_the_state(url):
    env = OpenEnvText(url, fields={"state_key": "row"})
    try:
        _, info = env.reset(seed=1)
        assert env.step("right")[4]["state_key"] == info["state_key"]
        assert env.step("down")[4]["state_key"] != info["state_key"]
    finally:
        env.close()


def test_the_two_ends_are_told_apart(env):
    env.reset(seed=0)
    answers = [env.step("up") for _ in range(8)]
    assert answers[-1][2:4] == (False, True)
    assert not any(answer[2] or answer[3] for answer in answers[:-1])
    env.max_steps = 2
    env.reset(seed=0)
    assert [env.step("up")[3] for _ in range(2)] == [False, True]


def test_actions_of_several_fields_and_actions_in_json(url):
    whole = OpenEnvText(url, action={"message": "{action}", "repeat": 2, "metadata": {"said": ["{action}"]}})
    bare = OpenEnvText(url, action=None)
    try:
        whole.reset(seed=0)
        assert "row: 2" in whole.step("down")[0]
        _, info = bare.reset(seed=0)
        for wrong in ["down", "[1]", '{"mesage": "down"}', '{"message": "down", "repeat": "x"}', "[" * 100_000]:
            answer = bare.step(wrong)
            assert answer[4]["invalid"]
            assert answer[4]["state_key"] == info["state_key"]
        observation, *_, info = bare.step('{"message": "down", "repeat": 2}')
        assert "row: 2" in observation
        assert not info["invalid"]
    finally:
        whole.close()
        bare.close()


@pytest.mark.parametrize("text", ["", "\x00\u202e☃", "x" * 100_000, '{"a": "{action}"}', "\ud800"])
def test_any_text_reaches_the_environment(url, text):
    env = OpenEnvText(url, fields={"observation": "message"})
    try:
        env.reset(seed=0)
        assert env.step(text)[0] == text.encode("utf-8", "replace").decode()
    finally:
        env.close()


def test_an_environment_that_raises_ends_its_episode_only(env):
    env.reset(seed=0)
    with pytest.raises(ServerError, match="the ice machine is broken"):
        env.step("break")
    env.reset(seed=0)
    assert env.step("down")[1] == 0.0


def test_a_slow_answer_is_given_up(url):
    env = OpenEnvText(url, timeout=0.5)
    try:
        env.reset(seed=0)
        with pytest.raises(ServerError, match="TimeoutError"):
            env.step("sleep")
        assert "row: 0" in env.reset(seed=0)[0]
    finally:
        env.close()


def test_arguments_of_reset(url):
    env = OpenEnvText(url, reset={"lake": 1}, fields={"observation": "board"})
    try:
        assert env.reset(seed=0)[0] == '["SFF", "HHF", "GFF"]'
    finally:
        env.close()


def test_a_full_server_a_stopped_one_and_one_that_comes_back(free_port):
    port = free_port()
    first, second = OpenEnvText(f"http://127.0.0.1:{port}"), OpenEnvText(f"http://127.0.0.1:{port}/")
    with pytest.raises(ServerError, match=rf"http://127\.0\.0\.1:{port}.*is it running"):
        first.reset(seed=0)
    try:
        with serving(lake_app(sessions=1), port):
            first.reset(seed=0)
            with pytest.raises(ServerError, match="max_concurrent_envs"):
                second.reset(seed=0)
            first.close()
            deadline = time.monotonic() + 10
            while True:  # the server needs a moment to see that the session is over
                with contextlib.suppress(ServerError):
                    second.reset(seed=0)
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
        with pytest.raises(ServerError):
            second.step("down")
        with serving(lake_app(), port):
            second.reset(seed=0)
            second.step("down")
    finally:
        first.close()
        second.close()


def test_tools(free_port):
    app = create_fastapi_app(Boxes, CallToolAction, CallToolObservation, max_concurrent_envs=4)
    with serving(app, free_port()) as url:
        env = make("turnkey/OpenEnv-v0", {"url": url, "tools": True, "fields": {"task": "metadata.task"}})
        _, info = env.reset(seed=1)
        assert info["task"].startswith("Take the coin.\nTools:\n- look: Look into a box. Arguments: {")
        start = info["state_key"]
        for wrong in ["look", '{"name": "lok"}', '{"name": "look", "arguments": []}']:
            assert env.step(wrong)[4]["invalid"]
        observation, *_, info = env.step('{"name": "look", "arguments": {"bx": 1}}')
        assert observation.startswith("Error: ")
        assert info["invalid"]
        assert info["state_key"] == start
        observation, reward, *_, info = env.step(call("look", 0))
        assert (observation, reward, info["invalid"]) == ("nothing", 0.0, False)
        seen = info["state_key"]
        assert env.step(call("look", 1))[0] == "a coin"
        observation, reward, terminated, truncated, info = env.step(call("take", 1))
        assert json.loads(observation) == {"taken": True}
        assert (reward, terminated, truncated, info["success"]) == (1.0, True, False, True)
        assert env.reset(seed=1)[1]["state_key"] == start
        assert env.step(call("look", 0))[4]["state_key"] == seen
        env.close()


def call(tool: str, box: int) -> str:
    return json.dumps({"name": tool, "arguments": {"box": box}})


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"url": "localhost:8000"}, "url must be a URL"),
        ({"action": ""}, "field's name"),
        ({"action": {"message": "go"}}, "{action}"),
        ({"fields": {"observtion": "board"}}, "did you mean 'observation'"),
        ({"timeout": 0}, "positive number"),
        ({"max_steps": 0}, "positive integer"),
        ({"fileds": {}}, "did you mean 'fields'"),
    ],
)
def test_bad_arguments(kwargs, words):
    with pytest.raises(EnvironmentKwargsError, match=words):
        make("turnkey/OpenEnv-v0", {"url": "http://127.0.0.1:9", **kwargs})
