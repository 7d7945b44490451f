"""MiniGrid as text: words, keys, seeds, limits, and that the words are enough to win."""

import copy
import random
from collections import deque
from functools import cache

import pytest
from env_cases import play
from minigrid.utils.baby_ai_bot import BabyAIBot

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.errors import EnvironmentKwargsError

WORDS = list(ACTIONS)


@cache
def shortest_plan(seed: int) -> list[str]:
    """Breadth-first search over deep copies, states told apart by their key."""
    env = make("turnkey/MiniGrid-v0").unwrapped
    env.reset(seed=seed)
    todo, known = deque([(env, [])]), {env._state_key()}
    while todo:
        here, path = todo.popleft()
        for action in WORDS:
            there = copy.deepcopy(here)
            *_, info = there.step(action)
            if info["success"]:
                return [*path, action]
            if info["state_key"] not in known:
                known.add(info["state_key"])
                todo.append((there, [*path, action]))
    raise AssertionError("no way to win")


def test_observation_in_words():
    env = make("turnkey/MiniGrid-v0")
    observation, info = env.reset(seed=3)
    assert env.unwrapped.grid_env.pprint_grid() == "WGWGWGWGWG\nWG  LY  WG\nWG>>WG  WG\nWGKYWGGGWG\nWGWGWGWGWG"
    assert observation == (
        "Free steps: 0 ahead, 1 left, 0 right. You see a yellow key 1 step right; "
        "a locked yellow door 1 step forward and 1 step left. You carry nothing."
    )
    assert info["task"] == "use the key to open the door and then get to the goal"
    for action in ["turn right", "pick up", "turn left", "turn left", "go forward", "turn right"]:
        observation, *_ = env.step(action)
    assert observation == (
        "Free steps: 0 ahead, 0 left, 2 right. You see a locked yellow door directly ahead. You carry a yellow key."
    )
    observation, *_ = env.step("toggle")
    assert observation.startswith("Free steps: 2 ahead")
    assert "an open yellow door directly ahead" in observation


@pytest.mark.parametrize("seed", [0, 1])
def test_doorkey_is_won_by_words_alone(seed):
    env, plan = make("turnkey/MiniGrid-v0"), shortest_plan(seed)
    env.reset(seed=seed)
    answers = [env.step(action) for action in plan]
    assert [answer[1] for answer in answers] == [0.0] * (len(plan) - 1) + [1.0]
    assert answers[-1][2:4] == (True, False)
    assert answers[-1][4]["success"]


@pytest.mark.parametrize("level", ["BabyAI-GoToLocal-v0", "BabyAI-UnlockLocal-v0", "BabyAI-PickupLoc-v0"])
def test_babyai_bot_wins_by_words(level):
    word_of = {number: word for word, number in ACTIONS.items()}
    env = make("turnkey/MiniGrid-v0", {"level": level})
    for seed in range(3):
        env.reset(seed=seed)
        bot, action, won = BabyAIBot(env.unwrapped.grid_env), None, False
        for _ in range(60):
            action = bot.replan(action)
            _, reward, terminated, _, info = env.step(word_of[action])
            if terminated:
                won = info["success"] and reward == 1.0
                break
        assert won


def test_another_seed_is_another_episode():
    actions = random.Random(1).choices(WORDS, k=40)
    assert play(make("turnkey/MiniGrid-v0"), 8, actions) != play(make("turnkey/MiniGrid-v0"), 7, actions)


def test_state_key_repeats_exactly_where_the_state_repeats():
    env = make("turnkey/MiniGrid-v0")
    _, info = env.reset(seed=3)
    keys = [info["state_key"]] + [env.step("turn left")[4]["state_key"] for _ in range(4)]
    assert keys[0] == keys[4]
    assert len(set(keys)) == 4
    env.step("turn right")
    assert env.step("pick up")[4]["state_key"] not in keys  # the same pose with a key in hand
    assert env.step("drop")[4]["state_key"] == keys[3]


def test_state_key_knows_the_progress_of_an_instruction_in_two_parts():
    env = make("turnkey/MiniGrid-v0", {"level": "BabyAI-GoToSeqS5R2-v0"})
    env.reset(seed=0)
    before = env.unwrapped._state_key()
    env.unwrapped.grid_env.instrs.a_done = "success"
    assert env.unwrapped._state_key() != before


def test_an_action_is_read_whatever_its_case_and_spaces():
    env = make("turnkey/MiniGrid-v0")
    env.reset(seed=0)
    assert not env.step("Turn  LEFT\n")[4]["invalid"]


def test_time_decay_is_minigrids_own_reward():
    env = make("turnkey/MiniGrid-v0", {"reward": "time_decay", "max_steps": 50})
    plan = shortest_plan(1)
    env.reset(seed=1)
    assert [env.step(action) for action in plan][-1][1] == pytest.approx(1 - 0.9 * len(plan) / 50)
    env = make("turnkey/MiniGrid-v0", {"max_steps": len(plan)})
    env.reset(seed=1)
    assert [env.step(action) for action in plan][-1][2:4] == (True, False)


def test_done_is_offered_only_where_it_means_something():
    assert "done" not in make("turnkey/MiniGrid-v0").reset(seed=0)[1]["admissible"]
    assert "done" in make("turnkey/MiniGrid-v0", {"level": "MiniGrid-GoToDoor-5x5-v0"}).reset(seed=0)[1]["admissible"]


def test_lava_ends_an_episode_without_a_success():
    env = make("turnkey/MiniGrid-v0", {"level": "MiniGrid-LavaGapS5-v0", "reward": "success"})
    rng = random.Random(0)
    ends = set()
    for seed in range(20):
        env.reset(seed=seed)
        over = cut = False
        while not (over or cut):
            _, reward, over, cut, info = env.step(rng.choice(WORDS))
        assert info["success"] == (reward > 0)
        ends.add((over, info["success"]))
    assert (True, False) in ends, "nobody fell into the lava"
    assert (True, True) in ends, "nobody reached the goal"


def test_words_that_are_no_action_use_up_the_levels_own_time():
    env = make("turnkey/MiniGrid-v0", {"reward": "time_decay"})
    env.reset(seed=1)
    limit = env.unwrapped.grid_env.max_steps
    plan = shortest_plan(1)
    for _ in range(10):
        *_, info = env.step("dance")
        assert info["invalid"]
    rewards = [env.step(action)[1] for action in plan]
    assert rewards[-1] == pytest.approx(1 - 0.9 * (10 + len(plan)) / limit)
    env.reset(seed=1)
    ends = [env.step("dance")[2:4] for _ in range(limit)]
    assert ends == [(False, False)] * (limit - 1) + [(False, True)]


def test_a_level_as_pictures():
    """The words tell nothing but what is carried; the picture is of the view, and decides where no key is given."""
    drawn = make("turnkey/MiniGrid-v0", {"images": True, "tile": 4})
    written = make("turnkey/MiniGrid-v0")
    text, info = drawn.reset(seed=3)
    assert (text, info["task"]) == ("You carry nothing.", written.reset(seed=3)[1]["task"])
    (first,) = info["images"]
    assert (first.shape, first.dtype) == ((28, 28, 3), "uint8")
    for action in ["turn right", "pick up", "turn left"]:
        text, *_, info = drawn.step(action)
        other = written.step(action)[-1]
        assert info["state_key"] == other["state_key"]
        assert "images" not in other
    assert text == "You carry a yellow key."
    assert (info["images"][0] != first).any()
    again = make("turnkey/MiniGrid-v0", {"images": True, "tile": 4}).reset(seed=3)[1]["images"]
    assert (again[0] == first).all()


@pytest.mark.parametrize(("kwargs", "words"), [({"images": 1}, "images must be true"), ({"tile": 0}, "tile must be")])
def test_arguments_of_pictures_are_checked(kwargs, words):
    with pytest.raises(EnvironmentKwargsError, match=words):
        make("turnkey/MiniGrid-v0", kwargs)
