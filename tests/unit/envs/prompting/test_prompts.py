"""Templates, history, summaries and the token budget."""

import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import PromptTooLongError
from verl_turnkey.envs.prompting.actions import ControlTokens, instruction_of, parse_action
from verl_turnkey.envs.prompting.prompts import (
    LINE_FIELDS,
    TEMPLATES,
    Examples,
    Memory,
    PromptHistory,
    PromptTurn,
    SummaryError,
    build_messages,
    check_examples,
    check_fields,
    fit_prompt,
    history_text,
    load_template,
)
from verl_turnkey.plugins.config.schema import RolloutConfig, load_examples

HISTORY = [PromptTurn("a {task} wall", "turn left"), PromptTurn("free", "go forward")]
SHIPPED = sorted(path.stem for path in TEMPLATES.glob("*.txt"))


def user(template: str, **changes) -> str:
    arguments = {"system": None, "task": "T", "history": HISTORY, "observation": "O", "admissible": ["a", "b"]}
    [message] = build_messages(template=template, **{**arguments, **changes})
    assert message["role"] == "user"
    return message["content"]


def past(turns: int, window: int, **options) -> Memory:
    memory = Memory(window, **options)
    for number in range(turns):
        memory.add(PromptTurn(f"o{number}", f"a{number}"))
    return memory


# --- templates --------------------------------------------------------------------------------------------------------
def test_the_short_template():
    assert user(load_template("minigrid")) == ("Task: T\na {task} wall\nAction: turn left\nfree\nAction: go forward\nO")
    assert user(load_template("minigrid"), history=[]) == "Task: T\nO"


def test_the_default_template_says_what_there_is_to_say():
    full = user(load_template("default"), step=9, summary="it was dark", instruction="Be quick.")
    assert full.split("\n") == [
        "You act in a text environment. Your task: T",
        "",
        "Steps taken so far: 8",
        "What happened before: it was dark",
        "The last 2, with what you saw and what you did:",
        *("a {task} wall", "Action: turn left", "free", "Action: go forward"),
        "",
        "Observation (step 9): O",
        "",
        "Possible actions: a, b",
        "Be quick.",
    ]
    first = user(load_template("default"), history=[], admissible=None)
    assert first == "You act in a text environment. Your task: T\n\nObservation (step 1): O\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_template_shows_task_observation_and_history(name):
    prompt = user(load_template(name), task="the TASK", observation="the OBSERVATION")
    for part in ("the TASK", "the OBSERVATION", "turn left", "go forward"):
        assert part in prompt
    assert "{" not in user(load_template(name), history=[])


def test_past_turns_fields_system_and_images():
    line = "[Step {step}] saw {observation}, did {action}"
    prompt = user("{history}\n{observation}", line=line, step=7)
    assert prompt == "[Step 5] saw a {task} wall, did turn left\n[Step 6] saw free, did go forward\nO"
    assert user("{history}\n{observation}", line="{action}") == "turn left\ngo forward\nO"
    assert user("{observation} {task}", observation='{task} {"json": {}} \\1') == '{task} {"json": {}} \\1 T'
    messages = build_messages(
        system="S", template="{observation}", task="", history=[], observation="O", admissible=None
    )
    assert messages == [{"role": "system", "content": "S"}, {"role": "user", "content": "O"}]
    image = object()
    content = user("{observation}", images=[image, image])
    assert content == [{"type": "image", "image": image}] * 2 + [{"type": "text", "text": "O"}]


def test_templates_of_ones_own(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text('Answer {"json": 1}. {observation}')
    assert user(load_template(str(path))) == 'Answer {"json": 1}. O'
    path.write_text("{obsrvation}")
    with pytest.raises(ValueError, match="did you mean 'observation'"):
        load_template(str(path))
    path.write_text("{task}")
    with pytest.raises(ValueError, match=r"does not show the \{observation\}"):
        load_template(str(path))
    with pytest.raises(ValueError, match="did you mean 'minigrid'"):
        load_template("minigird")


def test_a_line_has_fields_of_its_own():
    check_fields("{action}", LINE_FIELDS, "action", "x")
    with pytest.raises(ValueError, match=r"x has an unknown field \{task\}.*step, observation, action"):
        check_fields("{action} {task}", LINE_FIELDS, "action", "x")


@given(st.text(st.characters()), st.text(st.characters()))
def test_any_text_becomes_a_prompt(observation, action):
    """Also half surrogate pairs, which no tokenizer takes."""
    prompt = user(
        "{step}{history}|{observation}", observation=observation, history=[PromptTurn("", action)], line="{action}"
    )
    assert prompt.encode("utf-8").decode("utf-8") == prompt
    if not any("\ud800" <= character <= "\udfff" for character in observation + action):
        assert prompt == f"2{action}|{observation}"


def test_a_megabyte_is_no_matter():
    started = time.thread_time()
    assert len(user(load_template("default"), observation="{task}\n" * 150_000)) > 1_000_000
    assert time.thread_time() - started < 1


# --- what is remembered -----------------------------------------------------------------------------------------------
def test_the_window_moves_and_the_rest_is_summarized_once():
    counts = []

    def summarize(turns):
        counts.append(len(turns))
        return " ".join(turn.action for turn in turns)

    memory = past(4, window=3, summarize=summarize)
    assert memory.history() == PromptHistory(memory.turns[1:], "a0")
    assert memory.history(1) == PromptHistory(memory.turns[2:], "a0 a1")
    assert memory.history(3) == PromptHistory([], "a0 a1 a2 a3")
    assert memory.history(4) == PromptHistory()
    assert memory.cuts == 4
    assert memory.history() == PromptHistory(memory.turns[1:], "a0")
    assert counts == [1, 2, 4]
    memory = past(2, window=3, summarize=lambda turns: pytest.fail("there is nothing to summarize"))
    assert memory.history() == PromptHistory(memory.turns)


@pytest.mark.parametrize(
    ("summarize", "words"), [(lambda turns: turns[99].action, "raised IndexError"), (len, "must return text, not int")]
)
def test_a_summary_that_cannot_be_had_names_its_key(summarize, words):
    with pytest.raises(SummaryError, match=rf"turnkey\.rollout\.summary {words}"):
        past(3, window=1, summarize=summarize).history()


class _Token(str):
    special = False


class _Special(_Token):
    special = True


@pytest.mark.parametrize(
    ("text", "whole", "expected"),
    [
        ("Turn  left", False, "turn left"),
        ("fly\n  over it", False, "fly over it"),
        ("fly " * 40, False, ("fly " * 20)[:80]),
        (" \n", False, "(nothing)"),
        (" I think.\n turn left ", True, "I think.\n turn left"),
        ("<think>turn left? No.</think>fly", False, "fly"),
        ("<think>turn left", False, "(nothing)"),
        ("<think>turn left", True, "<think>turn left"),
        ("", True, "(nothing)"),
    ],
)
def test_a_turn_without_an_action_is_shown_by_its_beginning(text, whole, expected):
    assert history_text(parse_action(text, "plain", ["turn left"]), text, whole) == expected


def test_control_tokens_become_plain_text():
    special, added = map(_Special, ("<|im_end|>", "[MASK]", " ", "x")), map(_Token, ("<|user|>", "the"))
    tokenizer = SimpleNamespace(added_tokens_decoder=dict(enumerate((*special, *added))), all_special_tokens=["</s>"])
    control = ControlTokens(tokenizer)
    assert control.plain("a <|im_end|>[MASK] <|user|> the x</s>") == "a < |im_end|>[ MASK] < |user|> the x< /s>"
    assert ControlTokens(object()).plain("a <|im_end|>") == "a <|im_end|>"


# --- the budget -------------------------------------------------------------------------------------------------------
def cost(history: PromptHistory) -> list[int]:
    return [0] * (10 + 10 * len(history.turns) + len(history.summary))


@pytest.mark.parametrize(("budget", "turns"), [(100, 5), (60, 5), (59, 4), (31, 2), (20, 1), (19, 0), (10, 0)])
def test_the_oldest_turns_go_first(budget, turns):
    memory = past(7, window=5)
    ids, history = fit_prompt(cost, memory, budget)
    assert history == PromptHistory(memory.turns[7 - turns :])
    assert ids == cost(history)


@pytest.mark.parametrize(("budget", "turns", "summary"), [(28, 1, "xxxxx"), (15, 0, "xxxxx"), (14, 0, ""), (10, 0, "")])
def test_the_summary_goes_last(budget, turns, summary):
    ids, history = fit_prompt(cost, past(7, window=3, summarize=lambda turns: "xxxxx"), budget)
    assert (len(history.turns), history.summary) == (turns, summary)
    assert len(ids) <= budget


def test_few_prompts_are_tried():
    tried = []

    def encode(history: PromptHistory) -> list[int]:
        tried.append(len(history.turns))
        return cost(history)

    assert len(fit_prompt(encode, past(50, window=50), 137)[1].turns) == 12
    assert len(tried) <= 8


@pytest.mark.parametrize("memory", [past(0, 2), past(7, 5), past(7, 5, summarize=lambda turns: "x")])
def test_prompt_beyond_the_budget(memory):
    with pytest.raises(PromptTooLongError, match=r"takes 10 tokens, data\.max_prompt_length allows 9"):
        fit_prompt(cost, memory, 9)


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
