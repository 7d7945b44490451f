"""Tools that appear in the middle of an episode: the prompt shows them, their calls run, and rows begin anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from test_tools import CONVERSATION, FORMAT, REAL, reason, tokenizer, written
from test_worker_tools import Notes
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_turnkey.envs import make
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import read_turn
from verl_turnkey.plugins.credit.rows import BREAK

KWARGS = {"categories": ["miss_func"], "split": "all"}
TASK = Task("turnkey/BFCL-v0", 0, KWARGS)
"""the tool sort is missing until the fourth of the user's five turns"""
LENGTHS = ("data.max_prompt_length=8000", "data.max_response_length=4000", "turnkey.rollout.max_turns=12")
TEMPLATE = ("turnkey.rollout.prompt=template", "turnkey.rollout.history=0", "turnkey.rollout.max_tokens_per_turn=100")
SORT = '"name": "sort"'


def turns() -> list[str]:
    """The right calls as Qwen3 writes them."""
    env = make(TASK.env_id, KWARGS)
    env.reset(seed=TASK.seed)
    plan = [read_turn(action) for action in env.unwrapped.oracle()]
    return [t if isinstance(t, str) else written("Qwen3", *((c.name, c.arguments) for c in t)) for t in plan]


@pytest.fixture
def played(play):
    """``played(*overrides)``: rows and script of the episode."""

    def run(
        *overrides: str, written_turns: list[str] | None = None, tools: Sequence[Any] = ()
    ) -> tuple[list[Any], Any]:
        words = (FORMAT, "actor_rollout_ref.rollout.multi_turn.format=hermes", *LENGTHS, *overrides)
        model = {"tokenizer": tokenizer("Qwen3"), "hf_model_type": REAL["Qwen3"].model_type}
        return play(written_turns or turns(), TASK, *words, tools=tools, **model)

    return run


def steps_of(rows: list[Any]) -> list[dict[str, Any]]:
    return [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]


@pytest.mark.parametrize("prompts", [CONVERSATION, TEMPLATE], ids=["conversation", "template"])
def test_the_prompt_shows_a_new_tool_from_its_turn_on_and_its_call_runs(played, prompts):
    rows, script = played(*prompts)
    steps = steps_of(rows)
    assert [step["valid"] for step in steps] == [True] * 9
    assert (sum(step["reward"] for step in steps), steps[-1]["terminated"]) == (1.0, True)
    assert [SORT in script.text(t) for t in range(9)] == [False] * 5 + [True] * 4
    assert json.loads(steps[5]["action"])["calls"][0]["name"] == "sort"


def test_a_conversation_goes_on_in_a_new_row_with_all_its_turns(played):
    rows, script = played(*CONVERSATION)
    assert [len(row.extra_fields["turnkey"]["steps"]) for row in rows] == [5, 4]
    assert rows[1].extra_fields[BREAK] == "tools"
    after_tools = [text[text.rindex("</tools>") :] for text in map(script.text, (4, 5))]
    assert after_tools[1].startswith(after_tools[0])  # the same turns, behind other tools
    assert "You have more tools now." in after_tools[1]
    for row in rows:
        sampled = [i for i, trained in zip(row.response_ids, row.response_mask, strict=True) if trained]
        first = 0 if row is rows[0] else 5
        last = first + len(row.extra_fields["turnkey"]["steps"])
        assert sampled == [i for answer in script.answers[first:last] for i in answer]


def test_a_call_of_a_tool_that_is_still_missing_is_refused(played):
    further = [*turns()[:4], written("Qwen3", ("sort", {"file_name": "final_report.pdf"})), *turns()[4:]]
    rows, script = played(*CONVERSATION, written_turns=further)
    assert [step["valid"] for step in steps_of(rows)] == [True] * 4 + [False] + [True] * 5
    assert "Error: there is no tool 'sort'; the tools are" in script.text(5)


@pytest.mark.parametrize(("when_full", "steps"), [("end", 5), ("drop_oldest", 9)])
def test_what_does_not_fit_with_the_new_tools_ends_the_episode_or_loses_its_oldest_turns(played, when_full, steps):
    _, script = played(*CONVERSATION)
    room = len(script.prompts[5]) - 1
    limits = (f"data.max_prompt_length={room}", f"turnkey.rollout.when_full={when_full}")
    rows, script = played(*CONVERSATION, *limits)
    assert len(steps_of(rows)) == steps
    if when_full == "end":
        assert steps_of(rows)[-1]["truncated"]
    else:
        assert SORT in script.text(5)
        assert len(script.prompts[5]) <= room


def test_a_new_tool_of_the_name_of_another_one_fails_the_episode(played):
    function = {"name": "sort", "description": "", "parameters": {"type": "object", "properties": {}, "required": []}}
    other = Notes({}, OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function}))
    rows, script = played(*CONVERSATION, tools=[other])
    assert "both the environment and verl's configuration have a tool 'sort'" in reason(rows)
    assert len(script.prompts) == 5
