"""TextWorld for real: games are generated, compiled and played; a handful, kept for the whole module."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import pytest
from textworld import EnvInfos, start

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters import textworld

ID = "turnkey/TextWorld-v0"
SECONDS = 300  # for a game to be compiled beside others, on a loaded machine
pytestmark = pytest.mark.filterwarnings("ignore:Game .* is not fully supported")  # of jericho, about every game

COIN = {"challenge": "coin_collector", "level": 3}
COOKING = {"challenge": "cooking", "recipe": 2, "take": 2, "cook": True}
GAMES: list[dict[str, Any]] = [
    COIN,
    {"challenge": "treasure_hunter", "level": 12},
    {"challenge": "simple", "rewards": "dense"},
    COOKING,
]


def play(env: gymnasium.Env[str, str], seed: int, actions: list[str]) -> list[tuple]:
    observation, info = env.reset(seed=seed)
    seen: list[tuple] = [(observation, info["state_key"], info["task"], info["admissible"])]
    for action in actions:
        seen.append(env.step(action))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


def solve(env: gymnasium.Env[str, str], seed: int) -> list[tuple]:
    env.reset(seed=seed)
    return play(env, seed, env.unwrapped.oracle())


def wander(env: gymnasium.Env[str, str], seed: int, rng: random.Random, steps: int) -> list[tuple]:
    """Random admissible actions; the infos' keys of the states that were acted in, and the answers."""
    _, info = env.reset(seed=seed)
    seen = []
    for _ in range(steps):
        action = rng.choice(info["admissible"])
        answer = env.step(action)
        seen.append((info["state_key"], action, answer))
        info = answer[4]
        if answer[2] or answer[3]:
            break
    return seen


@pytest.mark.parametrize("kwargs", GAMES, ids=lambda kwargs: kwargs["challenge"])
def test_the_oracle_wins_and_every_point_is_given_once(kwargs):
    env = make(ID, kwargs)
    answers = solve(env, 1)[1:]
    best = env.unwrapped._engine.state.max_score
    assert sum(answer[1] for answer in answers) == best
    assert {answer[1] for answer in answers} <= {0.0, 1.0, 2.0}  # a running sum would go on to the maximum
    assert answers[-1][2:4] == (True, False)
    assert [answer[4]["success"] for answer in answers] == [False] * (len(answers) - 1) + [True]


def test_success_pays_once_for_winning():
    rewards = [answer[1] for answer in solve(make(ID, {**COOKING, "reward": "success"}), 1)[1:]]
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


def test_texts_are_free_of_banner_status_line_and_closing_question():
    first, *answers = solve(make(ID, COIN), 1)
    assert first[0].startswith("-= ")
    assert "coin" in first[2]
    for text in (first[0], first[2], *(answer[0] for answer in answers)):
        assert text
        assert not any(mark in text for mark in ("$$", "\n>", "\n\n", "0/1", "RESTART"))
    assert answers[-1][0].startswith("You pick up the coin")


@pytest.mark.parametrize("kwargs", GAMES, ids=lambda kwargs: kwargs["challenge"])
def test_the_first_observation_is_the_games_description_of_the_room(kwargs):
    """Which TextWorld would give with every answer, for more than half of a step's time."""
    env = make(ID, kwargs)
    first, _ = env.reset(seed=2)
    description = start(str(env.unwrapped.game), EnvInfos(description=True)).reset().description
    assert first == "\n".join(line.strip() for line in description.split("\n") if line.strip())


def test_only_the_last_action_is_told_if_wanted():
    task, hidden = (make(ID, {**COIN, "only_last_action": hide}).reset(seed=1)[1]["task"] for hide in (False, True))
    assert "coin" in hidden
    assert len(hidden) < len(task)


def test_losing_is_the_end_without_winning():
    env = make(ID, COOKING)
    env.reset(seed=1)
    plan = env.unwrapped.oracle()
    last = next(i for i, action in enumerate(plan) if action.startswith("cook"))
    answers = play(env, 1, [*plan[: last + 1], plan[last], "look"])  # cooked twice is burned
    assert answers[-1][2:4] == (True, False)
    assert not answers[-1][4]["success"]
    assert len(answers) == last + 3


def test_truncation_and_a_step_after_it():
    env = make(ID, {**COIN, "max_steps": 2})
    env.reset(seed=1)
    assert env.step("look")[2:4] == (False, False)
    assert env.step("inventory")[2:4] == (False, True)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("look")
    plan = solve(make(ID, COIN), 1)[1:]
    assert solve(make(ID, {**COIN, "max_steps": len(plan)}), 1)[-1][2:4] == (True, False)


@pytest.mark.parametrize(
    "action", ["", "fly", "quit", "restart", "look\nlook", "tw-print player id", "\x00☃", "x" * 100_000]
)
def test_what_is_not_admissible_never_reaches_the_game(action):
    env = make(ID, COIN)
    start, info = env.reset(seed=1)
    *answer, after = env.step(action)
    assert answer == [start, 0.0, False, False]
    assert after == {**{key: info[key] for key in ("state_key", "admissible", "success", "won")}, "invalid": True}
    assert not env.step(" LOOK ")[4]["invalid"]


def test_equal_keys_are_equal_states():
    env = make(ID, COOKING)
    known: dict[str, tuple] = {}
    repeats = 0
    for rollout in range(12):
        points = 0.0
        for _, _, (_, reward, terminated, _, info) in wander(env, 1, random.Random(rollout), 25):
            points += reward
            state = (points, terminated, info["success"], info["admissible"])
            repeats += info["state_key"] in known
            assert known.setdefault(info["state_key"], state) == state
    assert repeats > len(known) / 4


def test_state_keys_know_the_world_and_the_points_taken_in_it():
    env = make(ID, COOKING)
    _, info = env.reset(seed=1)
    start = info["state_key"]
    for action in ("look", "inventory", next(a for a in info["admissible"] if a.startswith("examine"))):
        assert env.step(action)[4]["state_key"] == start
    take = next(action for action in env.unwrapped.oracle() if action.startswith("take"))
    _, reward, _, _, taken = env.step(take)
    assert reward == 1.0
    thing, holder = take.removeprefix("take ").split(" from ")
    ways_back = (f"put {thing} on {holder}", f"insert {thing} into {holder}")
    back = next(action for action in taken["admissible"] if action in ways_back)
    _, _, _, _, returned = env.step(back)
    assert len({start, taken["state_key"], returned["state_key"]}) == 3  # all is as before, but its point is gone
    assert returned["admissible"] == info["admissible"]
    assert env.step(take)[1] == 0.0


def test_rollouts_of_one_seed_share_anchors():
    traces = [[key for key, *_ in wander(make(ID, COOKING), 1, random.Random(rollout), 20)] for rollout in range(8)]
    share = sum(sum(key in other for other in traces) >= 2 for trace in traces for key in trace) / sum(map(len, traces))
    print(f"share of steps in shared anchor states: {share:.2f}")
    assert share > 0.2


def test_threads_of_one_process_do_not_disturb_each_other():
    def rollout(number: int) -> list[tuple]:
        return wander(make(ID, GAMES[number % len(GAMES)]), 1, random.Random(number), 20)

    alone = [rollout(number) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(rollout, range(8))) == alone


CHILD = """
import json, sys
from verl_turnkey.envs import make
env = make("turnkey/TextWorld-v0", json.loads(sys.argv[1]))
observation, info = env.reset(seed=int(sys.argv[2]))
steps = [env.step(action) for action in env.unwrapped.oracle()]
print(json.dumps([observation, info, steps]))
"""


def test_processes_that_make_one_game_at_once_play_the_same(tmp_path):
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, json.dumps(COOKING), "7"],
            env={**os.environ, "TURNKEY_CACHE": str(tmp_path), "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (child.communicate()[0] for child in children)
    assert first == second
    assert json.loads(first)[2][-1][2]
    [game] = tmp_path.rglob("*.z8")
    assert sorted(path.name for path in game.parent.iterdir()) == ["game.json", "game.z8"]
    assert sorted(path.name for path in game.parent.parent.iterdir()) == ["7", "7.lock"]
    assert json.loads(json.dumps(solve(make(ID, COOKING), 7)[1:])) == json.loads(first)[2]


def test_games_are_compiled_side_by_side_while_others_are_played(cache, tmp_path, monkeypatch):
    known = make(ID, COIN).reset(seed=1)
    alone = [make(ID, COIN).reset(seed=seed) for seed in (70, 71)]
    shutil.copytree(cache, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("70*", "71*"))
    monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path))
    compile_game, both, played = textworld.compile_game, threading.Barrier(3), threading.Event()

    def held_up(*args):
        both.wait(SECONDS)  # raises unless the other compilation and the test come too
        assert played.wait(SECONDS)
        return compile_game(*args)

    monkeypatch.setattr(textworld, "compile_game", held_up)
    with ThreadPoolExecutor(3) as pool:
        made = [pool.submit(make(ID, COIN).reset, seed=seed) for seed in (70, 71)]
        both.wait(SECONDS)
        assert pool.submit(make(ID, COIN).reset, seed=1).result(SECONDS) == known
        played.set()
        assert [game.result(SECONDS) for game in made] == alone


def test_a_folder_without_locks_will_do(tmp_path, monkeypatch):
    """Then two make the game at once, and the slower one takes what is there."""
    monkeypatch.setenv("TURNKEY_CACHE", str(tmp_path))
    compile_game, both = textworld.compile_game, threading.Barrier(2)

    def no_lock(*_):
        raise OSError(38, "no locks available")

    def together(*args):
        both.wait(SECONDS)
        return compile_game(*args)

    monkeypatch.setattr(textworld.fcntl, "flock", no_lock)
    monkeypatch.setattr(textworld, "compile_game", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda env: env.reset(seed=3), [make(ID, COIN), make(ID, COIN)])
    assert first == second
    assert len(list(tmp_path.rglob("*.z8"))) == 1
    assert not list(tmp_path.rglob("new-*"))


def test_seeds_are_games_and_their_number_can_be_limited(cache):
    make(ID, COIN).reset(seed=1)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*.z8")}
    assert before
    limited = make(ID, {**COIN, "games": 2})
    assert limited.reset(seed=5) == limited.reset(seed=1) == make(ID, COIN).reset(seed=1)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*.z8")} == before
    assert make(ID, COIN).reset(seed=2) != make(ID, COIN).reset(seed=1)


def test_games_of_ones_own(cache, tmp_path):
    made = make(ID, COIN)
    for seed in (1, 2):
        made.reset(seed=seed)
        for part in made.unwrapped._game.parent.iterdir():
            shutil.copy(part, tmp_path / f"mine{seed}{part.suffix}")
    own = make(ID, {"path": str(tmp_path)})
    assert own.reset(seed=0) == own.reset(seed=2) == made.reset(seed=1)
    assert own.reset(seed=1) == made.reset(seed=2)
    assert make(ID, {"path": str(tmp_path / "mine2.z8")}).reset(seed=8) == made.reset(seed=2)
    with pytest.raises(EnvironmentKwargsError, match="take no level"):
        make(ID, {"path": str(tmp_path), "level": 3})
    (tmp_path / "mine1.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"mine1\.z8 is not a TextWorld game"):
        make(ID, {"path": str(tmp_path)})
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no \.z8 game"):
        make(ID, {"path": str(tmp_path / "empty")})


def test_what_textworld_itself_refuses():
    with pytest.raises(EnvironmentKwargsError, match=r"makes no coin_collector.*100 rooms"):
        make(ID, {"level": 180}).reset(seed=0)
