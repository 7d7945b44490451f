"""ScienceWorld as text, in the real simulator: two Java processes for the whole module."""

from __future__ import annotations

import os
import random

import pytest

from verl_turnkey.envs import EpisodeOverError, make
from verl_turnkey.envs.adapters.scienceworld import TASKS, ScienceWorldText
from verl_turnkey.envs.errors import MissingPackageError

SHORT = ["lifespan-longest-lived", "find-plant"]


@pytest.fixture(scope="module")
def env():
    env = ScienceWorldText(SHORT, admissible=True, max_steps=20)
    yield env
    env.close()


def play(env: ScienceWorldText, seed: int, choices: random.Random, steps: int = 8) -> list[tuple]:
    observation, info = env.reset(seed=seed)
    seen: list[tuple] = [(observation, info["state_key"], info["task"])]
    for _ in range(steps):
        action = choices.choice(info["admissible"])
        observation, reward, terminated, truncated, info = env.step(action)
        seen.append((action, observation, reward, terminated, truncated, info["state_key"]))
        if terminated or truncated:
            break
    return seen


@pytest.mark.parametrize(("seed", "total"), [(0, 1.0), (1, 0.92)])
def test_the_gold_path_wins(env, seed, total):
    """The start of ``find-plant`` has 8 points already: they are not a reward of any step."""
    env.reset(seed=seed)
    path = env.oracle()
    answers = [env.step(action) for action in path]
    assert sum(answer[1] for answer in answers) == pytest.approx(total)
    assert [answer[4]["success"] for answer in answers] == [False] * (len(path) - 1) + [True]
    assert answers[-1][2:4] == (True, False)


def test_asking_the_oracle_changes_nothing(env):
    _, before = env.reset(seed=2)
    env.oracle()
    observation, reward, *_, after = env.step("look around")
    assert after["state_key"] == before["state_key"]
    assert reward == 0.0
    assert observation.startswith("This room is called")


def test_oracle_is_silent_where_the_limit_is_too_short(env):
    env.reset(seed=0)
    length, env.max_steps = len(env.oracle()), 3
    try:
        assert env.oracle() is None
    finally:
        env.max_steps = 20
    assert length > 3


def test_seeds_reproduce_in_another_process_and_leave_the_global_random_state_alone(env):
    state = random.getstate()
    first = play(env, 4, random.Random(0))
    play(env, 9, random.Random(1))
    other = ScienceWorldText(SHORT, admissible=True, max_steps=20)
    try:
        assert play(other, 4, random.Random(0)) == first
    finally:
        other.close()
    assert random.getstate() == state


def test_the_seed_goes_round_tasks_then_variations(env):
    starts = [env.reset(seed=seed)[1] for seed in range(4)]
    assert ["life span" in info["task"] for info in starts] == [True, False, True, False]
    assert len({info["state_key"] for info in starts}) == 4


def test_splits_do_not_share_variations(env):
    env.reset(seed=0)
    sets = [set(getattr(env.engine, f"get_variations_{split}")()) for split in ("train", "dev", "test")]
    assert all(sets)
    assert not sets[0] & sets[1]
    assert not sets[0] & sets[2]
    assert not sets[1] & sets[2]


def test_state_key_repeats_where_the_state_repeats(env):
    _, info = env.reset(seed=1)
    held = "orange"  # lies in the inventory of every start
    assert f"focus on {held}" in info["admissible"]
    start = info["state_key"]
    moved = env.step("teleport to kitchen")[4]["state_key"]
    assert moved != start
    again = env.step("look around")[4]["state_key"]
    assert again == moved


def test_what_is_not_understood_changes_nothing_but_counts(env):
    _, info = env.reset(seed=0)
    for action in ["fly to the moon", "x" * 100_000, "\x00\u202e☃", ""]:
        _, reward, terminated, truncated, after = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert after["invalid"]
        assert after["state_key"] == info["state_key"]
    for _ in range(15):
        env.step("fly")
    assert env.step("fly")[2:4] == (False, True)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("look around")


def test_a_listed_command_is_never_invalid(env, monkeypatch):
    """The simulator lists a few commands that it does not know: here one that nobody knows."""
    env.reset(seed=0)
    monkeypatch.setattr(env.engine, "get_valid_action_object_combinations", lambda: ["move bee 3 to sink"])
    assert env.step("look around")[4]["admissible"] == ["move bee 3 to sink"]
    observation, *_, info = env.step("move bee 3 to sink")
    assert observation.startswith("No known action")
    assert not info["invalid"]
    assert env.step("move bee 4 to sink")[4]["invalid"]


def test_a_question_of_the_simulator_is_part_of_the_state(env):
    env.reset(seed=1)
    plain = env.step("teleport to kitchen")[4]
    observation, *_, question = env.step("open door")
    assert observation.startswith("Ambiguous request")
    assert question["admissible"] == ["0", "1", "2"]
    assert question["state_key"] != plain["state_key"]
    *_, answered = env.step("0")
    assert not answered["invalid"]


def test_focus_on_the_wrong_thing_fails(env):
    env.reset(seed=0)
    _, reward, terminated, truncated, info = env.step("focus on air")
    assert (reward, terminated, truncated, info["success"]) == (-1.0, True, False, False)


def test_java_gets_the_heap_limit_and_ends_with_close(monkeypatch):
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-Dturnkey=1")
    env = make("turnkey/ScienceWorld-v0", {"task": "lifespan-longest-lived", "heap_mb": 200}).unwrapped
    _, info = env.reset(seed=0)
    process = env.engine._gateway.java_process
    assert env.engine._gateway.jvm.java.lang.Runtime.getRuntime().maxMemory() <= 200 * 2**20
    assert os.environ["JAVA_TOOL_OPTIONS"] == "-Dturnkey=1"
    env.close()
    env.close()
    assert process.returncode is not None
    with pytest.raises(EpisodeOverError):
        env.step("look around")
    assert env.reset(seed=0)[1] == info
    env.close()


def test_ids_of_the_paper_are_names_too():
    assert len(TASKS) == 30
    make("turnkey/ScienceWorld-v0", {"task": "4-2"})


def test_a_missing_java_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingPackageError, match="default-jre-headless"):
        make("turnkey/ScienceWorld-v0")
