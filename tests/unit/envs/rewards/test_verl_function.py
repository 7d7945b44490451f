"""verl's reward function as a component: called as verl calls it, once per episode, paid on the last step."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose

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
    for path in (f"file://{file}", "pkg://verl_turnkey.envs.squad", "pkg://verl_turnkey/envs/squad"):
        function = "compute_score" if path.startswith("file") else "normalize"
        compose([{"name": "verl", "path": path, "function": function}])


def test_what_is_no_number_costs_the_episode(file):
    with pytest.raises(RewardError, match=r"verl.*expected text to return a number.*'good'"):
        compose([{"name": "verl", "path": file, "function": "text"}])(STEPS)


def test_what_is_not_there_is_named_at_the_start(file):
    with pytest.raises(ConfigError, match=r"turnkey\.rewards\[0\]\.path.*reward\.custom_reward_function\.path"):
        compose([{"name": "verl"}])
    with pytest.raises(ModuleImportError, match=r"reward\.custom_reward_function\.path.*'compute_score'"):
        compose([{"name": "verl", "path": file, "function": "compute_scroe"}])
