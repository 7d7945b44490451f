"""Errands in a house."""

import pytest

from verl_turnkey.envs import make
from verl_turnkey.envs.base import shortest_plan

ID = "turnkey/Errands-v0"
HARD = {"errands": 2, "hint": False, "cupboards": True, "max_steps": 24}
KWARGS = ({}, HARD, {"rooms": 10, "things": 30, "errands": 12, "max_steps": None}, {"rooms": 2, "things": 1})


def house(kwargs=(), seed=0):
    env = make(ID, dict(kwargs)).unwrapped
    observation, info = env.reset(seed=seed)
    return env, observation, info


@pytest.mark.parametrize("kwargs", KWARGS)
@pytest.mark.parametrize("seed", range(5))
def test_the_oracle_wins(kwargs, seed):
    env, _, info = house(kwargs, seed)
    plan = env.oracle()
    answers = [env.step(action) for action in plan]
    assert [answer[4]["success"] for answer in answers] == [False] * (len(plan) - 1) + [True]
    assert answers[-1][2:4] == (True, False)
    assert sum(answer[1] for answer in answers) == pytest.approx(1)
    assert not any(answer[4]["invalid"] for answer in answers)
    assert info["task"].count("wants") == kwargs.get("errands", 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kwargs", [{}, {"cupboards": True}])
def test_no_way_is_shorter_than_that_of_the_oracle(kwargs, seed):
    def moves(actions):
        replay, _, info = house(kwargs, seed)
        for action in actions:
            info = replay.step(action)[4]
        for action in info["admissible"] or ():
            after, _, _ = house(kwargs, seed)
            answers = [after.step(move) for move in (*actions, action)]
            if not (answers[-1][2] and not answers[-1][4]["success"]):
                yield action, (*actions, action), answers[-1][4]["success"]

    env, _, _ = house({**kwargs, "max_steps": None}, seed)
    assert len(shortest_plan((), moves)) == len(env.oracle())


def test_the_oracle_knows_when_there_is_too_little_time():
    assert house({"max_steps": 3})[0].oracle() is None


def test_what_nobody_wants_ends_the_episode():
    env, _, _ = house()
    wanted = next(iter(env.wanted))
    thing = next(thing for thing in env.location if thing != wanted)
    for action in (f"go {env.location[thing]}", f"take {thing}", "go hall"):
        env.step(action)
    observation, reward, terminated, _, info = env.step(f"give {thing}")
    assert (reward, terminated, info["success"]) == (0.0, True, False)
    assert observation.startswith(f"Nobody here wants the {thing}.")


def test_a_thing_can_be_left_in_another_room():
    env, _, _ = house()
    thing, first = next(iter(env.location.items()))
    other = next(room for room in env.rooms if room != first)
    for action in (f"go {first}", f"take {thing}", "go hall", f"go {other}"):
        env.step(action)
    observation, *_, info = env.step(f"drop {thing}")
    assert env.location[thing] == other
    assert thing in observation
    assert f"take {thing}" in info["admissible"]


def test_a_closed_cupboard_hides_what_is_in_the_room():
    env, observation, info = house(HARD)
    assert not any(f"{thing} from" in info["task"] for thing in env.wanted)
    observation, *_, info = env.step(f"go {env.rooms[0]}")
    assert "closed" in observation
    assert info["admissible"] == ["go hall", "open cupboard"]
    observation, *_, info = env.step("open cupboard")
    assert all(thing in observation for thing in env.visible())
    assert len(env.visible()) >= 1


@pytest.mark.parametrize("action", ["", "go", "go nowhere", "take hall", "give rope", "open cupboard", "drop"])
def test_anything_else_is_invalid_and_changes_nothing(action):
    env, _, before = house()
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated, info["invalid"]) == (0.0, False, False, True)
    assert info["state_key"] == before["state_key"]


def test_wording_does_not_matter():
    env, *_ = house()
    room = env.rooms[0]
    assert not env.step(f"  Go  {room.upper()}. ")[4]["invalid"]


def test_equal_states_have_equal_keys_whatever_the_way():
    env, _, start = house()
    keys = [env.step(action)[4]["state_key"] for action in (f"go {env.rooms[0]}", "go hall", f"go {env.rooms[1]}")]
    assert keys[1] == start["state_key"]
    assert len(set(keys)) == 3


def test_a_seed_is_a_house():
    houses = (house(seed=seed) for seed in range(200))
    assert len({(*env.rooms, *env.location, info["task"]) for env, _, info in houses}) == 200
