"""ALFWorld for real: problems are generated, solved by its planner and played in its engine."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from alfworld.agents.environment.alfred_tw_env import AlfredTWEnv
from alfworld.gen import constants
from clones_of import forks_alike
from gymnasium.utils.env_checker import check_env

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, make
from verl_turnkey.envs.adapters.alfworld.env import TREE, TYPES, find_games
from verl_turnkey.envs.adapters.alfworld.generate import RULES, draw, generate, main

ID = "turnkey/ALFWorld-v0"
SEED = 3
COUNTS = {"train": 6, "valid_seen": 1, "valid_unseen": 2}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one training problem of each type."""
    folder = tmp_path_factory.mktemp("alfworld")
    assert len(list(generate(folder, COUNTS, SEED))) == sum(COUNTS.values())
    return folder


@pytest.fixture
def env(data: Path) -> gymnasium.Env[str, str]:
    return make(ID, {"data": str(data)})


def only(data: Path, task_type: str, **kwargs: Any) -> gymnasium.Env[str, str]:
    return make(ID, {"data": str(data), "task_types": [task_type], **kwargs})


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def wander(env: gymnasium.Env[str, str], seed: int, rollout: int, steps: int) -> list[tuple]:
    """Random admissible actions: what was seen and known before each, and the answer."""
    rng = random.Random(rollout)
    observation, info = env.reset(seed=seed)
    seen: list[tuple] = []
    for _ in range(steps):
        answer = env.step(rng.choice(info["admissible"]))
        seen.append((observation, info, answer))
        observation, _, terminated, truncated, info = answer
        if terminated or truncated:
            break
    return seen


def test_gymnasium_accepts_it(env):
    check_env(env.unwrapped, skip_render_check=True)


@pytest.mark.parametrize("task_type", TYPES)
def test_the_walkthrough_of_every_task_type_wins(data, task_type):
    env = only(data, task_type)
    observation, info = env.reset(seed=0)
    assert observation.startswith("You are in the middle of a room.")
    assert "task" not in observation
    assert info["task"]
    assert "Your task is to" not in info["task"]
    assert "help" not in info["admissible"]
    assert not info["success"]
    answers = []
    for action in env.unwrapped.oracle():
        assert action in info["admissible"]
        answers.append(env.step(action))
        info = answers[-1][4]
    assert [answer[1] for answer in answers] == [0.0] * (len(answers) - 1) + [1.0]
    assert answers[-1][2:4] == (True, False)
    assert [answer[4]["success"] for answer in answers] == [False] * (len(answers) - 1) + [True]


def test_what_is_generated_is_what_alfworld_itself_reads(data):
    dataset = {"data_path": str(data / TREE / "train"), "num_train_games": -1}
    config = {"dataset": dataset, "env": {"goal_desc_human_anns_prob": 0, "task_types": [1, 2, 3, 4, 5, 6]}}
    theirs = AlfredTWEnv(config, train_eval="train").game_files
    assert sorted(map(Path, theirs)) == make(ID, {"data": str(data)}).unwrapped.games
    assert {Path(game).parts[-3].split("-")[0] for game in theirs} == set(TYPES) == set(RULES)
    assert {path.name for path in (data / "logic").iterdir()} == {"alfred.pddl", "alfred.twl2"}


def test_a_seed_makes_the_same_problems_in_every_process(data, tmp_path):
    code = f"""
from pathlib import Path
from verl_turnkey.envs.adapters.alfworld.generate import generate
print(len(list(generate(Path({str(tmp_path)!r}), {{"train": 3, "valid_unseen": 1}}, {SEED}))))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "12"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "4\n"
    here, there = tree(data), tree(tmp_path)
    assert {name: here[name] for name in there} == there
    assert len(there) == 4 * 3 + 2


@pytest.mark.parametrize("task_type", TYPES)
def test_what_is_drawn_makes_sense(task_type):
    problems = [draw(random.Random(number), task_type, unseen=number % 2 == 1) for number in range(40)]
    for number, problem in enumerate(problems):
        assert (problem.scene in constants.TEST_SCENE_NUMBERS) == (number % 2 == 1)
        assert len({thing.id for thing in problem.things}) == len(problem.things)
        wanted = [thing for thing in problem.things if thing.kind == problem.thing]
        assert len(wanted) == (2 if task_type == "pick_two_obj_and_place" else 1)
        assert all(thing.holder.kind != problem.target for thing in wanted)  # not done before it begins
        assert {thing.holder for thing in problem.things} <= set(problem.receptacles)
        for thing in problem.things:
            assert thing.kind == "DeskLamp" or thing.kind in constants.VAL_RECEPTACLE_OBJECTS[thing.holder.kind]
        assert problem.thing.lower() in problem.sentence
        assert (problem.target or "DeskLamp").lower() in problem.sentence
    assert len({problem.thing for problem in problems}) > 5
    assert len({problem.sentence.replace(problem.thing.lower(), "") for problem in problems}) > 1


def test_members_of_a_group_and_other_processes_see_the_same(data):
    code = f"""
import json, random
from verl_turnkey.envs import make
env, rng = make({ID!r}, {{"data": {str(data)!r}}}), random.Random(0)
observation, info = env.reset(seed=4)
seen = [[observation, info]]
for _ in range(8):
    seen.append(env.step(rng.choice(seen[-1][-1]["admissible"])))
print(json.dumps(seen))
"""
    other = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "9"}, stdout=subprocess.PIPE, text=True
    )
    members = [make(ID, {"data": str(data)}) for _ in range(2)]
    members[1].reset(seed=1)  # what was played before makes no difference
    first, second = (wander(member, 4 + 6 * number, 0, 8) for number, member in enumerate(members))
    assert first == second
    assert [answer for *_, answer in first] == [tuple(step) for step in json.loads(other.communicate()[0])[1:]]
    assert members[0].reset(seed=4)[1]["task"] != members[0].reset(seed=5)[1]["task"]


def test_state_keys_are_of_the_state_and_not_of_the_text(data):
    env = only(data, "pick_and_place_simple")
    _, info = env.reset(seed=0)
    start = info["state_key"]
    first, second = [action for action in info["admissible"] if action.startswith("go to")][:2]
    there = env.step(first)[4]["state_key"]
    assert env.step(second)[4]["state_key"] not in (start, there)
    info = env.step(first)[4]
    assert info["state_key"] == there
    for action in ("look", "inventory", f"examine {first.removeprefix('go to ')}"):
        assert env.step(action)[4]["state_key"] == there
    _, info = env.reset(seed=0)
    plan = env.unwrapped.oracle()
    take = next(number for number, action in enumerate(plan) if action.startswith("take"))
    before = [env.step(action) for action in plan[:take]][-1][4]
    taken = env.step(plan[take])[4]
    back = next(a for a in taken["admissible"] if a.startswith("move") and a.endswith(plan[take].split(" from ")[1]))
    assert taken["state_key"] != before["state_key"] == env.step(back)[4]["state_key"]


def test_rollouts_share_anchors_and_equal_keys_are_equal_states(env):
    rollouts = [wander(env, 2, rollout, 15) for rollout in range(6)]
    known: dict[str, Any] = {}
    states_of: dict[str, set[str]] = defaultdict(set)
    for rollout in rollouts:
        for observation, info, _ in rollout:
            assert known.setdefault(info["state_key"], info["admissible"]) == info["admissible"]
            states_of[observation].add(info["state_key"])
    assert any(len(states) > 1 for states in states_of.values())  # the text alone would take these for one
    for name, traces in {
        "state_key": [[info["state_key"] for _, info, _ in rollout] for rollout in rollouts],
        "observation": [[observation for observation, *_ in rollout] for rollout in rollouts],
    }.items():
        share = sum(sum(key in t for t in traces) >= 2 for trace in traces for key in trace) / sum(map(len, traces))
        print(f"share of steps in shared anchor states, by {name}: {share:.2f}")
        assert share > 0.3


def test_what_is_not_admissible_never_reaches_the_engine(env):
    observation, info = env.reset(seed=0)
    for action in ("help", "", "fly", "go to the moon", "\x00☃", "x" * 100_000):
        *answer, after = env.step(action)
        assert answer == [observation, 0.0, False, False]
        assert after == {**{key: info[key] for key in ("state_key", "admissible", "success", "won")}, "invalid": True}
    assert not env.step(f"  {info['admissible'][0].upper()}\n")[4]["invalid"]


def test_truncation_and_a_step_after_it(data):
    env = make(ID, {"data": str(data), "max_steps": 2})
    env.reset(seed=0)
    assert env.step("look")[2:4] == (False, False)
    assert env.step("inventory")[2:4] == (False, True)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("look")


def test_the_wording_is_that_of_the_data(data, tmp_path):
    """Older data says "put ... in/on ..." for what newer data calls "move ... to ..."."""
    game = only(data, "pick_and_place_simple").unwrapped.games[0]
    content = json.loads(game.read_text())
    assert '"move {o} to {r}"' in content["grammar"]
    content["grammar"] = content["grammar"].replace('"move {o} to {r}"', '"put {o} in/on {r}"')
    *way, last = content["walkthrough"]
    content["walkthrough"] = [*way, last.replace("move", "put").replace(" to ", " in/on ")]
    copy = tmp_path / game.relative_to(data)
    copy.parent.mkdir(parents=True)
    copy.write_text(json.dumps(content))
    env = make(ID, {"data": str(tmp_path)})
    env.reset(seed=0)
    answers = [env.step(action) for action in env.unwrapped.oracle()]
    assert " in/on " in env.unwrapped.oracle()[-1]
    assert answers[-1][4]["success"]


def test_the_programs_arguments_are_left_alone(env, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train", "--seed", "1"])
    env.reset(seed=1)
    env.reset(seed=2)
    assert sys.argv == ["train", "--seed", "1"]


def test_splits_and_task_types_choose_the_games(data):
    assert len(make(ID, {"data": str(data), "split": "valid_unseen"}).unwrapped.games) == 2
    assert len(make(ID, {"data": str(data), "split": "valid_seen"}).unwrapped.games) == 1
    some = make(ID, {"data": str(data), "task_types": list(TYPES[:2])}).unwrapped.games
    assert {path.parts[-3].split("-")[0] for path in some} == set(TYPES[:2])


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"split": "valid_sen"}, "did you mean 'valid_seen'"),
        ({"task_types": ["pick_and_place_simpel"]}, "did you mean 'pick_and_place_simple'"),
        ({"task_types": "look"}, "pick_two_obj_and_place"),
        ({"tasktypes": []}, "did you mean 'task_types'"),
        ({"max_steps": 0}, "positive integer"),
    ],
)
def test_bad_arguments(data, kwargs, words):
    with pytest.raises(EnvironmentKwargsError, match=words):
        make(ID, {"data": str(data), **kwargs})


def test_missing_data_names_the_commands(data, tmp_path, monkeypatch):
    both = r"alfworld-download.*python -m verl_turnkey.envs.adapters.alfworld.generate DIR.*ALFWORLD_DATA"
    with pytest.raises(FileNotFoundError, match=rf"{tmp_path} \(turnkey.env.kwargs.data\) has no folder.*{both}"):
        make(ID, {"data": str(tmp_path)})
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "typo"))
    with pytest.raises(FileNotFoundError, match=rf"typo \(\$ALFWORLD_DATA.*{both}"):
        make(ID)
    monkeypatch.delenv("ALFWORLD_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=rf"\.cache/alfworld.*{both}"):
        make(ID)
    monkeypatch.setenv("ALFWORLD_DATA", str(data))
    assert make(ID).reset(seed=0)[1]["task"]


def test_no_playable_game_is_an_error_and_says_why(data, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    for game in (tmp_path / TREE / "valid_unseen").rglob("game.tw-pddl"):
        game.write_text(game.read_text().replace('"solvable": true', '"solvable": false'))
    with pytest.raises(FileNotFoundError, match=r"2 game.tw-pddl files, 2 of them of the types .* none .* solvable"):
        make(ID, {"data": str(tmp_path), "split": "valid_unseen"})
    with pytest.raises(FileNotFoundError, match=r"1 game.tw-pddl files, 0 of them of the types look_at_obj_in_light"):
        make(ID, {"data": str(tmp_path), "split": "valid_seen", "task_types": ["look_at_obj_in_light"]})
    shutil.rmtree(tmp_path / TREE / "train")
    with pytest.raises(FileNotFoundError, match=r"0 game.tw-pddl files"):
        make(ID, {"data": str(tmp_path)})


def test_which_games_are_solvable_is_read_once(data, tmp_path, monkeypatch):
    copy, cache = tmp_path / "data", tmp_path / "cache"
    shutil.copytree(data, copy)
    monkeypatch.setenv("TURNKEY_CACHE", str(cache))
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path) or read_bytes(path))

    def games(types=TYPES) -> list[Path]:
        read.clear()
        return find_games(copy, "train", types)

    first = games()
    assert sorted(read) == first
    assert games() == first
    assert len(games(TYPES[:2])) == 2
    assert not read
    assert [path.suffix for path in (cache / "alfworld").iterdir()] == [".json"]

    first[0].write_text(first[0].read_text().replace('"solvable": true', '"solvable": false'))
    assert games() == first[1:]  # as many games as before, one of them written anew
    shutil.rmtree(first[1].parent)
    assert games() == first[2:]
    [kept] = (cache / "alfworld").iterdir()
    kept.write_text(kept.read_text()[:9])
    assert games() == first[2:]
    assert read

    monkeypatch.setenv("TURNKEY_CACHE", str(kept))  # a file: nothing can be kept in it
    assert games() == games() == first[2:]
    assert read


def test_the_command_makes_problems_once(tmp_path, capsys):
    arguments = [str(tmp_path), "--train", "1", "--valid-seen", "0", "--valid-unseen", "0"]
    main(arguments)
    assert f"export ALFWORLD_DATA={tmp_path}\n" in capsys.readouterr().out
    assert len(make(ID, {"data": str(tmp_path)}).unwrapped.games) == 1
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "already holds" in capsys.readouterr().err


def test_a_clone_goes_on_as_its_original_does(data):
    assert forks_alike(ID, {"data": str(data)}) > 1
