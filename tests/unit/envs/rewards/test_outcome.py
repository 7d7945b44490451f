"""The components that look at an episode's outcome: answer, contrastive, function, sweet_spot."""

import json
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose, right_answers
from verl_turnkey.envs.rewards.outcome import tier

GOLDS = ["The Netherlands", "Holland"]


def value(action: str | None, **options: object) -> float:
    steps = [RewardStep("q", "search", extra={"gold_answers": GOLDS}), RewardStep("found", action)]
    first, last = compose([{"name": "answer", **options}])(steps).rewards
    assert first == 0
    return last


@pytest.mark.parametrize(
    ("action", "options", "expected"),
    [
        ("netherlands.", {}, 1.0),
        ("holland", {}, 1.0),
        ("in Holland", {}, 0.0),
        (None, {}, 0.0),
        ("", {}, 0.0),
        ("in Holland", {"match": "f1"}, 2 / 3),
        (None, {"match": "f1"}, 0.0),
        ("answer: Denmark; answer: Holland", {"pattern": r"answer: (\w+)"}, 1.0),
        ("Holland", {"pattern": r"answer: (\w+)"}, 0.0),
    ],
)
def test_answers(action, options, expected):
    assert value(action, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("extra", "truth", "expected"),
    [
        ({"gold_answers": ["a", "b"], "gold_answer": "c"}, "d", ["a", "b"]),
        ({"gold_answer": "c"}, "d", ["c"]),
        ({}, "d", ["d"]),
        ({}, 42, ["42"]),
        ({}, ["d", "e"], ["d", "e"]),
        ({}, {"target": np.array(["d", "e"], dtype=object)}, ["d", "e"]),
        ({"gold_answers": []}, "d", ["d"]),
    ],
)
def test_where_right_answers_are(extra, truth, expected):
    row = {"reward_model": {"ground_truth": truth}}
    assert right_answers(RewardStep("q", None, extra=extra, row=row)) == expected


@pytest.mark.parametrize("row", [{}, {"reward_model": {"ground_truth": ""}}, {"reward_model": {"ground_truth": {}}}])
def test_a_task_without_one(row):
    with pytest.raises(RewardError, match=r"no right answer: expected info\['extra'\]\['gold_answers'\]"):
        compose([{"name": "answer"}])([RewardStep("q", "x", row=row)])


def shaped(row, **options):
    steps = [RewardStep("", "a", row=row), RewardStep("", "b", reward=1.0, row=row)]
    return compose([{"name": "step"}, {"name": "contrastive", **options}])(steps).rewards


@pytest.mark.parametrize("stored", [[0, 1, 0.5], np.array([0.5, 0.5]), 0.5, np.float64(0.5)])
def test_from_a_field_of_the_data_row(stored):
    assert shaped({"extra_info": {"baseline_rewards": stored}}) == [0.0, 0.5]
    assert shaped({"before": stored}, field="before", weight=2) == [0.0, 0.0]


def test_from_a_file(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"one": [0.2, 0.4], "7": 1}))
    file = str(tmp_path / "b.json")
    assert shaped({"turnkey_task": "one"}, file=file) == pytest.approx([0.0, 0.7])
    assert shaped({"extra_info": {"index": 7}}, file=file, key="extra_info.index") == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"b\.json, task two: expected a number or a list of numbers, got None"):
        shaped({"turnkey_task": "two"}, file=file)


def test_a_task_without_a_baseline(tmp_path):
    """Such as one of validation: an error that names the way out, or the number that is given for it."""
    (tmp_path / "b.json").write_text(json.dumps({"one": 0.25}))
    for options in ({"file": str(tmp_path / "b.json")}, {}):
        with pytest.raises(RewardError, match=r"got None; the option missing is the baseline of tasks without one"):
            shaped({"turnkey_task": "two"}, **options)
        assert shaped({"turnkey_task": "two"}, missing=0.5, **options) == [0.0, 0.5]
    assert shaped({"turnkey_task": "one"}, file=str(tmp_path / "b.json"), missing=0.5) == [0.0, 0.75]
    with pytest.raises(RewardError, match=r"got \[\]$"):
        shaped({"extra_info": {"baseline_rewards": []}}, missing=0.5)


@pytest.mark.parametrize("stored", [None, [], [0.5, None], "0.5", [True], [float("nan")]])
def test_what_is_no_baseline_costs_the_episode(stored):
    with pytest.raises(RewardError, match=r"extra_info\.baseline_rewards of the data row: expected a number"):
        shaped({"extra_info": {"baseline_rewards": stored}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"rewards\[1\]\.file: .* cannot be read \(FileNotFoundError"),
        ("{", r"\.file: .* cannot be read \(JSONDecodeError"),
        ("[1]", r"\.file: expected a JSON object from tasks to rewards, got 'list'"),
        ("{}", r"\.file: expected a JSON object with at least one task"),
    ],
)
def test_a_file_that_is_none_is_an_error_at_the_start(tmp_path, text, message):
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        shaped({}, file=str(tmp_path / "b.json"))


ROW = {"data_source": "gsm8k", "reward_model": {"ground_truth": "42"}, "extra_info": {"index": 7}}
STEPS = [
    RewardStep("a question", "think", text="hm", row=ROW),
    RewardStep("a thought", "answer 42", text="42", reward=0.5, success=True, row=ROW),
]
SOURCE = """
seen = []

def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0):
    seen.append((data_source, extra_info))
    return {"score": float(solution_str == ground_truth) + bonus, "acc": 1}

async def waits(data_source, solution_str, ground_truth, extra_info):
    return extra_info["num_turns"]

def yes(**given):
    return True

def text(**given):
    return "good"
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(SOURCE)
    return f"{tmp_path}/own.py"


@pytest.mark.parametrize(
    ("options", "last"),
    [
        ({}, 1.0),
        ({"kwargs": {"bonus": 2}}, 3.0),
        ({"function": "waits"}, 4.0),
        ({"function": "yes"}, 1.0),
        ({"weight": 0.5}, 0.5),
    ],
)
def test_it_is_paid_on_the_last_step(file, options, last):
    shaped = compose([{"name": "step"}, {"name": "verl", "path": file, **options}])(STEPS)
    assert shaped.parts["verl"] == [0.0, last]
    assert shaped.rewards == [0.0, 0.5 + last]


def test_arguments_are_verls_and_all_turns(file):
    from verl_turnkey.envs.user_modules import load_function

    compose([{"name": "verl", "path": file}])(STEPS)
    [(data_source, extra)] = load_function(f"{file}:compute_score", "x").__globals__["seen"]
    assert data_source == "gsm8k"
    assert (extra["index"], extra["num_turns"], extra["rollout_reward_scores"]) == (7, 4, {})
    assert [(turn["text"], turn["action"], turn["success"]) for turn in extra["turns"]] == [
        ("hm", "think", False),
        ("42", "answer 42", True),
    ]
    assert ROW["extra_info"] == {"index": 7}


def test_a_package_and_a_url_are_found_as_verl_finds_them(file):
    for path in (f"file://{file}", "pkg://verl_turnkey.envs.model_texts", "pkg://verl_turnkey/envs/model_texts"):
        function = "compute_score" if path.startswith("file") else "normalize"
        compose([{"name": "verl", "path": path, "function": function}])


def test_what_is_no_number_costs_the_episode(file):
    with pytest.raises(RewardError, match=r"verl.*expected text to return a number.*'good'"):
        compose([{"name": "verl", "path": file, "function": "text"}])(STEPS)


def test_what_is_not_there_is_named_at_the_start(file):
    with pytest.raises(ModuleImportError, match=r"reward\.custom_reward_function\.path.*'compute_score'"):
        compose([{"name": "verl", "path": file, "function": "compute_scroe"}])


@pytest.mark.parametrize(
    ("closeness", "expected"),
    [(0, 0), (0.24, 0), (0.25, 1), (0.5, 2), (0.74, 2), (0.75, 3), (1.0, 3)],
)
def test_four_zones_of_equal_width(closeness, expected):
    assert tier(closeness, [0, 1, 2, 3]) == expected


def episode(*close):
    return [RewardStep("", "a", next_extra={"closeness": value}) for value in close]


def reward(*close, **options):
    return compose([{"name": "sweet_spot", **options}])(episode(*close)).rewards


def test_the_component():
    assert reward(0.2, 0.9) == pytest.approx([0, 2 / 3]), "the mean, 0.55, is in the third of four zones"
    assert reward(0.2, 0.9, aggregate="max") == [0, 1]
    assert reward(0.9, 0.2, aggregate="last") == [0, 0]
    assert reward(0.6, tiers=[0, 0.1, 0.3, 1], weight=0.5) == pytest.approx([0.15])
    assert reward(0.6, zones=2) == [1]


def test_a_turn_without_an_action_before_anything_was_done_is_not_close():
    """Its episode counts: losing the bad beginnings would bias what is learned."""
    silent, scored = {}, {"closeness": 0.25}
    [first, second] = [RewardStep("", None, valid=False, extra=e, next_extra=e) for e in (silent, scored)]
    last = episode(0.75)
    assert compose([{"name": "sweet_spot", "zones": 2}])([first, *last]).rewards == [0, 0], "the mean of 0 and 0.75"
    assert compose([{"name": "sweet_spot", "zones": 2}])([second, *last]).rewards == [0, 1], "of 0.25 and 0.75"


@pytest.mark.parametrize("close", [None, 1.2, -0.1, float("nan")])
def test_what_is_no_closeness(close):
    with pytest.raises(RewardError, match=r"after step 0: expected .*closeness"):
        reward(close)
