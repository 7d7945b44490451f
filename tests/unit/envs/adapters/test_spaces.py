"""Environments with gymnasium's ordinary spaces, in words."""

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from env_cases import play
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs import EnvironmentKwargsError, UnknownEnvironmentError, make
from verl_turnkey.envs.adapters.spaces import how_to_write, read, rendered
from verl_turnkey.envs.base import turn_limit

ID = "turnkey/Gymnasium-v0"
CART = {
    "env": "CartPole-v1",
    "actions": ["left", "right"],
    "names": ["position", "velocity", "angle", "spin"],
    "task": "Balance the pole.",
}
ROBOT = spaces.Dict(
    {
        "gear": spaces.Discrete(3),
        "arm": spaces.Dict({"joints": spaces.Box(-1, 1, (2,)), "grip": spaces.MultiBinary(2)}),
        "note": spaces.Text(20),
    }
)


class Robot(gymnasium.Env):
    """A robot with nested spaces on both sides: the observation is the action before it."""

    observation_space = action_space = ROBOT

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        first = {"gear": 0, "arm": {"joints": np.zeros(2, np.float32), "grip": np.zeros(2, np.int8)}, "note": "ready"}
        return first, {"task": "Take it."}

    def step(self, action):
        done = bool(action["arm"]["grip"].all())
        return action, float(done), done, False, {"is_success": done}


@pytest.fixture(autouse=True)
def robot() -> Iterator[None]:
    gymnasium.register("my/Robot-v0", entry_point=Robot)
    yield
    gymnasium.registry.pop("my/Robot-v0")


def test_gymnasium_accepts_it():
    check_env(make(ID, {"env": "my/Robot-v0"}).unwrapped, skip_render_check=True)


def test_an_episode_in_words():
    env = make(ID, CART)
    text, info = env.reset(seed=1)
    assert info["task"] == "Balance the pole.\nAn action is one of left, right."
    assert info["admissible"] == ["left", "right"]
    raw, _ = gymnasium.make("CartPole-v1").reset(seed=1)
    assert [float(part.split()[1]) for part in text.split(", ")] == pytest.approx(raw.tolist(), abs=6e-4)
    after, reward, terminated, *_, info = env.step("LEFT")
    assert (reward, terminated, info["invalid"]) == (1.0, False, False)
    same, reward, *_, info = env.step("jump")
    assert (same, reward, info["invalid"]) == (after, 0.0, True)


def test_equal_seeds_are_equal_episodes():
    actions = ["left", "right", "left", "left"]
    assert play(make(ID, CART), 3, actions) == play(make(ID, CART), 3, actions) != play(make(ID, CART), 4, actions)


def test_the_wrapped_limit_truncates_and_a_return_solves():
    env = make(ID, {**CART, "solved": 3, "env_kwargs": {"max_episode_steps": 3}})
    env.reset(seed=1)
    answers = [env.step(action) for action in ("left", "right", "left")]
    assert [answer[3] for answer in answers] == [False, False, True]
    assert [answer[4]["success"] for answer in answers] == [False, False, True]
    assert turn_limit(env) == 3
    assert turn_limit(make(ID, {**CART, "max_steps": 2, "env_kwargs": {"max_episode_steps": 3}})) == 2


def test_nested_spaces_are_read_as_json():
    env = make(ID, {"env": "my/Robot-v0", "digits": 1, "names": {"gear": ["low", "mid", "high"]}})
    text, info = env.reset(seed=0)
    assert text == "arm.grip: 0 0\narm.joints: 0.0 0.0\ngear: low\nnote: ready"
    assert info["task"].startswith('Take it.\nAn action is a JSON object with "arm" (a JSON object with "grip" (2 ')
    action = {"gear": 2, "arm": {"joints": [0.5, -1], "grip": "1 1"}, "note": "taken"}
    text, reward, terminated, _, info = env.step(json.dumps(action))
    assert text == "arm.grip: 1 1\narm.joints: 0.5 -1.0\ngear: high\nnote: taken"
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize(
    "action", ["go", "{}", "[1]", '{"gear": 2}', '{"gear": 9, "arm": {"joints": [0, 0], "grip": [0, 0]}, "note": ""}']
)
def test_what_is_no_action_leaves_everything_as_it_was(action):
    env = make(ID, {"env": "my/Robot-v0"})
    before, _ = env.reset(seed=0)
    after, reward, terminated, _, info = env.step(action)
    assert (after, reward, terminated, info["invalid"]) == (before, 0.0, False, True)


SAMPLES: list[tuple[Any, str, Any, str]] = [
    (spaces.Discrete(4), "3", 3, "an integer from 0 to 3"),
    (spaces.Discrete(4, start=2), "5", 5, "an integer from 2 to 5"),
    (spaces.MultiDiscrete([3, 2]), "2, 1", [2, 1], "2 integers, separated by spaces, from 0 to 2, 1"),
    (spaces.MultiBinary(3), "1 0 1", [1, 0, 1], "3 numbers, each 0 or 1, separated by spaces"),
    (spaces.Box(-2, 2, (1,)), "-0.5", [-0.5], "a number from -2 to 2"),
    (spaces.Box(0, np.array([1.0, 9.0])), "(1, 5)", [1, 5], "2 numbers, separated by spaces"),
    (spaces.Text(5), "hello", "hello", "a text"),
    (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), '[1, "ab"]', (1, "ab"), "a JSON list with "),
]


@pytest.mark.parametrize(("space", "text", "value", "how"), SAMPLES, ids=[str(sample[0]) for sample in SAMPLES])
def test_a_space_is_read_and_described(space, text, value, how):
    action = read(space, text, ())
    assert space.contains(action)
    np.testing.assert_equal(action if isinstance(value, str | tuple) else np.asarray(action).tolist(), value)
    assert how_to_write(space, ()).startswith(how)


@pytest.mark.parametrize(("space", "text"), [
    (spaces.Discrete(4), "4"), (spaces.MultiDiscrete([3, 2]), "2"), (spaces.MultiBinary(2), "0 2"),
    (spaces.Box(-2, 2, (1,)), "2.1"), (spaces.Box(-2, 2, (1,)), "nan"), (spaces.Text(2), "abc"),
])  # fmt: skip
def test_what_is_not_in_a_space_is_refused(space, text):
    with pytest.raises(ValueError, match=r"."):
        read(space, text, ())


def test_zero_has_no_sign_and_matrices_have_rows():
    assert rendered(spaces.Box(-1, 1, (2,)), np.array([-0.0, -0.0004]), (), 3) == "0.000 0.000"
    assert rendered(spaces.Box(0, 9, (2, 2), np.int64), np.array([[1, 2], [3, 4]]), (), 3) == "\n1 2\n3 4"


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"env": "CartPol-v1"}, UnknownEnvironmentError, "did you mean 'CartPole-v1'"),
        ({**CART, "actions": ["left"]}, EnvironmentKwargsError, "names of the action space: expected a list of 2"),
        ({**CART, "names": {"x": ["a"]}}, EnvironmentKwargsError, "there is no 'x', it has no parts"),
        ({"env": "my/Robot-v0", "names": {"gaer": []}}, EnvironmentKwargsError, "its parts are arm.grip, arm.joints"),
        ({**CART, "digits": -1}, EnvironmentKwargsError, "digits must be"),
        ({}, EnvironmentKwargsError, "needs 'env'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kwargs, error, words):
    with pytest.raises(error, match=words):
        make(ID, kwargs)


def test_a_picture_needs_a_function_that_describes_it(tmp_path, monkeypatch):
    class Camera(gymnasium.Env):
        observation_space = spaces.Box(0, 255, (64, 64, 3), np.uint8)
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full((64, 64, 3), 7, np.uint8), {"action_mask": np.array([0, 1], np.int8)}

    gymnasium.register("my/Camera-v0", entry_point=Camera)
    try:
        with pytest.raises(EnvironmentKwargsError, match=r"12288 .* not text.*set images=true, or observation"):
            make(ID, {"env": "my/Camera-v0"})
        (tmp_path / "describe.py").write_text("def brightness(image):\n    return f'brightness {image.mean():.0f}'\n")
        monkeypatch.syspath_prepend(tmp_path)
        text, info = make(ID, {"env": "my/Camera-v0", "observation": "describe:brightness"}).reset(seed=0)
        assert (text, info["admissible"]) == ("brightness 7", ["1"])
        text, info = make(ID, {"env": "my/Camera-v0", "images": True}).reset(seed=0)
        assert (text, info["state_key"], [image.shape for image in info["images"]]) == ("", None, [(64, 64, 3)])
    finally:
        gymnasium.registry.pop("my/Camera-v0")


def test_the_parts_that_are_images_are_shown_and_the_others_told():
    class Robot(gymnasium.Env):
        eye = spaces.Box(0, 255, (8, 8, 3), np.uint8)
        observation_space = spaces.Dict({"arm": spaces.Discrete(3), "eyes": spaces.Tuple([eye, spaces.Text(9), eye])})
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            left, right = (np.full((8, 8, 3), shade, np.uint8) for shade in (1, 2))
            return {"arm": 2, "eyes": (left, "both", right)}, {}

    gymnasium.register("my/Eyes-v0", entry_point=Robot)
    try:
        text, info = make(ID, {"env": "my/Eyes-v0", "images": True}).reset(seed=0)
        assert (text, [image.max() for image in info["images"]]) == ("arm: 2\neyes.1: both", [1, 2])
        with pytest.raises(EnvironmentKwargsError, match="no part of the observation space is a Box of uint8"):
            make(ID, {**CART, "images": True})
    finally:
        gymnasium.registry.pop("my/Eyes-v0")
