"""Labels and examples of process reward models: against loops over the episodes, and by hand."""

import copy
import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from synthetic_run import write

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.rewards.components import RewardStep
from verl_turnkey.envs.tasks import Panel
from verl_turnkey.plugins.config import playing
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.leaves import every
from verl_turnkey.plugins.eval import prm as data
from verl_turnkey.plugins.eval import result
from verl_turnkey.plugins.eval.prm import LoggedEpisode, Turn, calibration, evaluate, measure
from verl_turnkey.plugins.eval.result import Samples, differing, eval_id, file_digest
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
            group = [other for other in episodes if other.group == e.group and state is not None]
            came = [other for other in group if any(state in (t.anchor, t.next_anchor) for t in other.turns)]
            share = sum(other.success for other in came) / len(came) if len(came) >= visits else float(e.success)
            labels[e.episode, k] = share
    return labels


def test_state_labels_are_those_of_a_loop_over_all_episodes():
    rng = random.Random(0)
    episodes = []
    for i in range(40):
        length = rng.randrange(1, 6)
        states = [rng.choice(["a", "b", "c", "d", None]) for _ in range(length + 1)]
        group, success = rng.choice(["g", "h", "i"]), rng.random() < 0.4
        episodes.append(episode(str(i), success, ["x"] * length, states=states, group=group))
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


def test_the_best_of_the_shortest_successes_counts_and_a_refused_action_is_no_progress():
    episodes = [episode("0", True, ["a", "b"]), episode("1", True, ["c", None, "d"]), episode("2", False, ["c", "a"])]
    assert data.progress_labels(episodes)["2", 1] == 0.5
    assert data.progress_labels(episodes)["1", 2] == 1.0
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


def test_episodes_without_all_texts_are_counted_and_validations_are_read_alone(tmp_path: Path):
    log = write(tmp_path)
    whole = data.read_episodes(log)
    table = read(log, "episodes")
    validates = table["validation"].astype(bool)
    assert {e.episode for e in data.read_episodes(log, validation=True).episodes} == {*table[validates]["episode"]}
    assert not {e.episode for e in whole.episodes} & {*table[validates]["episode"]}
    trained = table[~validates]
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


# --- Accuracy, AUC and calibration of scores: against pairs, loops and the check values -------------------------------


def naive_auc(scores, labels):
    """The share of pairs of a positive and a negative in which the positive has the higher score, ties half."""
    rows = list(zip(scores, labels, strict=True))
    pairs = [(a, b) for a, x in rows for b, y in rows if x > 0.5 >= y]
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs) if pairs else math.nan


def naive_calibration_error(scores, labels):
    total = 0.0
    for low in range(10):
        members = [(s, y) for s, y in zip(scores, labels, strict=True) if min(int(s * 10), 9) == low]
        if members:
            gap = sum(s for s, _ in members) / len(members) - sum(y for _, y in members) / len(members)
            total += len(members) / len(scores) * abs(gap)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_measures_are_those_of_the_twins(seed: int):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 11, 60) / 10, rng.integers(0, 5, 60) / 4
    values = measure(scores, labels)
    assert values["auc"] == pytest.approx(naive_auc(scores, labels))
    assert values["calibration_error"] == pytest.approx(naive_calibration_error(scores, labels))
    rows = list(zip(scores, labels, strict=True))
    assert values["accuracy"] == np.mean([(s > 0.5) == (y > 0.5) for s, y in rows])
    assert values["squared_error"] == pytest.approx(np.mean([(s - y) ** 2 for s, y in rows]))


def test_a_weight_is_a_number_of_copies():
    rng = np.random.default_rng(0)
    scores, labels, copies = rng.random(30), rng.random(30), rng.integers(0, 4, 30)
    repeated = measure(np.repeat(scores, copies), np.repeat(labels, copies))
    assert measure(scores, labels, copies) == pytest.approx(repeated)


def test_the_cross_entropy_is_gui_shepherds():
    values = CHECK_VALUES["gui_shepherd"]
    positive = [1.0 - label for label in values["label"]]
    measured = measure(values["p(positive)"], positive)
    assert measured["cross_entropy"] == pytest.approx(values["loss"], abs=1e-7)
    decisions = [1 if p > 0.5 else -1 for p in values["p(positive)"]]
    assert decisions == values["reward +1/-1"]
    assert measured["accuracy"] == np.mean([(d > 0) == (y > 0.5) for d, y in zip(decisions, positive, strict=True)])


def test_intervals_are_over_tasks():
    """A task's turns are one observation: ten copies of each turn leave the interval as it is."""
    rng = np.random.default_rng(1)
    labels = np.repeat(rng.integers(0, 2, 20), 3).astype(float)
    scores = np.clip(labels * 0.4 + rng.random(60) * 0.6, 0, 1)
    tasks = [str(i // 3) for i in range(60)]
    once = evaluate(scores, labels, tasks)
    often = evaluate(np.tile(scores, 10), np.tile(labels, 10), tasks * 10)
    for name, (value, low, high) in once.items():
        assert low <= value <= high or name == "calibration_error"  # the bootstrap's is biased upwards
        assert often[name] == pytest.approx((value, low, high))
    other = evaluate(scores, labels, [str(i) for i in range(60)])
    assert other["auc"] != pytest.approx(once["auc"], abs=1e-4)
    [(number, mean_score, mean_label)] = calibration([0.31, 0.39], [0.0, 1.0])
    assert (number, mean_score, mean_label) == (2, pytest.approx(0.35), 0.5)


def test_one_class_alone_has_no_auc_and_scores_are_from_0_to_1():
    of_one_class = evaluate([0.2, 0.9], [1.0, 1.0], ["a", "b"])
    assert math.isnan(of_one_class["auc"].value)
    assert of_one_class["accuracy"].value == 0.5
    for scores in ([], [1.2], [float("nan")]):
        with pytest.raises(ValueError, match="expected scores from 0 to 1"):
            evaluate(scores, scores, ["t"] * len(scores))


# --- The folder of an evaluation: one identity, and every finished sample once ----------------------------------------
FIELDS = {"model": {"sha256": "ab"}, "sampling": {"temperature": 1.0, "top_p": 1.0}, "rewards": [{"name": "step"}]}
TASK = '{"env_id": "e", "kwargs": {}, "seed": 1}'


def test_the_id_is_that_of_the_fields_in_any_order_and_differing_ones_are_named_down_to_the_leaf():
    turned = {name: FIELDS[name] for name in reversed(FIELDS)}
    assert eval_id(turned) == eval_id(FIELDS)
    assert re.fullmatch("[0-9a-f]{16}", eval_id(FIELDS))
    other = copy.deepcopy(FIELDS)
    other["sampling"]["top_p"] = 0.9
    assert eval_id(other) != eval_id(FIELDS)
    other["rewards"].append({"name": "length"})
    other["more"] = 1
    fields = differing(FIELDS, other)
    assert [*fields] == ["more", "rewards", "sampling.top_p"]
    assert (fields["more"], fields["sampling.top_p"]) == ((None, 1), (FIELDS["sampling"]["top_p"], 0.9))
    assert differing(FIELDS, copy.deepcopy(FIELDS)) == {}
    files = [{"modules": {"my_env.py": digest}} for digest in ("a1", "b2")]
    assert differing(*files) == {"modules.my_env.py": ("a1", "b2")}


def test_a_digest_is_of_names_and_contents(tmp_path):
    for name, text in (("a", "xy"), ("b", "z")):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a", tmp_path / "b"]
    before = file_digest(files)
    assert before == file_digest(files) != file_digest(files[::-1])
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("yz")
    assert file_digest(files) != before


def test_samples_are_found_again(tmp_path):
    kept = Samples(tmp_path, FIELDS)
    keys = [kept.key(TASK, number) for number in range(3)]
    assert len({*keys}) == 3
    for number in (0, 1):
        kept.add(keys[number], {"success": bool(number)})
    kept.close()
    again = Samples(tmp_path, copy.deepcopy(FIELDS))
    assert again.key(TASK, 2) == keys[2]
    assert [*again.done] == keys[:2]
    assert again.done[keys[1]] == {"key": keys[1], "success": True}
    again.close()


def test_samples_of_an_earlier_version_count_by_their_current_names(tmp_path):
    Samples(tmp_path, FIELDS).close()
    sample = {"key": "a", "success": True, "return": 1.0, "score": 0.5, "rewards": {"step": 1.0, "length": -0.5}}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    kept = Samples(tmp_path, FIELDS)
    returns = {"env_return": 1.0, "composed_return": 0.5}
    returns |= {"composed_return.step": 1.0, "composed_return.length": -0.5}
    assert kept.done["a"] == {"key": "a", "success": True, **returns}
    kept.close()


@pytest.mark.parametrize("torn", ['{"key": "x", "succ', '{"key": "x"}'])
def test_half_a_line_is_no_sample_and_is_cut_off(tmp_path, torn):
    """Also one that is JSON: what follows would stand on the same line."""
    kept = Samples(tmp_path, FIELDS)
    kept.add("a", {"success": True})
    kept.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(torn)
    again = Samples(tmp_path, FIELDS)
    assert [*again.done] == ["a"]
    again.add("b", {"success": False})
    again.close()
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["a", "b"]


def test_another_evaluation_is_refused_and_stays(tmp_path):
    kept = Samples(tmp_path, FIELDS)
    kept.add("a", {"success": True})
    kept.close()
    other = {**FIELDS, "sampling": {"temperature": 0.0, "top_p": 1.0}}
    line = r"sampling.temperature: 1.0 there, 0.0 now"
    with pytest.raises(ConfigError, match=rf"differs in\n  {line}\nGive another --out"):
        Samples(tmp_path, other)
    again = Samples(tmp_path, FIELDS)
    assert [*again.done] == ["a"]
    again.close()
    anew = Samples(tmp_path, other, new=True)
    assert anew.done == {}
    anew.close()
    assert json.loads((tmp_path / "eval.json").read_text())["eval_id"] == eval_id(other)


LAKE = ["+turnkey=base", "turnkey.env.id=turnkey/FrozenLake-v0"]


def fields_of(*words: str) -> dict[str, Any]:
    """The identity of an evaluation with these overrides."""
    return result.identity(composed([*LAKE, *words]), {"name": "m", "tag": None}, None)


def test_secrets_are_told_apart_but_neither_written_nor_shown(tmp_path):
    Samples(tmp_path, fields_of("+turnkey.env.kwargs.api_key=hunter2")).close()
    line = r"environment.kwargs.api_key: '\*\*\* \(\w+\)' there, '\*\*\* \(\w+\)' now"
    with pytest.raises(ConfigError, match=line) as raised:
        Samples(tmp_path, fields_of("+turnkey.env.kwargs.api_key=hunter3"))
    assert "hunter" not in (tmp_path / "eval.json").read_text() + str(raised.value)


def test_files_of_the_user_count_by_name_and_content(tmp_path):
    """Not by their folder: the same evaluation on another machine has the same id."""
    identities = []
    for folder in ("here", "there"):
        file = tmp_path / folder / "own.py"
        file.parent.mkdir()
        file.write_text("def score(steps): ...\n")
        value = [{"name": f"{file}:score", "weight": 2.0, "note": "a .py: file"}, {"name": "tags"}]
        identities.append(every()["turnkey.rewards"].content(value))
    assert identities[0] == identities[1]
    assert re.fullmatch(r"own.py:score \(\w{16}\)", identities[0][0].pop("name"))
    assert identities[0] == [{"weight": 2.0, "note": "a .py: file"}, {"name": "tags"}]


VERLS_TOOLS = "actor_rollout_ref.rollout.multi_turn."


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("turnkey.mcp.servers={here}/mcp.json", r"turnkey.mcp.servers: None there, 'mcp.json \(\w{16}\)' now"),
        ("turnkey.mcp.tools=[look]", r"turnkey.mcp.tools: None there, \['look'\] now"),
        (VERLS_TOOLS + "tool_config_path={here}/mcp.json", r"tool_config_path: None there, 'mcp.json \(\w{16}\)' now"),
        (VERLS_TOOLS + "function_tool_path={here}/a.py", r"function_tool_path: None there, 'a.py \(\w{16}\)' now"),
        ("turnkey.modules=[{here}/a.py]", r"turnkey.modules: \[\] there, \['a.py \(\w{16}\)'\] now"),
        ("data.max_prompt_length=99", r"data.max_prompt_length: \d+ there, 99 now"),
    ],
)
def test_what_is_played_is_part_of_the_identity(tmp_path, word, line):
    """Above all the tools: samples with others are another evaluation."""
    (tmp_path / "out").mkdir()
    for name in ("mcp.json", "a.py"):
        (tmp_path / name).write_text("{}")
    changed = word.format(here=tmp_path)
    Samples(tmp_path / "out", fields_of()).close()
    Samples(tmp_path / "out", fields_of("turnkey.rollout.layout=steps", "turnkey.env.step_timeout=9")).close()
    with pytest.raises(ConfigError, match=rf"differs in\n  \S*{line}\nGive"):
        Samples(tmp_path / "out", fields_of(changed))
    if str(tmp_path) in changed:
        before = fields_of(changed)
        for name in ("mcp.json", "a.py"):
            (tmp_path / name).write_text("{} ")
        assert len(differing(before, fields_of(changed))) == 1


def test_a_panel_has_the_tools_and_is_as_before_without_any(tmp_path):
    (tmp_path / "mcp.json").write_text("{}")
    plain = [*LAKE, "+turnkey.env.kwargs.size=4"]
    tools = [f"turnkey.mcp.servers={tmp_path}/mcp.json", "turnkey.mcp.shared=[pad]"]
    environment, lines = {"kwargs": {"size": 4}}, (plain, [*plain, *tools])
    panels = [Panel({"settings": playing.settings(composed(line)), "environment": environment}) for line in lines]
    assert [*panels[0].content["settings"]] == ["rollout", "template_sha256", "examples_sha256", "tokens", "rewards"]
    names = [name.partition(":")[0] for name in playing.differing(panels[0], composed([*plain, *tools]))]
    assert names == ["turnkey.mcp.servers", "turnkey.mcp.shared"]
    again = [*plain, *playing.words(panels[1])]
    [line] = playing.differing(panels[1], composed(again))
    assert re.fullmatch(r"turnkey.mcp.servers: None, not 'mcp.json \(\w{16}\)'", line)
    assert playing.differing(panels[1], composed([*again, tools[0]])) == []
