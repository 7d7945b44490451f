"""BFCL's multi-turn tasks from its package: right and faulty calls, judged by us and by the benchmark's own checker."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import count

import pytest
from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
from env_cases import play

from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.bfcl import CATEGORIES, SPLITS, BfclText
from verl_turnkey.envs.answers import read_reset, read_step
from verl_turnkey.envs.tools import calls_text, read_turn, words_text

ID = "turnkey/BFCL-v0"
DONE = words_text("Done.")
RUNS = count()
each_category = pytest.mark.parametrize("category", CATEGORIES)


def bfcl(seed: int = 0, **kwargs) -> BfclText:
    env = make(ID, {"split": "all", **kwargs}).unwrapped
    env.reset(seed=seed)
    return env


def of(task: str, **kwargs) -> BfclText:
    """The task with this id of BFCL's, without its prefix."""
    env = bfcl(categories=[task.rpartition("_")[0]], **kwargs)
    env.reset(seed=env.task_ids().index(f"multi_turn_{task}"))
    return env


def call(name: str, **arguments) -> str:
    return calls_text([(name, arguments)])


def ends_won(env: BfclText, actions: list[str]) -> bool:
    for action in actions:
        *_, over, _, info = env.step(action)
        if over:
            break
    return over and info["success"]


@each_category
def test_right_calls_win_and_none_lose(category):
    for seed in range(0, 200, 23):
        env = bfcl(seed, categories=[category])
        plan = env.oracle()
        answers = play(env, seed, plan)[1:]
        assert [answer[1] for answer in answers] == [0.0] * (len(plan) - 1) + [1.0]
        assert not any(answer[4]["invalid"] or answer[4]["extra"]["tool_errors"] for answer in answers)
        assert answers[-1][2:4] == (True, False)
        assert answers[-1][4]["success"]
        one_by_one = [
            calls_text([(part.name, part.arguments)]) if isinstance(turn, list) else action
            for action in plan
            for turn in [read_turn(action)]
            for part in (turn if isinstance(turn, list) else [turn])
        ]
        assert ends_won(bfcl(seed, categories=[category], turn_steps=34), one_by_one)  # the most calls of a turn
        assert not ends_won(bfcl(seed, categories=[category]), [DONE] * len(plan))


def official(env: BfclText, turns: list[list[tuple[str, str]]]) -> bool:
    """The verdict of BFCL's own checker, which evaluates the calls as code; ``turns``: name and text of each call."""
    entry = env._entry
    decoded = [[[text] for _, text in turn] for turn in turns]
    return multi_turn_checker(decoded, entry["right"], entry, "", f"model{next(RUNS)}")["valid"]


def ours(env: BfclText, turns: list[list[tuple[str, str]]]) -> bool:
    actions = [action for turn in turns for action in [*(name for name, _ in turn), DONE]]
    return ends_won(env, actions)


def faulty(env: BfclText, kind: str, rng: random.Random) -> list[list[tuple[str, str]]]:
    """The right calls of each turn, as our action and as BFCL's text, with a fault in one turn."""
    plan = iter(env.oracle())
    turns = []
    for right in env._entry["right"]:
        calls = read_turn(next(plan)) if right else []
        turns.append([(calls_text([(c.name, c.arguments)]), text) for c, text in zip(calls, right, strict=True)])
        next(plan)
    turn = rng.choice([turn for turn in turns if turn])
    place = rng.randrange(len(turn))
    if kind == "dropped":
        turn.pop(place)
    if kind == "repeated":
        turn.insert(place, turn[place])
    if kind == "shuffled":
        rng.shuffle(turn)
    return turns


def agree(tasks: list[int]) -> Counter:
    rng, verdicts = random.Random(0), Counter()
    for category in CATEGORIES:
        env = bfcl(categories=[category], turn_steps=40)
        for seed in tasks:
            for kind in ("right", "dropped", "repeated", "shuffled"):
                env.reset(seed=seed)
                turns = faulty(env, kind, rng)
                verdict = official(env, turns)
                assert ours(env, turns) == verdict, (env._entry["id"], kind, turns)
                verdicts[kind, verdict] += 1
    return verdicts


def test_verdicts_are_those_of_the_benchmarks_checker():
    verdicts = agree(random.Random(1).sample(range(200), 15))
    assert verdicts["right", True] == 60
    assert min(verdicts[kind, False] for kind in ("dropped", "repeated", "shuffled")) > 0
    assert verdicts["repeated", True] > 0


@pytest.mark.long
def test_verdicts_on_all_tasks_are_those_of_the_benchmarks_checker():
    verdicts = agree(list(range(200)))
    assert sum(verdicts.values()) == 3200
    assert verdicts["right", True] == 800


def test_missing_tools_come_in_the_middle_of_an_episode():
    env = of("miss_func_0")
    names = {tool["function"]["name"] for tool in env.available()}
    assert "grep" in names
    assert "sort" not in names
    plan, added = env.oracle(), []
    for action in plan:
        observation, *rest, info = env.step(action)
        answer = read_step((observation, *rest, info))
        assert answer.faults == []
        if tools := answer.info.get("tools"):
            added.append((observation, {tool["function"]["name"] for tool in tools} - names))
    assert added == [("You have more tools now. Can you do it with them?", {"sort"})]
    other, info = of("base_0").reset(seed=0)
    assert read_reset((other, info)).faults == []
    assert len(info["tools"]) == len(names) + 1


def test_a_user_turn_is_paid_where_it_needs_calls_and_was_right():
    env = of("miss_func_0", turn_reward=0.25)
    rewards = [env.step(action)[1] for action in env.oracle()]
    assert rewards == [0.0, 0.25, 0.0, 0.25, 0.0, 0.0, 0.25, 0.0, 1.25]  # nothing can be done in the third turn
    env = of("miss_func_0", turn_reward=0.25)
    first, done, *_ = env.oracle()
    env.step(first)
    assert env.step(done)[1:3] == (0.25, False)
    observation, reward, over, _, info = env.step(done)
    assert (observation, reward, over, info["success"]) == ("That is not what I wanted.", 0.0, True, False)
    assert info["extra"]["right_turns"] == 1


def test_what_is_no_call_is_an_error_and_the_turn_goes_on():
    env = of("base_0")
    for action, words in (
        (call("cd", folder="document", deep=True), "Error during execution: "),
        (call("cd", folder="nowhere"), '{"error": "cd: '),
        (call("_load_scenario", scenario={}), "Error: there is no tool '_load_scenario'; tools are "),
        (call("format_disk"), "Error: there is no tool 'format_disk'"),
        (json.dumps({"calls": [{"name": "ls", "arguments": 3}]}), "Error: the arguments of ls must be an object"),
        ("cd(", "Error: this is not a call of a tool."),
    ):
        observation, reward, over, _, info = env.step(action)
        assert observation.startswith(words)
        assert (reward, over, info["invalid"]) == (0.0, False, True)
    assert ends_won(env, env.oracle())


def test_a_call_may_be_written_as_text():
    env = of("base_0")
    for text in ("cd('document')", "mkdir(dir_name='temp')", "mv(source='final_report.pdf', destination='temp')"):
        assert not env.step(text)[4]["invalid"]
    assert not env.step(DONE)[2]


def test_too_many_steps_in_a_user_turn_lose():
    env = of("base_0", turn_steps=3)
    ends = [env.step(call("pwd"))[2:4] for _ in range(4)]
    assert ends == [(False, False)] * 3 + [(True, False)]
    env = of("base_0", turn_steps=3)
    for action in env.oracle()[:2]:
        env.step(action)
    assert [env.step(call("pwd"))[2] for _ in range(3)] == [False] * 3  # each of the user's turns has as many


def key_after(task: str, *actions: str) -> str:
    env = of(task)
    for action in actions:
        *_, info = env.step(action)
    return info["state_key"]


def test_the_key_is_of_the_state_and_of_the_results_that_count():
    go, make_dir, look = call("cd", folder="document"), call("mkdir", dir_name="a"), call("ls")
    wrong = call("cd", folder="nowhere")
    assert key_after("base_0", go, make_dir) == key_after("base_0", wrong, go, "cd(", make_dir)
    assert key_after("base_0", look, go, look) == key_after(
        "base_0", calls_text([("ls", {}), ("cd", {"folder": "document"}), ("ls", {})])
    )
    assert len({key_after("base_0", *actions) for actions in ([go], [look], [look, look], [look, go], [wrong])}) == 5
    sees, other = call("get_outside_temperature_from_google"), call("displayCarStatus", option="fuel")
    drawn = {key_after("base_50", *actions) for actions in ([sees], [sees, sees], [other])}
    assert len(drawn) == 3  # the next temperature is another one


@each_category
def test_an_episode_does_not_depend_on_those_before_it(category):
    env = bfcl(categories=[category])
    plans = {seed: bfcl(seed, categories=[category]).oracle() for seed in range(3, 200, 28)}
    first = {seed: play(bfcl(categories=[category]), seed, plan) for seed, plan in plans.items()}
    for seed, plan in plans.items():
        play(env, seed, [*plan[:1], call("format_disk"), DONE])
    assert {seed: play(env, seed, plan) for seed, plan in plans.items()} == first


def test_splits_share_no_task_in_any_of_its_variants():
    numbers = {
        split: {id.rpartition("_")[2] for id in make(ID, {"split": split}).unwrapped.task_ids()} for split in SPLITS
    }
    assert {split: len(of_split) for split, of_split in numbers.items()} == {
        "train": 120, "val": 40, "test": 40, "all": 200,
    }  # fmt: skip
    assert numbers["train"] | numbers["val"] | numbers["test"] == numbers["all"]
    ids = make(ID, {"split": "val"}).unwrapped.task_ids()
    assert len(ids) == len(set(ids)) == 160
    assert ids[:2] == ["multi_turn_base_6", "multi_turn_base_7"]


def test_the_oracle_needs_its_steps():
    assert of("base_0", max_steps=8).oracle() is not None
    assert of("base_0", max_steps=7).oracle() is None
