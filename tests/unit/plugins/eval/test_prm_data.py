"""Labels and examples of process reward models: against loops over the episodes, and by hand."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from synthetic_run import write

from verl_turnkey.envs.rewards.components import RewardStep
from verl_turnkey.plugins.eval import prm as data
from verl_turnkey.plugins.eval.prm import LoggedEpisode, Turn
from verl_turnkey.plugins.view.join import read

CHECK_VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())


def episode(name: str, success: bool, actions: list[str | None], **options) -> LoggedEpisode:
    """An episode of the group ``g`` and the task ``t``; ``states``: before each turn and after the last."""
    states = options.get("states", [None] * (len(actions) + 1))
    prompts = options.get("prompts", ["p"] * len(actions))
    turns = [
        Turn(k, prompts[k], f"I {action}", action, action is not None, states[k], states[k + 1], True)
        for k, action in enumerate(actions)
    ]
    steps = [RewardStep(f"saw {k}", action, text=f"I {action}", task="Buy.") for k, action in enumerate(actions)]
    return LoggedEpisode(name, options.get("group", "g"), options.get("task", "t"), success, steps, turns)


def naive_state_labels(episodes, visits):
    labels = {}
    for e in episodes:
        for k, turn in enumerate(e.turns):
            state = turn.next_anchor or (e.turns[k + 1].anchor if k + 1 < len(e.turns) else None)
            came = [
                other
                for other in episodes
                if other.group == e.group
                and state is not None
                and any(state in (t.anchor, t.next_anchor) for t in other.turns)
            ]
            share = sum(other.success for other in came) / len(came) if len(came) >= visits else float(e.success)
            labels[e.episode, k] = share
    return labels


def test_state_labels_are_those_of_a_loop_over_all_episodes():
    rng = random.Random(0)
    episodes = []
    for i in range(40):
        length = rng.randrange(1, 6)
        states = [rng.choice(["a", "b", "c", "d", None]) for _ in range(length + 1)]
        episodes.append(
            episode(str(i), rng.random() < 0.4, ["x"] * length, states=states, group=rng.choice(["g", "h", "i"]))
        )
    for visits in (1, 3, 9):
        assert data.state_labels(episodes, visits) == pytest.approx(naive_state_labels(episodes, visits))
    labels = data.state_labels(episodes)
    assert any(0 < label < 1 for label in labels.values())


def test_a_state_that_few_came_through_has_the_outcome_of_the_episode():
    episodes = [
        episode("0", True, ["x", "y"], states=["s", "m", "end"]),
        episode("1", False, ["x"], states=["s", "m"]),
        episode("2", False, ["x"], states=["s", "m"]),
    ]
    assert data.state_labels(episodes) == {("0", 0): 1 / 3, ("0", 1): 1.0, ("1", 0): 1 / 3, ("2", 0): 1 / 3}
    assert data.outcome_labels(episodes) == {("0", 0): 1.0, ("0", 1): 1.0, ("1", 0): 0.0, ("2", 0): 0.0}


def test_progress_labels_are_the_check_values():
    values = CHECK_VALUES["progrm"]
    episodes = [episode(str(i), True, recipe) for i, recipe in enumerate(values["recipes"])]
    episodes.append(episode("labelled", False, values["actions"]))
    episodes.append(episode("other", False, ["open"], task="unsolved"))
    labels = data.progress_labels(episodes)
    # ProgRM's best of several recipes, of which ours takes the shortest: the same here.
    expected = values["label after each step, best recipe"]
    assert [labels["labelled", k] for k in range(5)] == pytest.approx(expected, abs=1e-8)
    assert ("other", 0) not in labels


def test_the_best_of_the_shortest_successes_counts():
    episodes = [episode("0", True, ["a", "b"]), episode("1", True, ["c", None, "d"]), episode("2", False, ["c", "a"])]
    assert data.progress_labels(episodes)["2", 1] == 0.5
    assert data.progress_labels(episodes)["1", 2] == 1.0


def test_a_refused_action_is_no_progress():
    refused = episode("1", False, ["a", "b"])
    refused.turns[1] = replace(refused.turns[1], valid=False)
    labels = data.progress_labels([episode("0", True, ["a", "b"]), refused])
    assert [labels["1", k] for k in range(2)] == [0.5, 0.5]


def test_examples_ask_the_judges_question():
    [first, second] = data.scored([episode("e", True, ["a", "b"])], {("e", 0): 0.3, ("e", 1): 0.9}, "judge", 20_000)
    question, answer = second["messages"]
    assert answer == {"role": "assistant", "content": "1"}
    assert first["messages"][1]["content"] == "0"
    assert question["content"].startswith("An agent was given this task:\nBuy.\n")
    assert "Observation 1: saw 0\nAgent 1: I a\n\nObservation 2: saw 1\nAgent 2: I b\n" in question["content"]
    assert "Observation 2" not in first["messages"][0]["content"]
    assert (second["label"], second["task"], second["success"], second["turn"]) == (0.9, "t", True, 1)
    [row] = data.scored([episode("e", True, ["a"])], {("e", 0): 1 / 3}, "progress", 20_000)
    assert row["messages"][-1]["content"] == "Score: 3.33"
    assert data.QUESTIONS["progress"]._judge._read("Score: 3.33") == pytest.approx(0.333)


def test_pairs_are_the_best_and_the_worst_response_to_one_prompt():
    long = "x" * data.TAIL
    episodes = [
        episode("0", True, ["a", "b"], prompts=["start", long]),
        episode("1", False, ["c", "d"], prompts=["start", long]),
        episode("2", False, ["e", "d"], prompts=["start", "then"]),
        episode("3", True, ["f"], prompts=["start"], group="h"),
    ]
    labels = {("0", 0): 0.5, ("1", 0): 0.1, ("2", 0): 0.8, ("0", 1): 1.0, ("1", 1): 0.0, ("2", 1): 0.0, ("3", 0): 1.0}
    [pair] = data.pairs(episodes, labels)
    assert pair == {
        "prompt": "start", "chosen": "I e", "rejected": "I c", "margin": pytest.approx(0.7), "episode": "2", "turn": 0,
        "task": "t",
    }  # fmt: skip


def test_held_out_tasks_are_whole_and_the_draw_repeats():
    rows = [{"task": f"task {i % 20}", "episode": str(i), "turn": 0, "label": i % 5 / 4} for i in range(100)]
    train, test = data.split(rows, 0.1)
    assert len({row["task"] for row in test}) == 2
    assert not {row["task"] for row in test} & {row["task"] for row in train}
    assert len(train) + len(test) == 100
    assert data.split(rows[::-1], 0.1)[1] == test[::-1]
    assert data.split(rows[:1], 0.5) == (rows[:1], [])
    balanced = data.balance(rows)
    assert [row["label"] > 0.5 for row in balanced] == [True] * 40 + [False] * 40
    assert {row["episode"] for row in balanced if row["label"] > 0.5} == {str(i) for i in range(100) if i % 5 > 2}


def test_episodes_without_all_texts_are_counted(tmp_path: Path):
    log = write(tmp_path)
    whole = data.read_episodes(log)
    table = read(log, "episodes")
    trained = table[~table["validation"].astype(bool)]
    failed = int(trained["failed"].notna().sum())
    assert whole.left_out == {"failed": failed}
    assert len(whole.episodes) == len(trained) - failed
    for file in (log / "texts" / "step=000001").iterdir():
        rows = pd.read_parquet(file)
        rows[rows["turn"] != 1].to_parquet(file)
    texts_cut = data.read_episodes(log)
    assert texts_cut.left_out["texts incomplete"] == len(whole.episodes) - len(texts_cut.episodes) > 0
    for file in (log / "texts").glob("*/*.parquet"):
        pd.read_parquet(file).drop(columns=["task_text", "first_observation"]).to_parquet(file)
    earlier = data.read_episodes(log)
    assert not earlier.episodes
    assert any(re.search("earlier version", reason) for reason in earlier.left_out)


def test_validations_are_read_alone(tmp_path: Path):
    log = write(tmp_path)
    table = read(log, "episodes")
    validations = {*table[table["validation"].astype(bool)]["episode"]}
    assert {e.episode for e in data.read_episodes(log, validation=True).episodes} == validations
    assert not {e.episode for e in data.read_episodes(log).episodes} & validations
