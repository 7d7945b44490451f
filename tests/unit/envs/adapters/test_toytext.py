"""gymnasium's toy-text games in words."""

import random
import subprocess
import sys

import gymnasium
import pytest
from gymnasium.envs.toy_text.frozen_lake import MAPS

from verl_turnkey.envs import make

IDS = ("turnkey/FrozenLake-v0", "turnkey/Taxi-v0", "turnkey/CliffWalking-v0")


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_wins_and_no_shorter_way_does(env_id, seed):
    env = make(env_id).unwrapped
    env.reset(seed=seed)
    plan = env.oracle()
    answers = [env.step(action) for action in plan]
    assert answers[-1][2:4] == (True, False)
    assert [answer[4]["success"] for answer in answers] == [False] * (len(plan) - 1) + [True]
    assert not any(answer[4]["invalid"] for answer in answers)


def test_the_oracle_takes_the_shortest_way():
    env = make("turnkey/FrozenLake-v0", {"map": ["SFF", "HHF", "GFF"]}).unwrapped
    env.reset(seed=0)
    assert env.oracle() == ["right", "right", "down", "down", "left", "left"]
    for limit, plan in ((None, ["up", *["right"] * 11, "down"]), (12, None)):
        env = make("turnkey/CliffWalking-v0", {"max_steps": limit}).unwrapped
        env.reset(seed=0)
        assert env.oracle() == plan


def test_a_seed_is_a_lake():
    env = make("turnkey/FrozenLake-v0", {"size": 8}).unwrapped
    lakes = set()
    for seed in range(20):
        env.reset(seed=seed)
        lakes.add(tuple(env.world.desc.astype(str).ravel()))
        assert env.oracle()
    assert len(lakes) == 20
    fixed = make("turnkey/FrozenLake-v0", {"map": "4x4"})
    assert fixed.reset(seed=1)[0] == fixed.reset(seed=2)[0]


def test_a_lake_in_words():
    env = make("turnkey/FrozenLake-v0", {"map": "4x4"})
    assert MAPS["4x4"] == ["SFFF", "FHFH", "FFFH", "HFFG"]
    observation, info = env.reset(seed=0)
    assert info["task"] == "Walk over the frozen lake to the goal. Do not step into a hole."
    assert observation == (
        "You are in row 1 of 4, column 1 of 4. left: the edge, down: ice, right: ice, up: the edge. "
        "The goal is 3 down and 3 right. "
        "Holes: 1 down and 1 right; 3 down; 1 down and 3 right; 2 down and 3 right."
    )
    assert env.step("right")[0].startswith("You are in row 1 of 4, column 2 of 4. left: ice, down: a hole, right: ice")
    observation, reward, terminated, truncated, info = env.step("down")
    assert (observation, reward, terminated, truncated) == ("You fell into a hole.", 0.0, True, False)
    assert not info["success"]
    assert "There are no holes." in make("turnkey/FrozenLake-v0", {"map": ["SF", "FG"]}).reset(seed=0)[0]


def test_the_neighbours_that_a_lake_names_are_the_ones_that_moves_lead_to():
    env = make("turnkey/FrozenLake-v0", {"size": 5})
    means = {"ice": "You are", "a hole": "You fell", "the goal": "You have reached"}
    for seed in range(10):
        for move in ("left", "down", "right", "up"):
            observation, _ = env.reset(seed=seed)
            named = observation.split(f"{move}: ")[1].split(",")[0].split(".")[0]
            after = env.step(move)[0]
            assert after == observation if named == "the edge" else after.startswith(means[named])


def test_a_slippery_lake_slips_and_has_no_oracle():
    env = make("turnkey/FrozenLake-v0", {"map": ["SFF", "FFF", "FFG"], "slippery": True}).unwrapped
    assert "slippery" in env.reset(seed=0)[1]["task"]
    assert env.oracle() is None
    after = set()
    for seed in range(20):
        env.reset(seed=seed)
        after.add(env.step("right")[4]["state_key"])
    assert len(after) == 3  # to the right, or to one of the sides: down, or nowhere at the upper edge


def test_a_taxi_in_words():
    env = make("turnkey/Taxi-v0")
    observation, _ = env.reset(seed=3)
    assert observation == (
        "The taxi is in row 1 of 5, column 3 of 5. Blocked: north, west. The passenger is at Red, 2 west. "
        "The destination is Yellow, 4 south and 2 west."
    )
    plan = env.unwrapped.oracle()
    answers = [env.step(action) for action in plan]
    assert [answer[1] for answer in answers] == [-1.0] * (len(plan) - 1) + [20.0]
    picked = answers[plan.index("pick up")][0]
    assert "The passenger is in the taxi. The destination is Yellow, 4 south." in picked
    assert answers[-1][0] == "The passenger has arrived."
    env = make("turnkey/Taxi-v0")
    observation, start = env.reset(seed=3)
    for action, cost in (("pick up", -10.0), ("drop off", -10.0), ("west", -1.0)):
        after = env.step(action)
        assert after[:4] == (observation, cost, False, False)
        assert (after[4]["invalid"], after[4]["state_key"]) == (False, start["state_key"])


def test_a_fall_off_the_cliff():
    env = make("turnkey/CliffWalking-v0")
    start, info = env.reset(seed=0)
    assert start == (
        "You are in row 4 of 4, column 1 of 12. up: ground, right: the cliff, down: the edge, left: the edge. "
        "The goal is 11 right."
    )
    observation, reward, terminated, _, after = env.step("right")
    assert observation == f"You fell off the cliff and are back at the start. {start}"
    assert (reward, terminated, after["state_key"]) == (-100.0, False, info["state_key"])
    assert env.step("up")[1] == -1.0


@pytest.mark.parametrize("env_id", IDS[1:])
def test_reward_for_success_alone(env_id):
    env = make(env_id, {"reward": "success"}).unwrapped
    env.reset(seed=0)
    plan = env.oracle()
    assert [env.step(action)[1] for action in plan] == [0.0] * (len(plan) - 1) + [1.0]


@pytest.mark.parametrize("env_id", IDS)
@pytest.mark.parametrize("action", ["nonsense", "north", "up"])
def test_an_episode_that_goes_nowhere_pays_less_than_a_win(env_id, action):
    env = make(env_id).unwrapped
    env.reset(seed=0)
    won = sum(env.step(move)[1] for move in env.oracle())
    env.reset(seed=0)
    lost, over = 0.0, False
    while not over:
        _, reward, terminated, truncated, info = env.step(action)
        lost, over = lost + reward, terminated or truncated
    assert not info["success"]
    assert lost < won


@pytest.mark.parametrize("env_id", IDS)
def test_equal_keys_are_equal_states(env_id):
    env, state_of = make(env_id), {}
    for seed in range(4):
        for rollout in range(4):
            rng = random.Random(rollout)
            _, info = env.reset(seed=seed)
            for _ in range(40):
                lake = env.unwrapped.world.desc.tobytes() if "Frozen" in env_id else b""
                state = (lake, int(env.unwrapped.world.s))
                assert state_of.setdefault(info["state_key"], state) == state
                *_, terminated, truncated, info = env.step(rng.choice(info["admissible"]))
                if terminated or truncated:
                    break
    assert len(set(state_of.values())) == len(state_of) > 10


def test_pygame_is_not_needed():
    code = (
        "import sys; sys.modules['pygame'] = None\n"
        "from verl_turnkey.envs import make\n"
        f"for id in {IDS}: env = make(id); env.reset(seed=0); env.step('up'); env.close()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_oracle_may_take_the_whole_limit_and_no_more():
    lakes = [make("turnkey/FrozenLake-v0", {"map": "4x4", "max_steps": steps}) for steps in (5, 6)]
    for lake in lakes:
        lake.reset(seed=0)
    too_short, enough = (lake.unwrapped.oracle() for lake in lakes)
    assert too_short is None
    assert len(enough) == 6
    assert [lakes[1].step(action) for action in enough][-1][1:4] == (1.0, True, False)


def test_a_taxi_drives_as_long_as_gymnasiums():
    env = make("turnkey/Taxi-v0")
    env.reset(seed=0)
    limit = next(spec.max_episode_steps for name, spec in gymnasium.registry.items() if name.startswith("Taxi-v"))
    moves = [("south", "north")[t % 2] for t in range(limit)]
    ends = [env.step(move)[2:4] for move in moves]
    assert ends[-1] == (False, True)
    assert set(ends[:-1]) == {(False, False)}
