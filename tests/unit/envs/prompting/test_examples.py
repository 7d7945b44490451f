"""Example turns of prompts: how they are given, checked and shown."""

from __future__ import annotations

import json

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.actions import instruction_of
from verl_turnkey.envs.prompting.examples import Examples, check_examples
from verl_turnkey.envs.prompting.prompts import build_messages, load_template
from verl_turnkey.plugins.config.schema import RolloutConfig, load_examples

ENTRIES = [
    {"observation": "a red ball", "action": "pick up", "admissible": ["pick up", "go forward"]},
    {"observation": "you carry it", "action": "drop"},
]
TURNS = load_examples(ENTRIES)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("examples.json", json.dumps(ENTRIES)),
        ("examples.jsonl", "\n".join(map(json.dumps, ENTRIES)) + "\n\n"),
        ("examples.yaml", "- {observation: a red ball, action: pick up, admissible: [pick up, go forward]}\n"
                          "- observation: you carry it\n  action: drop\n"),
    ],
)  # fmt: skip
def test_a_file_is_read_as_a_list(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert load_examples(str(tmp_path / name)) == TURNS


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("absent.yaml", "turnkey.rollout.examples=absent.yaml: a list of turns cannot be read"),
        ([{"observation": "x", "acton": "go"}], r"examples\[0\].acton: unknown key; did you mean 'action'"),
        ([{"action": "go"}], r"examples\[0\].observation: missing"),
        ([{"observation": "x"}], r"examples\[0\].action: expected either an action or a response"),
        ([{"observation": "x", "action": "a", "response": "b"}], "either an action or a response"),
        (["go"], r"examples\[0\]: expected a mapping"),
    ],
)
def test_what_is_no_turn_is_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        load_examples(value)


def test_an_inline_list_is_checked_with_the_configuration():
    with pytest.raises(ConfigError, match="unknown key"):
        RolloutConfig(examples=[{"observaton": "x"}])


@pytest.mark.parametrize(
    ("fmt", "written"), [("plain", "drop"), ("tags", "<action>drop</action>"), ("boxed", "\\boxed{drop}")]
)
def test_an_action_is_written_in_its_format(fmt, written):
    assert TURNS[1].written(fmt) == written
    check_examples(TURNS, fmt)


@pytest.mark.parametrize(
    ("turn", "fmt", "words"),
    [
        ({"response": "I drop it"}, "tags", "no action in the format 'tags'"),
        ({"action": "go\nleft"}, "plain", "the action 'go' would be read"),
        ({"action": "fly", "admissible": ["go"]}, "plain", "not an admissible action"),
        ({"response": "<think>hm"}, "plain", "the turn ends before its thoughts do"),
        ({"response": "go"}, "json", "give the action"),
    ],
)
def test_an_example_in_which_no_action_is_found_is_refused(turn, fmt, words):
    with pytest.raises(ConfigError, match=words):
        check_examples(load_examples([{"observation": "x", **turn}]), fmt)


def rendered(template: str, conversation: bool = False, fmt: str = "plain") -> str:
    text = Examples(TURNS, fmt, template, "Be quick.", conversation).text
    [message] = build_messages(
        system=None, template=template, task="T", history=(), observation="O", admissible=None, examples=text
    )
    return message["content"]


def test_a_template_shows_them_as_text_where_it_says_or_first():
    block = (
        "Examples of what you see and what you answer:\n\nObservation: a red ball\nPossible actions: pick up, "
        "go forward\nAnswer: pick up\n\nObservation: you carry it\nAnswer: drop"
    )
    assert rendered("Do {task}.\n{examples}\nNow: {observation}") == f"Do T.\n{block}\nNow: O"
    assert rendered("Do {task}.\nNow: {observation}") == f"{block}\n\nDo T.\nNow: O"
    assert rendered("Do {task}.\n{examples}\nNow: {observation}", conversation=True) == "Do T.\nNow: O"


def test_a_conversation_has_them_as_turns():
    template = load_template("default")
    first, answer, second, last = Examples(TURNS, "tags", template, "Be quick.", conversation=True).messages("T")
    assert "Your task: T" in first["content"]
    assert "Observation (step 1): a red ball" in first["content"]
    assert "Be quick." in first["content"]
    assert answer == {"role": "assistant", "content": "<action>pick up</action>"}
    assert second == {"role": "user", "content": "Observation (step 2): you carry it"}
    assert last["content"] == "<action>drop</action>"
    assert Examples(TURNS, "tags", template, "", conversation=False).messages("T") == []


def test_a_reader_of_the_users_own_says_how_to_write_an_action(tmp_path, monkeypatch):
    (tmp_path / "my_format.py").write_text(
        "def shout(text, admissible):\n    return text.lower()\n\n\nshout.instruction = 'Shout one action.'\n\n\n"
        "def silent(text, admissible):\n    return text\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert instruction_of("my_format:shout") == "Shout one action."
    assert instruction_of("my_format:silent") == ""
    assert instruction_of("plain").startswith("Answer with")
