"""The agent loop as verl makes it, with real environments in real hosts; only the language model is a script."""

from __future__ import annotations

import copy
import io
import json
import logging
import re
import socket
import threading
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from itertools import chain, cycle, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from awkward_env import Gallery
from contract_tools import Compose, Pictures, Worker
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from PIL import Image
from scripted import Script, counts, opening_thoughts
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit, validate_record
from verl_turnkey.envs import make
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.algorithm import METRICS
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log.bounds import chosen
from verl_turnkey.plugins.log.writer import Tables
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.view.join import read

TALK = ["turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=20", "data.max_response_length=600"]
LEVEL = {"level": "MiniGrid-Empty-Random-6x6-v0"}
INFO = {*METRICS, "failed", "composed_return.step"} - {"reward"}
"""what group filtering may compare, which has a reward of its own"""


def awkward(**kwargs: Any) -> Task:
    return Task("contract/Awkward-v0", 3, kwargs)


def steps(outputs: list[AgentLoopOutput]) -> list[dict[str, Any]]:
    """The one step of each row's record."""
    records = []
    for i, row in enumerate(outputs):
        validate_record(row.extra_fields["turnkey"], f"row {i}")
        assert row.extra_fields["turnkey"]["failed"] is None
        assert len(row.extra_fields["turnkey"]["steps"]) == 1
        records += row.extra_fields["turnkey"]["steps"]
    return records


def reason(outputs: list[AgentLoopOutput], *components: str) -> str:
    """Why an episode failed; checks that it is exactly one row that verl can hold and nothing learns from.

    ``components``: of the rewards, besides ``step``.
    """
    (row,) = outputs
    record = row.extra_fields["turnkey"]
    validate_record(record, "the row")
    assert record["steps"] == []
    assert len(row.prompt_ids) >= 1
    assert (len(row.response_ids), row.response_mask, row.response_logprobs) == (1, [0], [0.0])
    assert row.reward_score == 0.0
    info = row.extra_fields["reward_extra_info"]
    assert info == dict.fromkeys([*INFO, *(f"composed_return.{name}" for name in components)], 0.0) | {"failed": 1.0}
    assert row.num_turns == 0
    assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 6  # of the step before
    return record["failed"]


# --- a real environment -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", ["template", "conversation"])
def test_a_hint_stands_behind_the_task(play, prompt):
    hinted = {"turnkey_hint": "look behind you", "turnkey_hint_share": 0.5}
    task, limits = Task("turnkey/MiniGrid-v0", 11, LEVEL), ("turnkey.rollout.max_turns=2",)
    for fields in ({}, hinted):
        _, script = play(["turn left"] * 2, task, *limits, f"turnkey.rollout.prompt={prompt}", fields=fields)
        for t in range(len(script.prompts)):  # no room for a second turn in a conversation
            assert ("\nHint: look behind\n" in script.text(t)) == bool(fields)
        assert script.prompts


@pytest.mark.parametrize("prompt", ["template", "conversation"])
@pytest.mark.parametrize("validation", [False, True])
def test_example_turns_are_in_every_prompt_and_are_not_trained(play, tmp_path, prompt, validation):
    (tmp_path / "examples.yaml").write_text("- {observation: a wall, action: turn around}\n")
    settings = (f"turnkey.rollout.examples={tmp_path}/examples.yaml", f"turnkey.rollout.prompt={prompt}")
    task = Task("turnkey/MiniGrid-v0", 11, LEVEL)
    outputs, script = play(
        ["turn left"] * 2, task, "turnkey.rollout.max_turns=2", *settings, fields={VALIDATION: validation}
    )
    observation, _ = make(task.env_id, task.kwargs).reset(seed=task.seed)
    assert 0 <= script.text(0).find("turn around") < script.text(0).find(observation)
    assert all("turn around" in script.text(t) for t in range(len(script.prompts)))
    assert not any("turn around" in script.tokenizer.decode(row.response_ids) for row in outputs)


def test_rows_and_records_of_a_minigrid_episode(play, tokenizer):
    task = Task("turnkey/MiniGrid-v0", 11, LEVEL)
    turns = ["turn left", "dance", "turn right", "go forward"]
    outputs, script = play(turns, task, "turnkey.rollout.max_turns=4", "turnkey.rollout.invalid_action_penalty=0.2")

    env = make(task.env_id, task.kwargs)
    observation, info = env.reset(seed=task.seed)
    expected = []
    for t, turn in enumerate(turns):
        assert observation in script.text(t)
        assert info["task" if t == 0 else "state_key"]
        key, reward = info["state_key"], 0.0
        valid = turn in info["admissible"]
        if valid:  # an action that does not parse never reaches the environment
            observation, reward, *_, info = env.step(turn)
        expected.append((t, key, turn if valid else None, valid, 0.0 if valid else 0.2, reward))
    records = steps(outputs)
    assert [(s["step"], s["anchor"], s["action"], s["valid"], s["penalty"], s["reward"]) for s in records] == expected
    assert records[1]["anchor"] == records[2]["anchor"]  # "dance" left the state as it was
    assert len({s["anchor"] for s in records}) == 2  # left and right again
    assert [s["truncated"] for s in records] == [False, False, False, True]
    assert not any(s["terminated"] or s["success"] for s in records)

    for t, (row, turn) in enumerate(zip(outputs, turns, strict=True)):
        ids = [*tokenizer.encode(turn), tokenizer.eos_token_id]
        assert row.prompt_ids == script.prompts[t]
        assert row.response_ids == ids
        assert row.response_mask == [1] * len(ids)
        assert row.response_logprobs == [-0.01 * i for i in range(len(ids))]
        assert row.reward_score == 0.0
        assert row.extra_fields["min_global_steps"] == row.extra_fields["max_global_steps"] == 7
        info = row.extra_fields["reward_extra_info"]
        assert info == {
            "acc": 0.0,
            "failed": 0.0,
            "env_return": 0.0,
            "episode_length": 4.0,
            "invalid_rate": 0.25,
            "unparsed_rate": 0.0,  # "dance" is an action, only none of this environment's
            "composed_return.step": 0.0,
        }
        assert all(type(value) is float for value in info.values())


def test_prompts_that_are_rendered_anew_are_rows_of_their_own_in_both_layouts(play):
    """The rows of today, to the byte, but for the reason that the merged layout gives."""
    task = Task("turnkey/MiniGrid-v0", 11, LEVEL)
    turns = ["turn left", "dance", "turn right", "go forward"]
    rows = {}
    for layout in ("steps", "merged"):
        rows[layout], _ = play(turns, task, "turnkey.rollout.max_turns=4", f"turnkey.rollout.layout={layout}")
    whys = [row.extra_fields.pop("turnkey_break") for row in rows["merged"]]
    assert whys == ["first", "prefix", "prefix", "prefix"]
    assert [row.extra_fields.pop("turnkey_break") for row in rows["steps"]] == [None] * 4
    for merged, alone in zip(rows["merged"], rows["steps"], strict=True):
        for row in (merged, alone):
            row.metrics.generate_sequences = row.metrics.tool_calls = 0.0  # seconds
        assert merged == alone
        assert json.dumps(merged.as_dict(), default=str) == json.dumps(alone.as_dict(), default=str)
    assert [s["version"] for s in steps(rows["merged"])] == [7] * 4


def forward_into_the_goal(prompt: str) -> str:
    """Solves an empty room with the goal in the corner ahead and to the right of the start."""
    now = prompt.rpartition("Free steps:")[2]
    return "turn right" if int(now.split()[0]) == 0 else "go forward"


def test_success_is_on_every_row(play):
    task = Task("turnkey/MiniGrid-v0", 0, {"level": "MiniGrid-Empty-5x5-v0"})
    outputs, _ = play(forward_into_the_goal, task, "turnkey.rollout.max_turns=20")
    records = steps(outputs)
    assert [s["action"] for s in records] == ["go forward"] * 2 + ["turn right"] + ["go forward"] * 2
    assert all(s["success"] for s in records)
    assert [s["terminated"] for s in records] == [False] * 4 + [True]
    assert not any(s["truncated"] for s in records)
    assert [s["reward"] for s in records] == [0.0] * 4 + [1.0]
    for row in outputs:
        assert row.reward_score == 1.0
        assert row.extra_fields["reward_extra_info"]["acc"] == 1.0
        assert row.extra_fields["reward_extra_info"]["env_return"] == 1.0


def test_two_sessions_of_a_task_begin_alike_and_two_tasks_do_not(play):
    first = {}
    for name, seed, session in (("a", 1, 0), ("b", 1, 1), ("c", 2, 0)):
        task = Task("turnkey/MiniGrid-v0", seed, {"level": "BabyAI-GoToLocal-v0"})
        outputs, script = play(["turn left"], task, "turnkey.rollout.max_turns=1", session=session)
        first[name] = (script.prompts[0], steps(outputs)[0]["anchor"])
    assert first["a"] == first["b"]
    assert first["a"][0] != first["c"][0]
    assert first["a"][1] != first["c"][1]


# --- turns, and what the records say of them --------------------------------------------------------------------------

OWN = """
def shout(text, admissible):
    return text.split('!')[1]
def short(turns):
    if turns[-1].action == "boom":
        raise RuntimeError("no words for it")
    return " and ".join(turn.action for turn in turns)
def broken(steps):
    raise KeyError('no such book')
def seen(steps):
    assert [step.content for step in steps] == ["", "what <action>", "<action>lose</action>"], steps
    return [1.0] * len(steps)
def score(data_source, solution_str, ground_truth, extra_info, right):
    return {'score': float(solution_str == right) + len(extra_info['turns'])}
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file with functions of the user's own."""
    (tmp_path / "own.py").write_text(OWN)
    return tmp_path / "own.py"


VERLS = (
    "turnkey.rewards=[{name: step}, {name: verl, weight: 10}]",
    "reward.custom_reward_function.path={own}",
    "reward.custom_reward_function.name=score",
    "+reward.custom_reward_function.reward_kwargs.right=win",
)
PAID = "{name: step, weight: 10}, {name: length, weight: -0.5, unit: turns}, {name: outcome, label: solved}"
SCORED = "{name: step}, {name: length, unit: turns, label: scorer, weight: 0.5, column: turn_score}"
FURTHER = {"says_more": True}
CUT = {"terminated": [False, False], "truncated": [False, True], "reward": [0.0, 0.5], "success": [False, False]}
TAGS = "turnkey.rollout.action_format=tags"
EPISODES: dict[str, tuple[list[str], dict[str, Any], tuple[str, ...], dict[str, list[Any]]]] = {
    # without a state_key the observation stands for the state; without `won` a positive end is a success
    "won": (
        ["look", "win"], {}, (),
        {"success": [True] * 2, "terminated": [False, True], "anchor": ["a room 3", "a room"]},
    ),
    "lost": (["look", "lose"], {}, (), {"success": [False] * 2, "terminated": [False, True]}),
    "truncated by the environment": (
        ["look", "time out"], {}, ("turnkey.rollout.max_turns=5",), {**CUT, "info.acc": [0.0] * 2},
    ),
    "truncated by the limit": (
        ["look", "find"], {}, ("turnkey.rollout.max_turns=2",), {**CUT, "info.acc": [0.0] * 2},
    ),
    "truncated by the budget of a prompt": (
        ["look", "grow"], {}, ("data.max_prompt_length=250",),
        {"action": ["look", "grow"], "truncated": [False, True], "longest prompt": [250]},
    ),
    "arguments of the task win, those of the configuration alone hold, too": (
        ["win"], {"observation": "a cellar"},
        ("+turnkey.env.kwargs.observation='a hall'", "+turnkey.env.kwargs.says_more=true"),
        {"anchor": ["a cellar 3"], "extra.tool_calls": [0.0]},
    ),
    "an action that the environment gets and calls invalid": (
        ["stumble", "lose"], {}, (),
        {"action": ["stumble", "lose"], "valid": [False, True], "penalty": [0.1, 0.0]},
    ),
    "tags; past turns show actions": (
        ["I think <action>look</action>", "no tags", "<action>lose</action>"], {}, (TAGS,),
        {"action": ["look", None, "lose"], "shown": ["told", "Action: look", "Action: no tags"],
         "not shown": ["I think"] * 3},
    ),
    "thoughts that past turns keep": (
        ["<think>dark</think><action>look</action>", "<action>lose</action>"], {},
        (TAGS, "turnkey.rollout.keep_thinking=true"),
        {"shown": ["told", "Action: <think>dark</think><action>look</action>\n"]},
    ),
    "a parser of the user's": (
        ["what?", "oh !lose! oh"], {}, ("turnkey.rollout.action_format={own}:shout",),
        {"action": [None, "lose"], "valid": [False, True]},
    ),
    # half a surrogate pair would stop the tokenizer, and the record on its way to the trainer
    "a text that no encoding takes": (
        ["win"], {"observation": "a \ud800 room"}, (), {"anchor": ["a ? room 3"], "shown": ["a ? room 3"]},
    ),
    # the environment's rewards and return stay what they were; the composed ones stand beside them, part by name
    "rewards are the weighted sum of the components": (
        ["look", "win"], {}, (f"turnkey.rewards=[{PAID}]",),
        {"reward": [0.0, 0.5], "composed_reward": [-0.5, 5.5], "score": [5.0] * 2, "info.env_return": [0.5] * 2,
         "info.composed_return.step": [5.0] * 2, "info.composed_return.length": [-1.0] * 2,
         "info.composed_return.solved": [1.0] * 2},
    ),
    # it gets the fields of the data row and the text of the last turn; its arguments are verl's own keys
    "verl's reward function is a component": (
        ["look", "win"], {}, VERLS,
        {"composed_reward": [0.0, 0.5 + 10 * 3.0], "info.composed_return.verl": [30.0] * 2,
         "info.composed_return.step": [0.5] * 2},
    ),
    "success is the environment's whatever the rewards are": (
        ["win"], {}, ("turnkey.rewards=[{name: step, weight: -1}]",),
        {"reward": [0.5], "composed_reward": [-0.5], "success": [True]},
    ),
    # a turn without an action brings nothing: no potential twice, no tool call twice
    "what the environment says further reaches rewards and methods": (
        ["call call now", "", "look", "win"], FURTHER,
        ("turnkey.rewards=[{name: step}, {name: potential, gamma: 1.0}]",),
        {"extra.tool_calls": [2.0, 0.0, 0.0, 0.0], "composed_reward": [1.0, 0.0, -1.0, 0.5]},
    ),
    "columns of components reach the methods and not the reward": (
        ["call", "", "win"], FURTHER, (f"turnkey.rewards=[{SCORED}]",),
        {"extra.turn_score": [0.5] * 3, "extra.tool_calls": [1.0, 0.0, 0.0], "composed_reward": [0.0, 0.0, 0.5],
         "info.composed_return.step": [0.5] * 3, "info.composed_return.scorer": [1.5] * 3, "score": [0.5] * 3},
    ),
    "columns are those of the answer": (
        ["call now", "look"], FURTHER, ("turnkey.rollout.max_turns=2",),
        {"extra.parent": ["call now", "call now look"], "extra.turn_value": [1.0, 2.0]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODES)
def test_turns_and_what_the_records_say_of_them(play, own, name: str):
    turns, kwargs, overrides, expected = EPISODES[name]
    outputs, script = play(turns, awkward(**kwargs), *(word.replace("{own}", str(own)) for word in overrides))
    for column, values in expected.items():
        part, _, key = column.partition(".")
        if column == "shown":
            assert [value in script.text(t) for t, value in enumerate(values)] == [True] * len(values)
        elif column == "not shown":
            assert [value in script.text(t) for t, value in enumerate(values)] == [False] * len(values)
        elif column == "longest prompt":
            assert [max(map(len, script.prompts))] <= values
        elif column == "score":
            assert [row.reward_score for row in outputs] == values
        elif part == "info":
            assert [row.extra_fields["reward_extra_info"][key] for row in outputs] == values
        else:
            assert [step[part][key] if key else step[part] for step in steps(outputs)] == values, column
    if components := {column.removeprefix("info.") for column in expected if column.startswith("info.composed_return")}:
        info = outputs[0].extra_fields["reward_extra_info"]
        assert {key for key in info if key.startswith("composed_return.")} == components


@pytest.mark.parametrize(
    ("fields", "version"), [({"max_global_steps": 5}, 5), ({"min_global_steps": None, "max_global_steps": None}, None)]
)
def test_a_turn_counts_by_the_newest_weights_that_wrote_it_if_the_server_tells(play, monkeypatch, fields, version):
    """verl's client says None as long as no weights were sent."""
    generate = Script.generate

    async def with_versions(self, *args: Any, **kwargs: Any) -> TokenOutput:
        output = await generate(self, *args, **kwargs)
        return output.model_copy(update={"extra_fields": {**output.extra_fields, "min_global_steps": 3, **fields}})

    monkeypatch.setattr(Script, "generate", with_versions)
    outputs, _ = play(["look", "win"], awkward())
    assert [step.get("version", "none") for step in steps(outputs)] == [version or "none"] * 2
    assert [row.extra_fields["max_global_steps"] for row in outputs] == [version] * 2


FAILED: dict[str, tuple[list[str], dict[str, Any], tuple[str, ...], str]] = {
    "first prompt": ([], {"observation": "z" * 500}, ("data.max_prompt_length=300",), "max_prompt_length allows 300"),
    "column": (
        ["win"], FURTHER, ("turnkey.rewards=[{name: step}, {name: length, unit: turns, column: tool_calls}]",),
        "the environment gives info['extra']['tool_calls'] itself",
    ),
    "component": (
        ["win"], {}, ("turnkey.rewards=[{name: step}, {name: '{own}:broken'}]",), "no such book",
    ),
    # and not the group, as an exception of the agent loop would; each component alone is within the limit
    "sum": (
        ["win"], {}, ("turnkey.rewards=[{name: step}, {name: outcome, weight: 9e17}, {name: outcome, weight: 8e17, "
                      "label: again}]",), "the components sum up to 1.7e+18 at step 0",
    ),
    "images": ([], {"images": 1}, (), "this model cannot take them: ValueError: Multimodal inputs require"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILED)
def test_what_costs_an_episode(play, own, name: str):
    turns, kwargs, overrides, words = FAILED[name]
    outputs, script = play(turns, awkward(**kwargs), *(word.replace("{own}", str(own)) for word in overrides))
    assert words in reason(
        outputs, *{"component": ["broken"], "sum": ["outcome", "again"], "column": ["length"]}.get(name, ())
    )
    assert len(script.prompts) == len(turns)


def test_a_host_runs_as_many_calls_at_once_as_the_configuration_says(play):
    hosts = ("turnkey.env.hosts=1", "turnkey.env.instances_per_host=4", "turnkey.env.calls_per_host=2")
    groups, _ = play(["win"] * 4, Task("contract/Crowded-v0", 3, {}), *hosts, "turnkey.env.step_timeout=60", sessions=4)
    assert max(steps(outputs)[0]["extra"]["most"] for outputs in groups) == 2


# --- prompts and sampling ---------------------------------------------------------------------------------------------


def test_history_is_trimmed_within_the_budget(play):
    observation = "x" * 150
    turns = ["one", "two", "three", "lose"]
    overrides = ["turnkey.rollout.history=3", "turnkey.rollout.system=Be brief."]
    roomy = play(turns, awkward(observation=observation), *overrides)[1]
    budget = len(roomy.prompts[1]) + 20  # room for one past turn, and not for two
    outputs, script = play(turns, awkward(observation=observation), *overrides, f"data.max_prompt_length={budget}")
    assert len(steps(outputs)) == 4
    for t in range(4):
        assert len(script.prompts[t]) <= budget
        text = script.text(t)
        assert "Be brief." in text
        assert "do as you are told" in text
        assert text.endswith("<|im_start|>assistant\n")
    assert [text.count(observation) for text in map(roomy.text, range(4))] == [1, 2, 3, 4]
    assert [text.count(observation) for text in map(script.text, range(4))] == [1, 2, 2, 2]
    assert "Action: three" in script.text(3)  # the latest turn is the one that stays
    assert "Action: two" not in script.text(3)


def test_sampling_parameters_reach_the_server(play):
    overrides = ["turnkey.rollout.max_tokens_per_turn=9", "turnkey.rollout.stop=[';']"]
    _, script = play(["lose"], awkward(), *overrides, "turnkey.rollout.stop_token_ids=[5,6]")
    expected = {"temperature": 1.0, "logprobs": True, "max_tokens": 9, "stop": [";"], "stop_token_ids": [5, 6]}
    assert script.params == [expected]
    _, script = play(["lose"], awkward())
    assert script.params == [{"temperature": 1.0, "logprobs": True, "max_tokens": 16}]


def test_thoughts_that_the_template_opens_are_no_action_no_past_action_and_no_answer(play, tokenizer, own):
    turns = [
        "maybe <action>look</action>",
        "or <action>look</action></think>what <action>",
        "no</think><action>lose</action>",
    ]
    outputs, script = play(
        turns,
        awkward(),
        TAGS,
        f"turnkey.rewards=[{{name: '{own}:seen'}}]",
        tokenizer=opening_thoughts(tokenizer),
    )
    assert [s["action"] for s in steps(outputs)] == [None, None, "lose"]
    assert outputs[0].extra_fields["reward_extra_info"]["unparsed_rate"] == pytest.approx(2 / 3)
    assert script.text(0).endswith("assistant\n<think>\n")
    assert "Action: (nothing)" in script.text(1)
    assert "Action: what <action>" in script.text(2)
    assert "maybe" not in script.text(1) + script.text(2)


SUMMARY = ("turnkey.rollout.summary={own}:short", "turnkey.rollout.history=1")


def test_what_is_no_longer_shown_is_summarized(play, own):
    past = [word.format(own=own) for word in SUMMARY]
    line = "turnkey.rollout.history_line='[{step}] {action}'"
    _, script = play(["one", "two", "three", "lose"], awkward(), *past, line)
    assert "What happened before" not in script.text(1)
    assert "[1] one\n" in script.text(1)
    assert "What happened before: one and two\n" in script.text(3)
    assert "[3] three\n" in script.text(3)
    assert "[2]" not in script.text(3)


def test_a_summary_that_fails_costs_its_episode(play, own):
    past = [word.format(own=own) for word in SUMMARY]
    outputs, script = play(["boom", "look", "lose"], awkward(), *past)
    assert "turnkey.rollout.summary raised RuntimeError: no words for it" in reason(outputs)
    assert len(script.prompts) == 2


# --- actions as tool calls --------------------------------------------------------------------------------------------

SHOWS_TOOLS = "{% for tool in tools or [] %}<tools>{{ tool | tojson }}</tools>\n{% endfor %}"
JSON = "turnkey.rollout.action_format=json"


@pytest.fixture
def tool_tokenizer(tokenizer) -> Any:
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = SHOWS_TOOLS + tokenizer.chat_template
    return copied


def call(arguments: str, name: str = "act") -> str:
    return f'I think. <tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_actions_are_tool_calls(play, tool_tokenizer, tmp_path: Path):
    turns = [
        call('{"action": "look"}'),
        "no call",
        call('{"action": "look"}', name="fly"),
        call('{"act": "look"}'),
        call("{action}"),
        call('{"action": 7}'),
        call('{"action": "win"}') + call('{"action": "lose"}'),
    ]
    outputs, script = play(turns, awkward(), JSON, f"turnkey.log.trajectories={tmp_path}", tokenizer=tool_tokenizer)
    assert [s["action"] for s in steps(outputs)] == ["look", None, None, None, None, "7", "lose"]
    reasons = [turn["parse_note"] for turn in logged(tmp_path).turns]
    expected = ("no tool call", "'fly'", "'action' is a required property", "cannot be read")
    for reply, words in zip(reasons[1:5], expected, strict=True):
        assert words in reply
    assert '"name": "act"' in script.text(0)
    assert "call the tool with one action" in script.text(0)
    assert "Action: look\n" in script.text(1)
    assert script.params[0].get("stop_token_ids") is None


def test_a_tool_parser_may_have_tokens_that_end_a_turn(play, tool_tokenizer):
    tool_tokenizer.add_tokens(["<|observation|>", "<|user|>"], special_tokens=True)
    overrides = [JSON, "actor_rollout_ref.rollout.multi_turn.format=glm", "turnkey.rollout.stop_token_ids=[5]"]
    text = "<tool_call>act\n<arg_key>action</arg_key>\n<arg_value>lose</arg_value>\n</tool_call>"
    outputs, script = play([text], awkward(), *overrides, tokenizer=tool_tokenizer)
    assert [s["action"] for s in steps(outputs)] == ["lose"]
    stop = script.params[0]["stop_token_ids"]
    assert stop[0] == 5
    assert tool_tokenizer.convert_tokens_to_ids("<|observation|>") in stop


MODEL = {"model_type": "qwen3", "max_position_embeddings": 5000}


@pytest.mark.parametrize(
    ("model", "overrides", "message"),
    [
        ({"tools": True}, (JSON,), None),
        ({}, (JSON,), r"chat template shows tools.*action_format=tags"),
        ({"model_type": "gemma4"}, (), r"model_type=gemma4 .*tokenizer_path"),
        ({"max_position_embeddings": 1800}, TALK, None),
        ({"max_position_embeddings": 1700}, TALK, r"1800 tokens .*the model takes 1700"),
        (
            {}, (*TALK, "+data.apply_chat_template_kwargs.single_question=true"),
            r"only one question.*set turnkey\.rollout\.prompt=template",
        ),
    ],
)  # fmt: skip
def test_models_that_cannot_play_stop_the_run(
    compose: Compose, tokenizer, tool_tokenizer, hosts, monkeypatch, model, overrides, message
):
    monkeypatch.setattr(loop_worker, "_process", None)
    parts = {
        "tokenizer": tool_tokenizer if "tools" in model else tokenizer,
        "processor": None,
        "model_config": SimpleNamespace(hf_config=SimpleNamespace(**MODEL | model)),
    }
    with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        loop_worker.prepare(SimpleNamespace(config=compose("+turnkey=gigpo", *overrides), **parts))


# --- images -----------------------------------------------------------------------------------------------------------

SHOWS_IMAGES = """\
{% for m in messages %}<|im_start|>{{ m['role'] }}
{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] -%}
{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def sees(tokenizer) -> dict[str, Any]:
    """The parts of a vision-language model: images of 2 x 2 patches, through transformers' LLaVA processor."""
    from transformers import CLIPImageProcessor, LlavaProcessor

    copied = copy.deepcopy(tokenizer)
    copied.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<image>"]})
    copied.chat_template = SHOWS_IMAGES
    images = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        images,
        copied,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=SHOWS_IMAGES,
    )
    return {"tokenizer": copied, "processor": processor, "hf_model_type": "llava", "dataset_cls": Pictures}


def awkward_pictures(images: int) -> Task:
    return Task("contract/Awkward-v0", 3, {"images": images})


def test_images_go_verls_way(play, sees):
    outputs, script = play(["look", "win"], awkward_pictures(2), **sees)
    patch = sees["tokenizer"].convert_tokens_to_ids("<image>")
    for row, seen, brightness in zip(outputs, script.seen, (0, 100), strict=True):
        assert row.prompt_ids.count(patch) == 2 * 4  # of the current observation alone
        images = row.multi_modal_data["images"]
        assert seen["image_data"] is images
        assert [(image.size, image.getpixel((0, 0))) for image in images] == [((30, 20), (brightness,) * 3)] * 2
    worker = Worker()
    worker.processor, worker.tokenizer = sees["processor"], sees["tokenizer"]
    inputs = worker._compute_multi_modal_inputs(outputs[0], torch.tensor([outputs[0].prompt_ids]))
    assert inputs["pixel_values"].shape == (2, 3, 28, 28)  # what the trainer's model gets
    assert [s["action"] for s in steps(outputs)] == ["look", "win"]
    (row,), script = play(["win"], awkward(), **sees)  # text goes through the same model
    assert (script.seen, row.multi_modal_data) == ([{}], {})


@pytest.mark.parametrize("anchor", ["state_key", "observation"])
def test_images_tell_states_apart(play, sees, anchor):
    """The same words, "a room", with a dark image at the start and a bright one from then on."""
    task = Task("contract/Awkward-v0", 3, {"images": 1, "same_words": True})
    settings = [f"turnkey.rollout.anchor={anchor}", "++turnkey.credit.similarity=0.9"]
    outputs, _ = play(["look", "look", "win"], task, *settings, **sees)
    played = steps(outputs)
    dark, bright, again = (step["anchor"] for step in played)
    assert dark != bright == again
    assert [step["extra"]["next_anchor"] for step in played] == [bright] * 3
    assert {step["extra"]["text"] for step in played} == {"a room"}
    images = [step["extra"]["images"] for step in played]
    assert images[0] != images[1] == images[2]


def test_the_log_has_each_picture_once(play, sees, tmp_path):
    """A dark one before the first turn, then a bright one; each turn names those that it added to the conversation."""
    play(["look", "look", "win"], awkward_pictures(2), *TALK, f"turnkey.log.trajectories={tmp_path}", **sees)
    dark, *bright = [turn["images"] for turn in logged(tmp_path).turns]
    assert bright[0] == bright[1] != dark
    pictures = read(tmp_path, "pictures")
    names = [{*cell.split(" ")} for cell in (dark, bright[0])]
    assert [len(name) for name in names] == [1, 1]
    assert sorted(pictures["picture"]) == sorted(set.union(*names))
    for name, png in zip(pictures["picture"], pictures["png"], strict=True):
        image = Image.open(io.BytesIO(png))
        assert (image.format, image.size) == ("PNG", (30, 20))
        assert image.getpixel((0, 0)) == ((0, 0, 0) if {name} == names[0] else (100, 100, 100))
    process = loop_worker._process
    assert process is not None
    of_step = [process.log._new_pictures(step, set.union(*names)) for step in (7, 8, 7)]
    assert of_step == [set(), set.union(*names), set()]


def test_images_or_their_tokens_that_cannot_be_cost_their_episode(play, sees):
    painted, script = play([], awkward_pictures(-1), **sees)
    assert "info['images'] must hold uint8 arrays" in reason(painted)
    assert script.prompts == []
    for overrides in (TALK, []):
        outputs, _ = play(["look", "a <image>"], awkward_pictures(1), *overrides, **sees)
        assert "the model wrote the token that stands for an image" in reason(outputs)


# --- conversations ----------------------------------------------------------------------------------------------------


def prompt_and_answer(script: Script, t: int) -> list[int]:
    """The prompt ``t`` and the ids that answered it."""
    return script.prompts[t] + script.answers[t]


def test_a_conversation_in_minigrid(play, tokenizer):
    """Each prompt begins with the one before and its turn; the step's row has the prompt that the server saw."""
    task = Task("turnkey/MiniGrid-v0", 11, LEVEL)
    turns = ["turn left", "dance", "turn right", "go forward"]
    overrides = [*TALK, "turnkey.rollout.max_turns=4", "data.max_response_length=3000"]
    outputs, script = play(turns, task, *overrides, cached=100)
    assert len(script.prompts) == 4
    newline = tokenizer.encode("\n")
    for t in range(1, 4):
        before = prompt_and_answer(script, t - 1) + newline
        assert script.prompts[t][: len(before)] == before
        added = tokenizer.decode(script.prompts[t][len(before) :])
        assert added.startswith(f"<|im_start|>user\nObservation (step {t + 1}): ")
        assert "Possible actions: " in added
        assert added.endswith("<|im_end|>\n<|im_start|>assistant\n")
        assert "Your task" not in added
    assert script.text(3).count("Your task: ") == script.text(3).count("Answer with your next action") == 1
    assert {params["max_tokens"] for params in script.params} == {20}
    assert masked_in(outputs) == script.answers
    assert [step["action"] for step in recorded(outputs)] == ["turn left", None, "turn right", "go forward"]
    assert recorded(outputs)[-1]["truncated"]
    (row,) = outputs
    assert row.extra_fields["turnkey_cached"] == [100 / len(prompt) for prompt in script.prompts]


def masked_in(outputs: list[AgentLoopOutput]) -> list[list[int]]:
    """The ids under each run of ones, in order: what the model is trained on."""
    turns: list[list[int]] = []
    for row in outputs:
        last = 0
        for token, on in zip(row.response_ids, row.response_mask, strict=True):
            if on and not last:
                turns.append([])
            if on:
                turns[-1].append(token)
            last = on
    return turns


def recorded(outputs: list[AgentLoopOutput]) -> list[dict[str, Any]]:
    """The steps of all rows' records, in order."""
    return [step for row in outputs for step in row.extra_fields["turnkey"]["steps"]]


@pytest.mark.parametrize("when_full", ["end", "drop_oldest"])
def test_a_full_conversation(play, when_full):
    overrides = [*TALK, f"turnkey.rollout.when_full={when_full}", "turnkey.rollout.max_turns=30"]
    outputs, script = play(["look"] * 30, awkward(), *overrides)
    records = recorded(outputs)
    assert [step["truncated"] for step in records] == [False] * (len(records) - 1) + [True]
    assert len(records) == 30 if when_full == "drop_oldest" else 3 < len(records) < 30
    fresh = len(script.prompts[0]) if when_full == "end" else 1200 / 2
    assert max(map(len, script.prompts)) + 20 <= fresh + 600
    assert masked_in(outputs) == script.answers
    breaks = [
        t
        for t in range(1, len(records))
        if script.prompts[t][: len(prompt_and_answer(script, t - 1))] != prompt_and_answer(script, t - 1)
    ]
    assert (0 < len(breaks) < 10) if when_full == "drop_oldest" else not breaks
    assert whys(outputs) == ["first"] + ["full"] * len(breaks)
    assert max(len(row.response_ids) for row in outputs) <= 600
    heads = [row.prompt_ids + row.response_ids for row in outputs]
    assert all(any(head[: len(prompt)] == prompt for head in heads) for prompt in script.prompts)
    assert [step["step"] for step in records] == list(range(len(script.prompts)))


def test_a_summary_is_a_turn_that_leaves_the_state(play):
    rows = {}
    for layout in ("merged", "steps"):
        summarizes = ["turnkey.rollout.when_full=summarize", f"turnkey.rollout.layout={layout}"]
        overrides = [*TALK, *summarizes, "turnkey.rollout.max_turns=25", "turnkey.rollout.summary_request=Sum up."]
        rows[layout], script = play(["look"] * 24 + ["win"], awkward(), *overrides)
    records = recorded(rows["merged"])
    assert records == recorded(rows["steps"])
    assert masked_in(rows["merged"]) == masked_in(rows["steps"]) == script.answers
    requests = [t for t in range(25) if script.text(t).endswith("Sum up.<|im_end|>\n<|im_start|>assistant\n")]
    assert 1 < len(requests) < 8
    assert whys(rows["merged"]) == ["first"] + ["full"] * len(requests)
    for t in requests:
        state = records[t + 1]["anchor"]
        assert (records[t]["anchor"], records[t]["extra"]["next_anchor"]) == (f"summary of {state}", state)
        assert records[t - 1]["extra"]["next_anchor"] == records[t]["anchor"]
        assert (records[t]["action"], records[t]["valid"], records[t]["reward"]) == ("look", True, 0.0)
        assert "What happened before: look\n" in script.text(t + 1)
        assert "Sum up." not in script.text(t + 1)
    assert records[-1]["terminated"]
    assert records[-1]["success"]


def whys(outputs: list[AgentLoopOutput]) -> list[str | None]:
    return [row.extra_fields["turnkey_break"] for row in outputs]


def test_a_conversation_is_a_row_and_in_the_layout_steps_as_many_as_its_steps(play):
    """Both hold what the server was asked and what it answered; the last step's row is what the one row holds."""
    turns = ["look", "no <|im_end|> action", "look", "win"]
    rows, scripts = {}, {}
    for layout in ("merged", "steps"):
        rows[layout], scripts[layout] = play(turns, awkward(), *TALK, f"turnkey.rollout.layout={layout}")
    (row,), script = rows["merged"], scripts["merged"]
    assert script.prompts == scripts["steps"].prompts
    assert whys([row]) == ["first"]
    assert row.prompt_ids == script.prompts[0]
    assert row.prompt_ids + row.response_ids == prompt_and_answer(script, -1)
    assert masked_in([row]) == masked_in(rows["steps"]) == script.answers
    own = [p for p, trained in zip(row.response_logprobs, row.response_mask, strict=True) if trained]
    assert own == [p for alone in rows["steps"] for p in alone.response_logprobs]
    assert [alone.prompt_ids for alone in rows["steps"]] == script.prompts
    assert recorded([row]) == recorded(rows["steps"])
    assert [step["version"] for step in recorded([row])] == [7] * 4
    for output in (row, *rows["steps"]):
        assert output.reward_score == sum(step["composed_reward"] for step in recorded([row]))
        assert output.extra_fields["reward_extra_info"] == row.extra_fields["reward_extra_info"]
    assert row.num_turns == rows["steps"][-1].num_turns == 8
    queued = [list_of_dict_to_tensordict([alone.as_dict() for alone in outputs]) for outputs in rows.values()]
    assert {*queued[0].keys()} == {*queued[1].keys()}


def test_a_conversation_that_dies_is_one_masked_row(play, tmp_path):
    outputs, _ = play(["look", "look", "raise"], awkward(), *TALK, f"turnkey.log.trajectories={tmp_path}")
    assert "the step is broken" in reason(outputs)
    assert whys(outputs) == [None]
    log = logged(tmp_path)
    assert [(turn["turn"], turn["row"], turn["composed_reward"]) for turn in log.turns] == [
        (0, None, None),
        (1, None, None),
    ]


def test_the_log_of_a_conversation_says_where_each_turn_is_trained(play, tmp_path):
    talk = [*TALK, f"turnkey.log.trajectories={tmp_path}"]
    play(["look", "no action", "win"], awkward(), *talk)
    log = logged(tmp_path)
    assert [(turn["row"], turn["turn_in_row"]) for turn in log.turns] == [(0, 0), (0, 1), (0, 2)]
    assert not any(turn["prompt_cut"] for turn in log.turns)
    cut = [*talk, "turnkey.rollout.when_full=drop_oldest", "turnkey.rollout.max_turns=30"]
    outputs, script = play(["look"] * 30, awkward(), *cut, session=1)
    log = logged(tmp_path, "u_1")
    assert [(turn["row"], turn["turn_in_row"]) for turn in log.turns] == [
        (i, j) for i, row in enumerate(outputs) for j in range(len(row.extra_fields["turnkey"]["steps"]))
    ]
    assert [turn["prompt_cut"] for turn in log.turns] == [turn["row"] > 0 for turn in log.turns]
    assert [turn["prompt_tokens"] for turn in log.turns] == [len(prompt) for prompt in script.prompts]


def test_the_time_of_an_episode_is_told_once(play, tmp_path):
    play(["look", "win"], awkward(), f"turnkey.log.trajectories={tmp_path}")
    _, [seconds] = loop_worker.measure(None)
    episode = logged(tmp_path).episode
    named = {"model": "seconds_model", "environment": "seconds_env", "waiting": "seconds_waiting"}
    assert seconds == pytest.approx({name: episode[column] for name, column in named.items()}, rel=1e-4)
    assert seconds["environment"] > 0
    assert loop_worker.measure(None)[1] == []


def test_a_conversation_of_tool_calls(play, tool_tokenizer):
    """This template shows any role, so observations after a call are the tool's, and others a user's."""
    turns = [call('{"action": "look"}'), "no call", call('{"action": "win"}')]
    tool_tokenizer.chat_template = tool_tokenizer.chat_template.replace("{{m['content']}}", SHOWS_CALLS)
    outputs, script = play(turns, awkward(), JSON, *TALK, tokenizer=tool_tokenizer)
    assert [step["action"] for step in recorded(outputs)] == ["look", None, "win"]
    assert "<|im_start|>tool\n" in script.text(1)
    assert script.text(2).removeprefix(script.text(1)).count("<|im_start|>user\n") == 1
    assert script.text(2).count('"name": "act", "description"') == 1


SHOWS_CALLS = "{{m['content']}}{% for c in m.tool_calls or [] %}{{ c.function.arguments|tojson }}{% endfor %}"


def test_images_of_a_conversation(play, sees):
    outputs, script = play(["look", "look", "win"], awkward_pictures(2), *TALK, **sees)
    patch = sees["tokenizer"].convert_tokens_to_ids("<image>")
    for t, seen in enumerate(script.seen):
        images = seen["image_data"]
        assert [image.getpixel((0, 0))[0] for image in images] == [0, 0, 100, 100, 100, 100][: 2 * t + 2]
        assert script.prompts[t].count(patch) == len(images) * 4
        assert all(image is sent for image, sent in zip(images, script.seen[-1]["image_data"], strict=False))
    (row,) = outputs
    assert row.multi_modal_data["images"] is script.seen[-1]["image_data"]
    assert len(recorded(outputs)) == 3
    # What verl makes of the row, positions included, is what it makes of the last step alone.
    alone, _ = play(["look", "look", "win"], awkward_pictures(2), *TALK, "turnkey.rollout.layout=steps", **sees)
    worker = Worker()
    worker.processor, worker.tokenizer = sees["processor"], sees["tokenizer"]
    ids = [torch.tensor([output.prompt_ids + output.response_ids]) for output in (row, alone[-1])]
    assert torch.equal(*ids)
    inputs = [
        worker._compute_multi_modal_inputs(output, seen) for output, seen in zip((row, alone[-1]), ids, strict=True)
    ]
    assert torch.equal(inputs[0]["pixel_values"], inputs[1]["pixel_values"])
    assert inputs[0]["pixel_values"].shape[0] == 6


def test_the_oldest_pictures_go_with_their_turns(play, sees):
    overrides = [*TALK, "turnkey.rollout.when_full=drop_oldest", "turnkey.rollout.max_turns=12"]
    outputs, script = play(["look"] * 12, awkward_pictures(2), *overrides, **sees)
    patch = sees["tokenizer"].convert_tokens_to_ids("<image>")
    sizes = [len(seen["image_data"]) for seen in script.seen]
    assert [prompt.count(patch) for prompt in script.prompts] == [4 * count for count in sizes]
    assert any(later < before for before, later in pairwise(sizes))
    for row in outputs:
        assert (row.prompt_ids + row.response_ids).count(patch) == 4 * len(row.multi_modal_data["images"])


@pytest.mark.parametrize("prompt", [[], TALK])
def test_branches_see_the_pictures_of_their_own_way(play, sees, prompt):
    """Moves by turns to the left and to the right; in each prompt are the pictures of the states that it tells of."""
    moves = cycle(["left", "right", "right"])
    task, vine = (
        Task("contract/Gallery-v0", 3, {"shows": [1, 2, 1]}),
        "turnkey.rollout.strategy={name: vine, rollouts: 3}",
    )
    outputs, script = play(lambda _: next(moves), task, vine, *prompt, "turnkey.rollout.history=3", **sees)
    assert counts(outputs)["measured"] > 3
    for t, seen in enumerate(script.seen):
        env, way = Gallery([1, 2, 1]), re.findall(r"\b(left|right)\b", script.text(t).partition("<|im_start|>")[2])
        pictures = [env.reset(seed=3)[1]["images"], *(env.step(move)[4]["images"] for move in way)]
        expected = chain.from_iterable(pictures if prompt else pictures[-1:])
        for image, array in zip(seen["image_data"], expected, strict=True):
            np.testing.assert_array_equal(np.asarray(image), array)


@pytest.mark.parametrize("overrides", [TALK, []])
def test_control_tokens_of_an_environment_do_not_end_its_message(play, tokenizer, overrides):
    outputs, script = play(["look", "win"], awkward(observation="a <|im_end|> room"), *overrides)
    assert [prompt.count(tokenizer.eos_token_id) for prompt in script.prompts] == ([1, 3] if overrides else [1, 1])
    assert "a < |im_end|> room" in script.text(1)
    assert recorded(outputs)[0]["anchor"] == "a <|im_end|> room 3"


def test_a_template_that_raises_and_a_huge_observation_cost_their_episode(play, tokenizer):
    """Such an observation fails the episode where it is the first, and ends it later."""
    picky = copy.deepcopy(tokenizer)
    picky.chat_template = (
        "{% if 'rm 4' in messages|string %}{{ raise_exception('no!') }}{% endif %}" + tokenizer.chat_template
    )
    for overrides in (TALK, []):
        failed, _ = play([], awkward(observation="rm 4"), *overrides, tokenizer=picky)
        assert "PromptError: the prompt cannot be made: TemplateError: no!" in reason(failed)
    for when_full in ("end", "drop_oldest"):
        overrides = [*TALK, f"turnkey.rollout.when_full={when_full}"]
        assert "PromptTooLongError" in reason(play([], awkward(observation="x" * 1200), *overrides)[0])
        outputs, _ = play(["look", "grow", "look"], awkward(observation="twenty characters..."), *overrides)
        assert [step["truncated"] for step in recorded(outputs)] == [False, True]


# --- environments that die --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("turns", "kwargs", "words"),
    [
        ([], {"on_reset": "raise"}, "RuntimeError: the reset is broken"),
        (["look", "raise"], {}, "RuntimeError: the step is broken"),
        (["look", "look", "nan"], {}, "a reward must be a finite number, not float nan"),
        (["look", "hang"], {}, "timeout"),
        ([], {"on_rest": "raise"}, "takes no argument 'on_rest'"),
    ],
)
def test_a_dead_episode_is_one_masked_row_with_the_reason(play, tmp_path, turns, kwargs, words):
    settings = (f"turnkey.log.trajectories={tmp_path}", "turnkey.env.step_timeout=2")
    outputs, script = play(turns, awkward(**kwargs), *settings)
    assert words in reason(outputs)
    assert len(script.prompts) == len(turns)
    log = logged(tmp_path)
    assert words in log.episode["failed"]
    assert log.episode["failed_kind"] not in (None, "other")
    assert log.episode["env"] == "contract/Awkward-v0"
    assert (log.episode["success"], log.episode["composed_return"]) == (None, None)
    # what was played before is not trained on, but can be read
    assert log.episode["turns"] == len(log.turns) == len(log.texts) == max(0, len(turns) - 1)


def own_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Without what verl says at the level that a test before this one left its loggers at."""
    return [record for record in caplog.records if record.name == "verl_turnkey"]


def test_failed_episodes_are_said_once_for_each_kind_with_their_number(play, caplog, monkeypatch):
    """Under the quiet settings: the root logger lets errors through only."""
    monkeypatch.setattr(logging.root, "level", logging.ERROR)
    for number in range(1, 11):
        play(["raise"], awkward(), fresh=number == 1)
    play([], awkward(on_reset="raise"), fresh=False)
    expected = [
        ("1 failed episode of the kind 'step'", "the step is broken"),
        ("10 failed episodes of the kind 'step'", "the step is broken"),
        ("1 failed episode of the kind 'reset'", "the reset is broken"),
    ]
    for record, (number, reason) in zip(own_records(caplog), expected, strict=True):
        count, _, latest = record.getMessage().partition(" in this process so far, the latest: ")
        assert count == number
        assert latest.startswith("EnvironmentFailure: environment failure (")
        assert f"RuntimeError: {reason}" in latest


def test_a_malformed_task_fails_its_episode_only(play, tmp_path):
    class Words(Task):
        def to_json(self) -> str:
            return "play something"

    outputs, _ = play([], Words("x", 0), f"turnkey.log.trajectories={tmp_path}")
    assert "play something" in reason(outputs)
    episode = logged(tmp_path).episode
    assert (episode["env"], episode["kwargs"], episode["seed"], episode["task"]) == (None, None, None, "play something")


def test_failed_and_good_rows_have_the_same_fields(play):
    failed, _ = play(["look", "raise"], awkward())
    good, _ = play(["look", "win"], awkward())
    for outputs in (failed + good, good + failed):
        rows = [row.as_dict() for row in outputs]
        assert len({frozenset(row) for row in rows}) == 1
        assert {"prompts", "responses", "response_mask", "rollout_log_probs", "rm_scores", "extra_fields"} <= {*rows[0]}
        batch = list_of_dict_to_tensordict(rows)
        assert len(batch) == 3
        assert batch["rm_scores"].is_nested
        masks = [mask.sum().item() for mask in batch["response_mask"].unbind()]
        assert sorted(masks)[0] == 0
        assert all(isinstance(mask, torch.Tensor) for mask in batch["response_mask"].unbind())
        assert {frozenset(row.extra_fields["reward_extra_info"]) for row in outputs} == {frozenset(INFO)}


def test_without_log_probs_no_row_has_them(play):
    off = "actor_rollout_ref.rollout.calculate_log_probs=false"
    outputs = play(["lose"], awkward(), off)[0] + play(["raise"], awkward(), off)[0]
    assert ["rollout_log_probs" in row.as_dict() for row in outputs] == [False, False]


# --- observations as text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compares", [True, False])
def test_records_carry_the_observation_when_the_method_compares_texts(play, compares):
    similar = ["++turnkey.credit.similarity=0.9"] if compares else []
    outputs, _ = play(["look", "win"], awkward(), *similar)
    texts = [step["extra"].get("text") for step in steps(outputs)]
    assert texts == (["a room 3", "a room"] if compares else [None, None])
    assert ["images" in step["extra"] for step in steps(outputs)] == [compares, compares]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["+turnkey=gigpo"], (False, set())),
        (["+turnkey=gigpo", "++turnkey.credit.similarity=0.9"], (True, set())),
        (["+turnkey=rae"], (False, {"role", "order"})),
        (["+turnkey=loo_td"], (True, {"turn_limit"})),
    ],
)
def test_the_configuration_alone_says_what_the_method_reads(compose: Compose, line, expected):
    """Whether it compares texts, and which columns it takes from the state before a step."""
    config = compose(*line)
    compares, before = loop_worker.recorded(config, turnkey_config(config))
    assert (compares, {*before}) == expected


# --- the log ----------------------------------------------------------------------------------------------------------


def logged(folder: Path, episode: str | None = None) -> SimpleNamespace:
    """What the log has of an episode, or of its only one: ``episode``, ``turns`` and ``texts``."""
    tables = []
    for table in ("episodes", "turns", "texts"):
        frame = read(folder, table)
        frame = frame[frame["episode"] == episode] if episode else frame
        tables.append(frame.astype(object).where(frame.notna(), None).to_dict("records"))
    (row,) = tables[0]
    assert all(entry["episode"] == row["episode"] for entry in tables[1] + tables[2])
    return SimpleNamespace(episode=row, turns=tables[1], texts=tables[2])


def test_each_episode_is_in_the_tables_of_the_log(play, tmp_path: Path):
    rewards = "turnkey.rewards=[{name: step}, {name: length, weight: -0.5, unit: turns, label: short}]"
    override = f"turnkey.log.trajectories={tmp_path}/log"
    fields = {"extra_info": {"split": "val"}, "turnkey_validation": True}
    before = time.time()
    task = awkward(says_more=True)
    outputs, script = play(["look", "stumble", "win"], task, override, rewards, session=1, fields=fields)
    log = logged(tmp_path / "log", "u_1")
    episode = log.episode
    assert {name: episode[name] for name in ("group", "split", "validation", "global_step", "step", "seed")} == {
        "group": "u", "split": "val", "validation": True, "global_step": 7, "step": 7, "seed": 3
    }  # fmt: skip
    assert episode["task"] == task.to_json()
    assert (episode["weights_min"], episode["weights_max"], episode["turns"]) == (7, 7, 3)
    assert (episode["env_return"], episode["composed_return"], episode["success"]) == (0.5, 0.5 - 1.5, True)
    assert (episode["truncated"], episode["failed"], episode["failed_kind"]) == (False, None, None)
    assert before <= episode["started"] <= time.time()
    assert episode["host"] == socket.gethostname()
    assert episode["seconds_waiting"] >= 0
    records = steps(outputs)
    for t, (turn, record) in enumerate(zip(log.turns, records, strict=True)):
        assert (turn["turn"], turn["row"], turn["turn_in_row"]) == (t, t, 0)
        same = ("action", "valid", "terminated", "truncated")
        assert {name: turn[name] for name in same} == {name: record[name] for name in same}
        assert (turn["anchor"], turn["reward"]) == (str(record["anchor"]), record["reward"])
        assert turn["composed_reward"] == pytest.approx(record["composed_reward"])
        assert (turn["composed_reward.step"], turn["composed_reward.short"]) == (record["reward"], -0.5)
        assert turn["penalty"] == pytest.approx(record["penalty"])
        assert turn["weights"] == 7
        assert turn["next_anchor"] == record["extra"]["next_anchor"]
        assert json.loads(turn["extra"]) == {name: v for name, v in record["extra"].items() if name != "next_anchor"}
        assert (turn["prompt_tokens"], turn["response_tokens"]) == (len(script.prompts[t]), len(script.answers[t]))
    assert [turn["penalty"] > 0 for turn in log.turns] == [False, True, False]
    starts = [episode["started"], *(turn["started"] for turn in log.turns), time.time()]
    assert starts == sorted(starts)
    spent = {name: sum(turn[name] for turn in log.turns) for name in ("seconds_model", "seconds_env")}
    assert episode["seconds_model"] == pytest.approx(spent["seconds_model"], rel=1e-3)
    assert episode["seconds_env"] > spent["seconds_env"] > 0  # and the start
    assert [text["response"] for text in log.texts] == ["look", "stumble", "win"]
    assert [text["observation"] for text in log.texts] == ["a room"] * 3, "the answers; at the reset it was a room 3"
    assert log.texts[0]["prompt_tail"] == script.text(0)
    assert script.text(1).endswith(log.texts[1]["prompt_tail"])


def test_of_a_long_prompt_the_end_is_logged_and_the_first_one_whole(play, tmp_path: Path):
    observation = "many words " * 400
    overrides = ["data.max_prompt_length=8192", f"turnkey.log.trajectories={tmp_path}", "turnkey.rollout.history=0"]
    _, script = play(["stumble", "win"], awkward(observation=observation), *overrides)
    first, second = (text["prompt_tail"] for text in logged(tmp_path).texts)
    assert first == script.text(0)
    assert second == script.text(1)[-2000:]
    assert len(first) > len(second) == 2000


def test_a_prompt_that_was_cut_to_fit_is_marked(play, tmp_path: Path):
    overrides = [f"turnkey.log.trajectories={tmp_path}", "turnkey.rollout.history=9", "turnkey.rollout.max_turns=9"]
    _, whole = play(["look"] * 9, awkward(), *overrides, "data.max_prompt_length=4096")
    budget = len(whole.prompts[5])
    play(["look"] * 9, awkward(), *overrides, f"data.max_prompt_length={budget}", session=1)
    assert [turn["prompt_cut"] for turn in logged(tmp_path, "u_0").turns] == [False] * 9
    assert [turn["prompt_cut"] for turn in logged(tmp_path, "u_1").turns] == [False] * 6 + [True] * 3


def test_groups_are_logged_whole_or_not_and_failed_episodes_always(play, tmp_path: Path):
    for share, action, logs in ((0.0, "win", 0), (0.0, "raise", 1), (1.0, "win", 2)):
        log = [f"turnkey.log.trajectories={tmp_path}/log", f"turnkey.log.share={share}"]
        play([action], awkward(), *log, session=logs)
        assert len(read(tmp_path / "log", "episodes")) == logs
    halved = ["turnkey.log.episodes_per_step=1", "data.train_batch_size=16", "actor_rollout_ref.rollout.n=1"]
    for number in range(12):
        fields = {"uid": f"group {number}"}
        play(["win"], awkward(), f"turnkey.log.trajectories={tmp_path}/few", *halved, fields=fields)
    expected = {f"group {number}" for number in range(12) if chosen(f"group {number}", 1 / 16)}
    assert {*read(tmp_path / "few", "episodes")["group"]} == expected
    for number in range(12):
        fields = {"uid": f"group {number}", VALIDATION: True}
        bound = [*halved, "turnkey.log.validation_tasks=2"]
        play(["win"], awkward(), f"turnkey.log.trajectories={tmp_path}/validation", *bound, fields=fields)
    expected = {f"group {number}" for number in range(12) if chosen(f"group {number}", 1 / 2)}
    assert {*read(tmp_path / "validation", "episodes")["group"]} == expected


def test_the_log_says_in_what_the_episode_was_played(play, tmp_path: Path):
    task = Task("turnkey/MiniGrid-v0", 11, LEVEL)
    segment = "turnkey.log.segment=20260102T030405_00ff"
    play(["turn left"], task, "turnkey.rollout.max_turns=1", f"turnkey.log.trajectories={tmp_path}", segment)
    episode = logged(tmp_path).episode
    assert (episode["env"], json.loads(episode["kwargs"]), episode["seed"]) == ("turnkey/MiniGrid-v0", LEVEL, 11)
    assert episode["package"] == f"minigrid {version('minigrid')}"
    assert episode["truncated"]
    assert episode["segment"] == "20260102T030405_00ff"


def test_an_episode_goes_to_the_receiver_of_traces_as_it_ends(play, tmp_path: Path):
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"turnkey.log.otlp=http://127.0.0.1:{server.server_port}"
        play(["look", "win"], awkward(), f"turnkey.log.trajectories={tmp_path}", url)
    finally:
        server.shutdown()
        server.server_close()
    [scope] = [scope for request in received for part in request.resource_spans for scope in part.scope_spans]
    [root, *turns] = scope.spans
    assert [span.name.split()[0] for span in turns] == ["chat", "execute_tool"] * 2
    assert {span.parent_span_id for span in turns} == {root.span_id}
    texts = {pair.key: pair.value.string_value for span in turns for pair in span.attributes}
    assert "win" in texts["gen_ai.output.messages"]


def test_the_log_says_why_a_turn_was_invalid(play, tmp_path: Path):
    turns = ["<action>stumble</action>", "just talk", "<action> </action>", "<action>lose</action>"]
    overrides = ["turnkey.rollout.action_format=tags", f"turnkey.log.trajectories={tmp_path}"]
    play(turns, awkward(), *overrides)
    log = logged(tmp_path)
    assert [(turn["parse_note"], turn["valid"]) for turn in log.turns] == [
        ("the environment refused the action", False),
        ("no action in the format 'tags'", False),
        ("the action is empty", False),
        (None, True),
    ]
    assert [turn["action"] for turn in log.turns] == ["stumble", None, None, "lose"]


# --- rewards ----------------------------------------------------------------------------------------------------------


def test_columns_of_the_state_before_a_step_are_those_of_the_state_it_was_taken_in(play, monkeypatch):
    """Also of a turn without an action, of a refused one, and of the last one. What the answer says is not moved."""
    before = {"role", "turn_value", "parent"}
    monkeypatch.setattr(loop_worker, "recorded", lambda config, turnkey: (False, before))
    turns = ["call now", "", "stumble", "look", ""]
    outputs, _ = play(turns, awkward(says_more=True, roles=2), "turnkey.rollout.max_turns=5")
    in_order = sorted(steps(outputs), key=lambda step: step["step"])  # rows come role by role
    extras = [step["extra"] for step in in_order]
    assert [extra["role"] for extra in extras] == [*"abbba"]
    assert [extra["turn_value"] for extra in extras] == [0.0, 1.0, 1.0, 1.0, 2.0]
    assert [extra["parent"] for extra in extras] == ["", "call now", "call now", "call now", "call now look"]
    assert [extra["potential"] for extra in extras] == [0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("task", "limit"),
    [
        (Task("turnkey/MiniGrid-v0", 11, LEVEL), 5.0),  # its own is 144
        (Task("turnkey/MiniGrid-v0", 11, {**LEVEL, "max_steps": 4}), 4.0),
        (awkward(max_episode_steps=3), 3.0),
        (awkward(), 5.0),
    ],
)
def test_a_method_that_reads_it_gets_the_limit_of_turns(play, monkeypatch, task: Task, limit: float):
    """Also in turns without an action; other methods' records do without."""
    for before, expected in (({"turn_limit"}, limit), (set(), None)):
        monkeypatch.setattr(loop_worker, "recorded", lambda config, turnkey, before=before: (False, before))
        outputs, _ = play(["turn left", "", *["turn left"] * 3], task, "turnkey.rollout.max_turns=5")
        assert [step["extra"].get("turn_limit") for step in steps(outputs)] == [expected] * len(outputs)


@pytest.mark.parametrize("anchor", ["state_key", "observation"])
def test_each_record_says_where_its_step_led(play, anchor):
    """Also the last one, so that an episode cut by the limit shares its last edge with those that went on from there,
    and a solved one shares its own with neither."""
    task, override = Task("turnkey/MiniGrid-v0", 3, LEVEL), f"turnkey.rollout.anchor={anchor}"
    long, _ = play(["turn left"] * 3, task, override, "turnkey.rollout.max_turns=3")
    cut, _ = play(["turn left"] * 2, task, override, "turnkey.rollout.max_turns=2")
    rows = steps(long) + steps(cut)
    assert {row["anchor"].startswith("Free steps:") for row in rows} == {anchor == "observation"}
    following = [row["extra"]["next_anchor"] for row in rows]
    assert following[:2] == [row["anchor"] for row in rows[1:3]] == following[3:]
    assert following[2] not in [row["anchor"] for row in rows], "the state after three turns, seen by nobody"

    batch = StepBatch(
        group=["g"] * 5,
        trajectory=["long"] * 3 + ["cut"] * 2,
        extra={"next_anchor": following},
        **{name: [row[name] for row in rows] for name in ("step", "anchor", "action", "terminated", "truncated")},
        reward=[0.0, 0.0, 1.0, 0.0, 0.0],
    )
    credit = compute_credit("salt", batch, norm="mean").advantage
    assert credit.tolist() == [0.0, 0.0, 0.5, 0.0, 0.0]


def test_a_disk_that_refuses_costs_the_log_and_not_the_episode(play, tmp_path: Path, caplog):
    """And the log goes on when it can."""
    (tmp_path / "log").write_text("a file where a folder should be")
    override = f"turnkey.log.trajectories={tmp_path}/log"
    outputs, _ = play(["look", "win"], awkward(), override)
    assert [step["reward"] for step in steps(outputs)] == [0.0, 0.5]
    play(["win"], awkward(), override, session=1, fresh=False)
    (tmp_path / "log").unlink()
    play(["win"], awkward(), override, session=2, fresh=False)
    assert logged(tmp_path / "log").episode["episode"] == "u_2"
    messages = [record.getMessage() for record in own_records(caplog)]
    assert len(messages) == 2
    assert re.search(r"are not written on \S+ until this is over: FileExistsError", messages[0])
    assert "are written again; 8 were lost" in messages[1]  # two episodes of three turns, a row in two tables each


def test_a_mount_that_hangs_does_not_stop_a_rollout(play, tmp_path: Path, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    real = Tables._to_disk

    def hangs(self: Tables, *args: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        real(self, *args)

    monkeypatch.setattr(Tables, "_to_disk", hangs)
    monkeypatch.setattr(loop_worker, "FINISH_SECONDS", 0.01)
    outputs, _ = play(["look", "win"], awkward(), f"turnkey.log.trajectories={tmp_path}")
    assert begun.wait(60)
    assert [step["reward"] for step in steps(outputs)] == [0.0, 0.5]
    assert not list(tmp_path.iterdir())
    go_on.set()
    assert loop_worker._process.log.drain(60)
    assert logged(tmp_path).episode["failed"] is None
