"""Episodes in which the model calls the environment's tools, with the tokenizers and templates of real models."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from families import REAL
from tool_env import TOOLS

from verl_turnkey.advantage import validate_record
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import calls_text, words_text

FORMAT = "turnkey.rollout.action_format=tools"
CONVERSATION = ("turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=100")
LENGTHS = ("data.max_prompt_length=3000", "data.max_response_length=3000")
PARSERS = {"Qwen3": "hermes", "Llama 3.1 with tools": "vllm:llama3_json", "GPT-OSS": "gpt-oss"}
MISTRAL = {"Mistral Nemo": "vllm:mistral"}
"""its template is for prompts of a template alone"""


def written(name: str, *calls: tuple[str, dict[str, Any]]) -> str:
    """Calls as models of the family write them, without the token that ends the turn."""
    if name == "Qwen3":
        return "\n".join(f"<tool_call>\n{json.dumps({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)
    if name == "GPT-OSS":
        return "<|start|>assistant".join(
            f"<|channel|>commentary to=functions.{n} <|constrain|>json<|message|>{json.dumps(a)}<|call|>"
            for n, a in calls
        )
    if name == "Mistral Nemo":
        calls_with_ids = [{"name": n, "arguments": a, "id": f"call{i:05}"} for i, (n, a) in enumerate(calls)]
        return f"[TOOL_CALLS]{json.dumps(calls_with_ids)}"
    return "; ".join(json.dumps({"name": n, "parameters": a}) for n, a in calls)


def tokenizer(name: str) -> Any:
    made = REAL[name].tokenizer()
    if name.startswith("Llama"):  # its package has another name for this token
        made = copy.deepcopy(made)
        made.add_tokens(["<|python_tag|>"], special_tokens=True)
    return made


@pytest.fixture
def shelf(play):
    """``shelf(name, turns, *overrides, **kwargs)``: the steps, rows and script of an episode."""

    def run(
        name: str,
        turns: list[str],
        *overrides: str,
        prompts: tuple[str, ...] = CONVERSATION,
        tools_of_verl: Any = (),
        **kwargs: Any,
    ):
        family = REAL[name]
        overrides = (f"actor_rollout_ref.rollout.multi_turn.format={(PARSERS | MISTRAL)[name]}", *overrides)
        rows, script = play(
            turns,
            Task("contract/Shelf-v0", 3, kwargs),
            FORMAT,
            *LENGTHS,
            *prompts,
            f"turnkey.rollout.max_turns={len(turns)}",
            *overrides,
            tokenizer=tokenizer(name),
            hf_model_type=family.model_type,
            tools=tools_of_verl,
        )
        for n, row in enumerate(rows):
            validate_record(row.extra_fields["turnkey"], f"row {n}")
        return [step for row in rows for step in row.extra_fields["turnkey"]["steps"]], rows, script

    return run


def reason(rows: list[Any]) -> str:
    (row,) = rows
    assert row.extra_fields["turnkey"]["steps"] == []
    return row.extra_fields["turnkey"]["failed"]


PUT, LOOK = ("put", {"thing": "cup", "times": 2}), ("look", {})


@pytest.mark.parametrize("name", PARSERS)
def test_each_call_of_a_turn_has_its_result(shelf, name):
    turns = [written(name, PUT, LOOK), written(name, LOOK), "done"]
    steps, rows, script = shelf(name, turns)
    assert [json.loads(step["action"]) for step in steps] == [
        {"calls": [{"arguments": {"thing": "cup", "times": 2}, "name": "put"}, {"arguments": {}, "name": "look"}]},
        {"calls": [{"arguments": {}, "name": "look"}]},
        {"text": "done"},
    ]
    assert steps[0]["action"].startswith('{"calls":[{"arguments":{"thing":"cup","times":2},"name":"put"},')
    assert [(step["valid"], step["reward"], step["anchor"]) for step in steps] == [
        (True, 2.0, ""),
        (True, 0.0, "cup cup"),
        (True, 0.0, "cup cup"),
    ]
    assert steps[-1]["terminated"]
    after = script.text(1)[len(script.text(0)) :]
    assert 0 < after.find("cup is there") < after.find("2 things")
    assert "on the shelf" not in after  # the results are what the model is shown
    (row,) = rows  # one row, whose mask is 1 on exactly what was sampled
    sampled = [i for answer in script.answers for i in answer]
    assert [i for i, trained in zip(row.response_ids, row.response_mask, strict=True) if trained] == sampled
    whole = row.prompt_ids + row.response_ids
    for prompt, answer in zip(script.prompts, script.answers, strict=True):
        assert whole[: len(prompt) + len(answer)] == prompt + answer


def test_ids_are_those_of_qwens_template(shelf):
    turns = [written("Qwen3", PUT, LOOK, ("drop", {"thing": "pen"})), written("Qwen3", LOOK), "done"]
    _, _, script = shelf("Qwen3", turns)
    made = REAL["Qwen3"].tokenizer()

    def turn(*calls: tuple[str, dict[str, Any]], results: tuple[str, ...]) -> list[dict[str, Any]]:
        functions = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        answers = [{"role": "tool", "content": result} for result in results]
        return [{"role": "assistant", "content": "", "tool_calls": functions}, *answers]

    first = made.decode(script.prompts[0]).partition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
    messages = [{"role": "user", "content": first}]
    messages += turn(PUT, LOOK, ("drop", {"thing": "pen"}), results=("cup is there", "2 things", "nothing drops"))
    assert script.prompts[1] == list(
        made.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    )
    messages += turn(LOOK, results=("2 things",))
    assert script.prompts[2] == list(
        made.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    )


def test_schemas_reach_the_template_as_they_are(shelf):
    _, _, script = shelf("Qwen3", ["done"])
    assert '{"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}], "default": null}' in script.text(0)


@pytest.mark.parametrize("name", PARSERS)
def test_calls_that_cannot_run_are_answered_with_an_error_and_the_others_run(shelf, name):
    wrong = [
        (("fly", {}), "there is no tool 'fly'; the tools are put, look, drop"),
        (("put", {"times": 1}), "'thing' is a required property"),
        (("put", {"thing": "cup", "times": "many"}), "times: 'many' is not valid under any of the given schemas"),
        (("drop", {"thing": "shelf"}), "thing: 'shelf' is not one of ['cup', 'pen']"),
    ]
    for call, message in wrong:
        steps, _, script = shelf(name, [written(name, call, PUT), written(name, call), "done"])
        assert [step["valid"] for step in steps] == [False, False, True]
        assert [step["penalty"] > 0 for step in steps] == [True, True, False]
        assert json.loads(steps[0]["action"])["calls"] == [{"arguments": PUT[1], "name": "put"}]
        assert [step["anchor"] for step in steps] == ["", "cup cup", "cup cup"]
        assert steps[1]["action"] is None  # the environment was not called
        answers = script.text(1)[len(script.text(0)) :].replace('\\"', '"')
        assert 0 < answers.find(f"Error: {'' if call[0] == 'fly' else 'the arguments'}") < answers.find("cup is there")
        assert message in answers
        assert message in script.text(2)[len(script.text(1)) :].replace('\\"', '"')


UNREADABLE = {
    "Qwen3": '<tool_call>\n{"name": "put", "arguments": {"thing": cup}}\n</tool_call>',
    "GPT-OSS": "<|channel|>commentary to=functions.put <|constrain|>json<|message|>{thing}",
    "Llama 3.1 with tools": '{"name": "put", "parameters": {"thing": cup}}',
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_call_that_cannot_be_read_is_unparsed_and_the_model_is_told(shelf, name):
    steps, rows, script = shelf(name, [UNREADABLE[name], "done"])
    assert [(step["valid"], step["anchor"]) for step in steps] == [(False, ""), (True, "")]
    assert steps[0]["action"] is None
    assert rows[0].extra_fields["reward_extra_info"]["unparsed_rate"] == 0.5
    after = script.text(1)[len(script.text(0)) :]
    reason = "is not finished: it is not closed" if name == "GPT-OSS" else "cannot be read"
    assert f"Error: the tool call {reason}" in after
    assert "an empty shelf" not in after


def test_of_several_calls_one_cannot_be_read(shelf):
    steps, rows, script = shelf("Qwen3", [written("Qwen3", PUT) + UNREADABLE["Qwen3"], "done"])
    assert [step["valid"] for step in steps] == [False, True]
    assert json.loads(steps[0]["action"])["calls"][0]["name"] == "put"
    assert rows[0].extra_fields["reward_extra_info"]["unparsed_rate"] == 0.5
    assert "cup is there\nError: 1 of 2 tool calls cannot be read" in script.text(1)


FORMATS = {
    "plain": ("go to room 1", "go to room 12", "go to room 12"),
    "tags": ("I <action>go to room 1", "I <action>go to room 12</action> and th", "go to room 12"),
    "json": (written("Qwen3", ("act", {"action": "go"}))[:-9], written("Qwen3", ("act", {"action": "go"})), "go"),
    "tools": (written("Qwen3", LOOK, PUT)[:-9], written("Qwen3", LOOK), calls_text([LOOK])),
    "words": ("The answer is 1", "The answer is 12", words_text("The answer is 12")),
}


@pytest.mark.parametrize("served", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("prompts", [(), CONVERSATION[:1]], ids=["template", "conversation"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_what_the_limit_of_tokens_cut_is_no_action_and_the_model_is_told(play, fmt, prompts, served):
    made = REAL["Qwen3"].tokenizer()
    cut, whole, action = FORMATS[fmt]
    ids = [made.encode(text, add_special_tokens=False) for text in (cut, whole)]
    end = [] if fmt == "tags" else [made.eos_token_id]
    rows, script = play(
        [ids[0], ids[1] + end],
        Task(f"contract/{'Shelf' if fmt in ('tools', 'words') else 'Awkward'}-v0", 3, {}),
        f"turnkey.rollout.action_format={fmt.replace('words', 'tools')}",
        *LENGTHS,
        *prompts,
        f"turnkey.rollout.max_tokens_per_turn={len(ids[0])}",
        "turnkey.rollout.max_turns=2",
        tokenizer=made,
        hf_model_type=REAL["Qwen3"].model_type,
        served=served,
    )
    steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [(step["action"], step["valid"], step["penalty"] > 0) for step in steps] == [
        (None, False, True),
        (action, True, False),
    ]
    assert "the turn reached its limit of tokens" in script.text(1)


def test_a_call_inside_thoughts_does_not_run(shelf):
    think = f"<think>\nOr {written('Qwen3', PUT)}?\n</think>\n\n"
    steps, _, script = shelf("Qwen3", [think + written("Qwen3", LOOK), think + "done"])
    assert [json.loads(step["action"]) for step in steps] == [
        {"calls": [{"arguments": {}, "name": "look"}]},
        {"text": "done"},
    ]
    steps, _, script = shelf("Qwen3", [f"<think>{written('Qwen3', PUT)}", "<think>nothing</think>", "done"])
    assert [step["action"] is None for step in steps] == [True, True, False]
    assert "Error: no action: the turn ends before its thoughts do" in script.text(1)
    assert "Error: neither a tool call nor any words" in script.text(2)


def test_words_are_answered_as_an_observation(shelf):
    steps, _, script = shelf("Qwen3", ["hello", "done"])
    assert json.loads(steps[0]["action"]) == {"text": "hello"}
    assert "<|im_start|>user\n" in script.text(1)[len(script.text(0)) :]
    assert "you said hello" in script.text(1)


@pytest.mark.parametrize("role", ["auto", "user"])
def test_an_observation_is_the_result_of_the_only_call(shelf, role):
    turns = [written("Qwen3", PUT), "done"]
    _, _, script = shelf("Qwen3", turns, f"turnkey.rollout.observation_role={role}", results="none")
    after = script.text(1)[len(script.text(0)) :]
    assert ("<tool_response>\non the shelf: cup cup\n</tool_response>" in after) == (role == "auto")
    assert ("<|im_start|>user\non the shelf: cup cup<|im_end|>" in after) == (role == "user")


def test_results_in_one_message_where_the_template_has_one_call_per_turn(shelf):
    name = "Llama 3.1 with tools"
    _, _, script = shelf(name, [written(name, PUT, LOOK), "done"])
    after = script.text(1)[len(script.text(0)) :]
    assert after.count("<|start_header_id|>ipython<|end_header_id|>") == 1
    assert "put: cup is there\\n\\nlook: 2 things" in after or "put: cup is there\n\nlook: 2 things" in after


@pytest.mark.parametrize("results", ["none", "first"])
def test_results_that_are_not_those_of_the_calls_fail_the_episode(shelf, results):
    _, rows, _ = shelf("Qwen3", [written("Qwen3", PUT, LOOK)], results=results)
    assert "a step with 2 calls must give info['results'] with one result per call, not" in reason(rows)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (None, "contract/Shelf-v0 gives no info['tools']: turnkey.rollout.action_format=tools calls the tools"),
        ([{"name": "put"}], "info['tools'][0] must be {'type': 'function', 'function': {...}}, not dict"),
        ([TOOLS[0], TOOLS[0]], "info['tools'] has several tools of the name 'put'"),
        (
            [{"type": "function", "function": {"name": "put", "parameters": {"type": "thing"}}}],
            "the parameters of the tool 'put' are not a JSON Schema: 'thing' is not valid",
        ),
    ],
)
def test_an_environment_without_proper_tools_fails_its_episodes(shelf, tools, message):
    _, rows, script = shelf("Qwen3", [], "turnkey.rollout.max_turns=1", tools=tools)
    assert message in reason(rows)
    assert script.prompts == []


def test_prompts_of_a_template_show_the_observation_and_what_went_wrong(shelf):
    turns = [written("Qwen3", ("fly", {}), PUT), written("Qwen3", LOOK), "done"]
    steps, rows, script = shelf("Qwen3", turns, prompts=())
    assert len(rows) == 3
    assert [step["anchor"] for step in steps] == ["", "cup cup", "cup cup"]
    assert "on the shelf: cup cup\nError: there is no tool 'fly'" in script.text(1)
    assert '{"calls":[{"arguments":{"thing":"cup","times":2},"name":"put"}]}' in script.text(1)
    assert "Error" not in script.text(2).rpartition("on the shelf")[2]


def test_mistrals_calls_in_prompts_of_a_template(shelf):
    name = "Mistral Nemo"
    turns = [written(name, PUT, LOOK), f"[TOOL_CALLS]{UNREADABLE['Qwen3']}", "done"]
    steps, rows, script = shelf(name, turns, prompts=())
    assert [step["action"] and json.loads(step["action"]) for step in steps] == [
        {"calls": [{"arguments": PUT[1], "name": "put"}, {"arguments": {}, "name": "look"}]},
        None,
        {"text": "done"},
    ]
    assert len(rows) == 3
    assert script.text(0).count("[AVAILABLE_TOOLS]") == 1
    assert "on the shelf: cup cup" in script.text(1)
    assert "Error: the tool call cannot be read" in script.text(2)


@pytest.mark.parametrize("text", ["<|im_end|>", "<tool_call>", "</tool_response>"])
def test_control_tokens_of_a_result_are_plain_text(shelf, text):
    _, _, script = shelf("Qwen3", [written("Qwen3", ("put", {"thing": text})), "done"])
    after = script.text(1)[len(script.text(0)) :].partition("<tool_response>")[2]
    assert f"{text[0]} {text[1:]} is there" in after
