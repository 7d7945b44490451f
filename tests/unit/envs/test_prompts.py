"""Templates, history and the token budget."""

from __future__ import annotations

import pytest

from verl_turnkey.envs import PromptTooLongError
from verl_turnkey.envs.prompts import Turn, build_messages, fit_prompt, load_template

HISTORY = [Turn("a {task} wall", "turn left"), Turn("free", "go forward")]


def user(template: str, **changes) -> str:
    arguments = {"system": None, "task": "T", "history": HISTORY, "observation": "O", "admissible": ["a", "b"]}
    [message] = build_messages(template=template, **{**arguments, **changes})
    assert message["role"] == "user"
    return message["content"]


def test_shipped_templates():
    assert user(load_template("minigrid")) == ("Task: T\na {task} wall\nAction: turn left\nfree\nAction: go forward\nO")
    assert user(load_template("minigrid"), history=[]) == "Task: T\nO"
    text = user(load_template("default"))
    for part in ("T\n\na {task} wall\nAction: turn left\nfree", "Observation (step 3): O", "Possible actions: a, b\n"):
        assert part in text
    bare = user(load_template("default"), history=[], admissible=None, step=9)
    assert "Possible actions" not in bare
    assert "T\n\nObservation (step 9): O\n\nAnswer" in bare


def test_fields_in_an_observation_stay_text():
    assert user("{observation} {task}", observation='{task} {"json": {}} \\1') == '{task} {"json": {}} \\1 T'


def test_system_text_comes_first():
    messages = build_messages(
        system="S", template="{observation}", task="", history=[], observation="O", admissible=None
    )
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "O"}]


def test_templates_of_ones_own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text('Answer {"json": 1}. {observation}')
    assert user(load_template(str(path))) == 'Answer {"json": 1}. O'
    path.write_text("{obsrvation}")
    with pytest.raises(ValueError, match="Did you mean 'observation'"):
        load_template(str(path))
    path.write_text("{task}")
    with pytest.raises(ValueError, match=r"does not show the \{observation\}"):
        load_template(str(path))
    with pytest.raises(ValueError, match="Did you mean 'minigrid'"):
        load_template("minigird")


@pytest.mark.parametrize(("budget", "shown"), [(100, 5), (60, 5), (59, 4), (10, 0)])
def test_the_oldest_steps_go_first(budget, shown):
    assert fit_prompt(lambda k: [0] * (10 + 10 * k), 5, budget) == ([0] * (10 + 10 * shown), shown)


def test_prompt_beyond_the_budget():
    with pytest.raises(PromptTooLongError, match=r"takes 10 tokens, data\.max_prompt_length allows 9"):
        fit_prompt(lambda k: [0] * (10 + 10 * k), 5, 9)
