"""Rows that merge, on verl's own outputs: what is put together can be taken apart, and nothing else is touched."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import transfer_queue as tq
from contract_tools import PARTITION, advance, batch_of, output, put, read
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import SPEC_DECODE_EXTRA_KEYS

from verl_turnkey.advantage import make_record, make_step, validate_record
from verl_turnkey.plugins.credit.rows import BREAK
from verl_turnkey.plugins.rollout import merging
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt, RowBuilder
from verl_turnkey.plugins.rollout.merging import merge_rows, without_steps

WITHOUT_LIMIT = 10_000


def step(
    t: int,
    prompt: list[int],
    response: list[int],
    mask: list[int] | None = None,
    *,
    images: list[Any] = (),
    **more: Any,
) -> AgentLoopOutput:
    """One step as an agent loop gives it; log-probabilities that no other step has."""
    fields = {"min_global_steps": 4, "max_global_steps": 4, **more.pop("extra_fields", {})}
    defaults: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": [1] * len(response) if mask is None else mask,
        "response_logprobs": [-(t + 1) - i / 100 for i in range(len(response))],
        "multi_modal_data": {"images": list(images)} if images else {},
        "reward_score": 0.5,
        "num_turns": 2 * (t + 1),
        "metrics": AgentLoopMetrics(generate_sequences=1.0, tool_calls=0.5, num_preempted=0),
        "extra_fields": {"turnkey": make_record([make_step(step=t, reward=float(t))]), **fields},
    }
    return AgentLoopOutput(**defaults | more)


def spoken(text: str) -> list[AgentLoopOutput]:
    """Steps from ``PROMPT > RESPONSE; ...``: ``+`` is all that was before, ``5-`` a masked token, ``full`` a reason."""
    steps: list[AgentLoopOutput] = []
    for t, part in enumerate(text.split(";")):
        prompt, response = (words.split() for words in part.split(">"))
        context = steps[-1].prompt_ids + steps[-1].response_ids if "+" in prompt else []
        ids = context + [int(word) for word in prompt if word.isdigit()]
        mask = [int(not word.endswith("-")) for word in response]
        broken = {"extra_fields": {BREAK: "full"}} if "full" in prompt else {}
        steps.append(step(t, ids, [int(word.rstrip("-")) for word in response], mask, **broken))
    return steps


def why(rows: list[AgentLoopOutput]) -> list[str]:
    return [row.extra_fields[BREAK] for row in rows]


def numbers(rows: list[AgentLoopOutput]) -> list[list[int]]:
    """The step numbers of each row's record."""
    return [[entry["step"] for entry in row.extra_fields["turnkey"]["steps"]] for row in rows]


def split(row: AgentLoopOutput) -> list[tuple[list[int], list[int], list[float], dict[str, Any]]]:
    """The prompt, response, log-probabilities and record of each step, from a row alone; a naive loop."""
    ids, mask = row.prompt_ids + row.response_ids, row.response_mask
    starts = [i for i, trained in enumerate(mask) if trained and (i == 0 or not mask[i - 1])]
    pieces = []
    for start, entry in zip(starts, row.extra_fields["turnkey"]["steps"], strict=True):
        end = next((i for i in range(start, len(mask)) if not mask[i]), len(mask))
        at = len(row.prompt_ids) + start
        pieces.append((ids[:at], row.response_ids[start:end], row.response_logprobs[start:end], entry))
    return pieces


# --- conversations ----------------------------------------------------------------------------------------------------


def test_three_turns_are_one_row():
    steps = spoken("1 2 > 3 4; + 5 > 6; + 7 8 > 9 10 11")
    (row,) = merge_rows(steps, WITHOUT_LIMIT)
    assert row.prompt_ids == [1, 2]
    assert row.response_ids == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert row.response_mask == [1, 1, 0, 1, 0, 0, 1, 1, 1]
    assert row.response_logprobs == [-1.0, -1.01, 0.0, -2.0, 0.0, 0.0, -3.0, -3.01, -3.02]
    assert row.num_turns == 6
    assert row.reward_score == 0.5
    assert row.metrics == AgentLoopMetrics(generate_sequences=3.0, tool_calls=1.5, num_preempted=0)
    validate_record(row.extra_fields["turnkey"], "the row")
    assert numbers([row]) == [[0, 1, 2]]
    assert why([row]) == ["first"]
    assert {*row.as_dict()} == {*steps[0].as_dict()}  # a field that one row lacks is lost for the whole batch


def test_outputs_are_not_changed():
    steps = spoken("1 > 2; + 3 > 4")
    before = copy.deepcopy(steps)
    merge_rows(steps, WITHOUT_LIMIT)
    merge_rows(steps[:1], 1)
    assert steps == before


def test_what_is_merged_once_stays_as_it_is():
    rows = merge_rows([*spoken("1 > 2; + 3 > 4"), step(2, [9], [5])], WITHOUT_LIMIT)
    assert why(rows) == ["first", "prefix"]
    assert merge_rows(rows, WITHOUT_LIMIT) == rows
    assert merge_rows([]) == []


def test_rows_of_several_turns_go_on_too():
    """A user's loop may give one row for what it played in one conversation, and continue in the next."""
    steps = spoken("1 > 2; + 3 > 4; + 5 > 6; + 7 > 8")
    halves = merge_rows(steps[:2]) + merge_rows(steps[2:])
    (row,) = merge_rows(halves)
    assert row == merge_rows(steps)[0]


def test_without_log_probs_the_row_has_none():
    steps = [step_row.model_copy(update={"response_logprobs": None}) for step_row in spoken("1 > 2; + 3 > 4")]
    for step_row in steps:
        step_row.__pydantic_fields_set__.discard("response_logprobs")
    (row,) = merge_rows(steps, WITHOUT_LIMIT)
    assert row.response_logprobs is None
    assert "rollout_log_probs" not in row.as_dict()


# --- why a row ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget", "expected"),
    [
        ("1 2 > 3; + 4 > 5; 1 2 7 > 8; + 9 > 3", 99, "first 0 1; prefix 2 3"),  # a fresh prompt
        # The prompt of the third turn holds the second, as it would when past turns are rendered anew.
        ("1 > 2; + 3 > 4; 3 4 5 > 6; 1 2 3 9 5 > 6", 99, "first 0 1; prefix 2; prefix 3"),
        ("1 > 2; + 3 > 4; 1 2 3 99 5 > 6", 99, "first 0 1; prefix 2"),
        ("1 > 2; + 3 > 4; 1 2 3 > 6", 99, "first 0 1; prefix 2"),
        # The builder of the prompts says why the prefix broke, and not whether.
        ("1 > 2; full 5 > 6", 99, "first 0; full 1"),
        ("full 1 > 2; full + 3 > 6", 99, "first 0 1"),
        ("1 > 2 3; + > 4", 99, "first 0; nothing 1"),  # turns that touch
        ("1 > 2 3-; + > 4", 99, "first 0 1"),  # a stop token that the loop took from the server but does not train
        ("1 > 2 3; + > 4- 5", 99, "first 0 1"),
        # verl cannot hold an empty response: one masked token stands for it, and its step stays in the table.
        ("1 > 2; + 3 > 4; + 5 > 0-; + 6 > 7", 99, "first 0 1; empty 2; empty 3"),
        ("1 > 2; + 3 > 4 5- 6; + 7 > 8", 99, "first 0; gap 1; gap 2"),  # it would count as two turns
        ("1 2 3 > 4 5; + 6 > 7; + 8 > 9 10", 7, "first 0 1 2"),
        ("1 2 3 > 4 5; + 6 > 7; + 8 > 9 10", 6, "first 0 1; budget 2"),
        ("1 2 3 > 4 5; + 6 > 7; + 8 > 9 10", 1, "first 0; budget 1; budget 2"),
        ("1 > 2" + "; + 1 > 2" * 7, 7, "first 0 1 2 3; budget 4 5 6 7"),  # 1 + 3 x (1 + 1), from its own prompt on
    ],
)
def test_why_a_row_ends(text: str, budget: int, expected: str):
    """Nothing is cut: each row begins with a prompt, and holds what its steps hold."""
    steps = spoken(text)
    rows = merge_rows(steps, budget)
    begun = [" ".join(map(str, [reason, *held])) for reason, held in zip(why(rows), numbers(rows), strict=True)]
    assert "; ".join(begun) == expected
    for row, held in zip(rows, numbers(rows), strict=True):
        mask: list[int] = []
        for step_row in (steps[t] for t in held):
            mask += [0] * (len(step_row.prompt_ids) - len(row.prompt_ids) - len(mask)) + step_row.response_mask
        assert (row.prompt_ids, row.response_mask) == (steps[held[0]].prompt_ids, mask)
        assert row.prompt_ids + row.response_ids == steps[held[-1]].prompt_ids + steps[held[-1]].response_ids


def picture(brightness: int) -> Image.Image:
    return Image.fromarray(np.full((2, 3, 3), brightness, np.uint8))


def test_images_of_a_row_are_those_of_its_last_step():
    red, blue = picture(10), picture(20)
    steps = spoken("1 > 2; + 3 > 4; + 5 > 6")
    images_of = [[red], [red], [red, blue]]
    for step_row, images in zip(steps, images_of, strict=True):
        step_row.multi_modal_data = {"images": images}
    (row,) = merge_rows(steps, WITHOUT_LIMIT)
    assert row.multi_modal_data["images"] == [red, blue]
    for step_row, images in zip(steps, images_of, strict=True):  # rendered anew for each step
        step_row.multi_modal_data = {"images": [image.copy() for image in images]}
    assert len(merge_rows(steps, WITHOUT_LIMIT)) == 1


@pytest.mark.parametrize("images", [[picture(11), picture(20)], [picture(20), picture(10)], []])
def test_another_image_under_the_same_ids(images):
    steps = spoken("1 > 2; + 3 > 4")
    steps[0].multi_modal_data = {"images": [picture(10)]}
    steps[1].multi_modal_data = {"images": images} if images else {}
    rows = merge_rows(steps, WITHOUT_LIMIT)
    assert why(rows) == ["first", "images"]
    assert [row.multi_modal_data for row in rows] == [steps[0].multi_modal_data, steps[1].multi_modal_data]


def test_images_read_otherwise_and_media_that_cannot_be_compared():
    steps = spoken("1 > 2; + 3 > 4")
    steps[1].mm_processor_kwargs = {"max_pixels": 4}
    assert why(merge_rows(steps, WITHOUT_LIMIT)) == ["first", "images"]
    steps = spoken("1 > 2; + 3 > 4")
    sound = np.zeros(3)
    for step_row in steps:
        step_row.multi_modal_data = {"audios": [sound]}
    assert why(merge_rows(steps, WITHOUT_LIMIT)) == ["first"]
    steps[1].multi_modal_data = {"audios": [sound.copy()]}
    assert why(merge_rows(steps, WITHOUT_LIMIT)) == ["first", "images"]


# --- what is left alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"routed_experts": np.zeros((4, 1, 1))},
        {"extra_fields": {"teacher_ids": [1], "turnkey": make_record([make_step(step=1, reward=0.0)])}},
        {"extra_fields": {"teacher_logprobs": [1], "turnkey": make_record([make_step(step=1, reward=0.0)])}},
        {"extra_fields": {"turnkey": make_record([], failed="it died")}},
        {"extra_fields": {}},
    ],
)
def test_columns_that_cannot_be_joined(change):
    steps = spoken("1 > 2; + 3 > 4; + 5 > 6")
    steps[1] = steps[1].model_copy(update=change)
    rows = merge_rows(steps, WITHOUT_LIMIT)
    assert rows[1] is steps[1]
    assert [row.response_ids for row in rows] == [[2], [4], [6]]
    assert why([rows[0], rows[2]]) == ["first", "columns"]


def test_log_probs_are_never_made_up():
    steps = spoken("1 > 2; + 3 > 4; + 5 > 6")
    steps[1].response_logprobs = None
    rows = merge_rows(steps, WITHOUT_LIMIT)
    assert why(rows) == ["first", "columns", "columns"]
    assert rows[1].response_logprobs is None


@pytest.mark.parametrize(("name", "value"), [("response_logprobs", []), ("response_mask", [1, 1, 1])])
def test_columns_of_another_length_are_an_error(name, value):
    steps = spoken("1 > 2; + 3 > 4 5")
    setattr(steps[1], name, value)
    with pytest.raises(ValueError, match=rf"outputs\[1\]\.{name}: expected 2 numbers.* got {len(value)}"):
        merge_rows(steps, WITHOUT_LIMIT)


# --- what concerns all steps of a row ---------------------------------------------------------------------------------


def joined(*fields: dict[str, Any]) -> dict[str, Any]:
    steps = [
        step(t, [1, 2, 3][: t + 1] if t < 1 else [1, 9] * t + [1], [9], extra_fields=extra_fields)
        for t, extra_fields in enumerate(fields)
    ]
    (row,) = merge_rows(steps, WITHOUT_LIMIT)
    return row.extra_fields


def test_versions_of_a_row():
    """The client gives None before the first weights are sent, and two versions where a turn was interrupted."""
    unknown = (None, None)
    for spans, expected in (
        ([unknown, (3, 5), (4, 4), unknown], (3, 5)),
        ([unknown] * 2, unknown),
        ([(0, 0), (1, 1)], (0, 1)),
    ):
        fields = joined(*({"min_global_steps": low, "max_global_steps": high} for low, high in spans))
        assert (fields["min_global_steps"], fields["max_global_steps"]) == expected


def test_counts_and_lists_of_a_row():
    assert merging.SUMMED == SPEC_DECODE_EXTRA_KEYS
    fields = joined({"spec_num_draft_tokens": 3, "turn_scores": [1.0], "a": 1}, {"spec_num_draft_tokens": 4, "a": 2})
    assert fields["spec_num_draft_tokens"] == 7
    assert fields["turn_scores"] == [1.0]
    assert fields["a"] == 2
    assert joined({"turn_scores": [1.0]}, {"turn_scores": [2.0]})["turn_scores"] == [1.0, 2.0]


@pytest.mark.parametrize(("counts", "expected"), [([0, 2], 2), ([-1, 2], -1), ([2, -1], -1)])
def test_interruptions_that_one_server_does_not_count_are_not_known(counts, expected):
    steps = spoken("1 > 2; + 3 > 4")
    for step_row, count in zip(steps, counts, strict=True):
        step_row.metrics = AgentLoopMetrics(num_preempted=count)
    (row,) = merge_rows(steps, WITHOUT_LIMIT)
    assert row.metrics.num_preempted == expected


# --- the rows of turnkey_env ------------------------------------------------------------------------------------------

ROWS = RowBuilder(eos=2, log_probs=True, labels=("step",), merged=True, max_response_length=12)


def played(*prompts: Prompt | list[int], answer: tuple[int, ...] = (7, 8), versions: tuple[int, ...] = ()) -> Episode:
    """An episode whose model says the same in every turn."""
    episode = Episode()
    for t, prompt in enumerate(prompts):
        version = versions[t] if versions else 4
        turn = Generated(
            ids=list(answer),
            log_probs=[-1.0 - t] * len(answer),
            text="",
            extra_fields={"global_steps": version, "min_global_steps": version, "max_global_steps": version},
            num_preempted=0,
            seconds=1.0,
        )
        record = make_step(step=t, reward=1.0, composed_reward=0.5, version=turn.version)
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        episode.steps.append(PlayedStep(prompt, turn, record, "", "", None, False, 0.25, {}, {}))
    episode.rewards = {"step": 1.5}
    episode.end(None)
    return episode


def test_a_conversation_is_a_row_and_the_layout_steps_is_not():
    episode = played([1], [1, 7, 8, 3], [1, 7, 8, 3, 7, 8, 4, 5], versions=(2, 3, 3))
    (row,) = ROWS.played(episode)
    assert row.response_mask == [1, 1, 0, 1, 1, 0, 0, 1, 1]
    assert row.num_turns == 6
    assert row.reward_score == 1.5
    assert row.metrics == AgentLoopMetrics(generate_sequences=3.0, tool_calls=0.75, num_preempted=0)
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (2, 3)
    assert [entry["version"] for entry in row.extra_fields["turnkey"]["steps"]] == [2, 3, 3]
    assert row.extra_fields["reward_extra_info"]["episode_length"] == 3.0
    alone = replace(ROWS, merged=False).played(episode)
    assert [step_row.prompt_ids for step_row in alone] == [played_step.prompt.ids for played_step in episode.steps]
    assert why(alone) == [None] * 3
    # A field that one row lacks is lost for the whole batch.
    fields = {frozenset(step_row.as_dict()) for step_row in [row, *alone, *ROWS.failed("it died", 3)]}
    extra = {frozenset(step_row.extra_fields) for step_row in [row, *alone]}
    assert len(fields) == len(extra) == 1


def test_the_prompts_reason_reaches_the_row():
    rows = ROWS.played(played([1], [1, 7, 8, 3], Prompt([9], broke="full"), [9, 7, 8, 3]))
    assert why(rows) == ["first", "full"]
    assert numbers(rows) == [[0, 1], [2, 3]]


def test_a_turn_or_an_episode_without_tokens_is_one_masked_token():
    episode = played([1], [1, 7, 8, 3], [1, 7, 8, 3, 7, 8, 3])
    episode.steps[1] = replace(episode.steps[1], turn=replace(episode.steps[1].turn, ids=[], log_probs=[]))
    rows = ROWS.played(episode)
    assert why(rows) == ["first", "empty", "empty"]
    assert [row.response_mask for row in rows] == [[1, 1], [0], [1, 1]]
    (row,) = ROWS.failed("it died", 3)
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([2], [0], [0.0])
    assert merge_rows([row], 12) == [row]
    assert merge_rows([row], 12)[0].extra_fields[BREAK] is None


def test_a_response_of_several_turns_reaches_the_loss_whole(queue, trainer):
    """data.max_response_length is the budget of the row: no turn of it is cut, and each has the credit of its step."""
    answer = (7,) * 4
    prompts = [[1] + [7, 7, 7, 7, 3] * t for t in range(3)]
    whole = ROWS.played(played(*prompts, answer=answer))
    assert len(whole) == 2, "14 tokens do not fit into 12"
    (row,) = replace(ROWS, max_response_length=14).played(played(*prompts, answer=answer))
    other = output(make_record([make_step(step=0, reward=0.0)]), 2, 0.0)
    put("a", 0, [row])
    put("a", 1, [other])
    batch = advance(trainer(recipe="grpo_steps"), batch_of(tq.kv_list(PARTITION)[PARTITION]))
    mask = [1, 1, 1, 1, 0] * 2 + [1] * 4
    assert read(batch, "response_mask")["a_0_0"] == read(batch, "loss_mask")["a_0_0"] == mask
    assert [value != 0 for value in read(batch, "advantages")["a_0_0"]] == [bool(trained) for trained in mask]
    assert read(batch, "position_ids")["a_0_0"] == list(range(15))
    assert read(batch, "input_ids")["a_0_0"] == prompts[-1] + list(answer)


# --- any episode ------------------------------------------------------------------------------------------------------

PICTURES = [picture(i) for i in range(2)]
TURN = st.fixed_dictionaries(
    {
        "how": st.sampled_from(["on", "on", "on", "anew", "back", "touch"]),
        "shown": st.lists(st.integers(1, 3), min_size=1, max_size=3),
        "said": st.lists(st.integers(1, 3), max_size=3),
        "gap": st.booleans(),
        "image": st.sampled_from([None, None, 0, 1]),
        "swap": st.sampled_from([False, False, False, True]),
        "version": st.one_of(st.none(), st.integers(0, 3)),
    }
)


def episode(turns: list[dict[str, Any]]) -> list[AgentLoopOutput]:
    steps: list[AgentLoopOutput] = []
    images: list[Any] = []
    for t, turn in enumerate(turns):
        last = steps[-1] if steps else None
        before = last.prompt_ids + last.response_ids if last else []
        if turn["how"] == "anew" or not steps:
            prompt, images = turn["shown"], []
        elif turn["how"] == "back":  # a rollback: the turn before never was
            prompt = last.prompt_ids + turn["shown"]
        elif turn["how"] == "touch":
            prompt = before
        else:
            prompt = before + turn["shown"]
        images = [PICTURES[1 - PICTURES.index(image)] for image in images] if turn["swap"] else list(images)
        images += [] if turn["image"] is None else [PICTURES[turn["image"]]]
        answer = turn["said"] or [0]
        mask = [int(bool(turn["said"]))] * len(answer)
        if turn["gap"] and len(answer) == 3:
            mask[1] = 0
        versions = {"min_global_steps": turn["version"], "max_global_steps": turn["version"]}
        steps.append(step(t, prompt, answer, mask, images=images, extra_fields=versions))
    return steps


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(turns=st.lists(TURN, min_size=1, max_size=8), budget=st.integers(1, 12))
def test_merged_rows_can_be_split_into_the_steps(turns, budget):
    steps = episode(turns)
    rows = merge_rows(steps, budget)
    assert [number for row in numbers(rows) for number in row] == list(range(len(steps)))
    left = iter(steps)
    for row in rows:
        of_row = [next(left) for _ in row.extra_fields["turnkey"]["steps"]]
        assert len(row.response_mask) == len(row.response_ids) == len(row.response_logprobs)
        versions = [v for step_row in of_row if (v := step_row.extra_fields["max_global_steps"]) is not None]
        assert row.extra_fields["max_global_steps"] == max(versions, default=None)
        if len(of_row) == 1:
            fields = of_row[0].extra_fields | {BREAK: why([row])[0]}
            assert row == of_row[0].model_copy(update={"extra_fields": fields})
            continue
        assert len(row.response_ids) <= budget
        assert split(row) == [
            (
                step_row.prompt_ids,
                step_row.response_ids,
                step_row.response_logprobs,
                *step_row.extra_fields["turnkey"]["steps"],
            )
            for step_row in of_row
        ]
        off = [p for p, trained in zip(row.response_logprobs, row.response_mask, strict=True) if not trained]
        assert off == [0.0] * len(off)
        merged = row.multi_modal_data.get("images", [])
        for step_row in of_row:
            images = step_row.multi_modal_data.get("images", [])
            assert all(map(lambda a, b: a is b, images, merged[: len(images)]))
            assert len(images) <= len(merged)


@settings(derandomize=True, database=None, deadline=None, max_examples=300)
@given(turns=st.lists(TURN, min_size=2, max_size=8))
def test_a_row_ends_only_where_it_must(turns):
    """Every break is one that the two steps explain, and a conversation without cause is one row."""
    steps = episode(turns)
    rows = merge_rows(steps)
    first = [row.extra_fields["turnkey"]["steps"][0]["step"] for row in rows]
    for row, t in zip(rows, first, strict=True):
        reason, now = why([row])[0], steps[t]
        before = steps[t - 1]
        context = before.prompt_ids + before.response_ids
        assert (reason == "first") == (t == 0)
        goes_on = now.prompt_ids[: len(context)] == context
        empty = not any(before.response_mask) or not any(now.response_mask)
        gap = [1, 0, 1] in (before.response_mask, now.response_mask)
        assert t == 0 or reason == "prefix" or goes_on or empty or gap
        assert (reason == "prefix") <= (not goes_on)
        assert (reason == "empty") <= empty
        assert (reason == "gap") <= gap
        assert (reason == "nothing") <= (len(now.prompt_ids) == len(context))
        assert reason not in ("budget", "columns")
    for t in {*range(1, len(steps))} - {*first}:
        context = steps[t - 1].prompt_ids + steps[t - 1].response_ids
        assert steps[t].prompt_ids[: len(context)] == context


# --- branches ---------------------------------------------------------------------------------------------------------


def of_branch(steps: list[AgentLoopOutput], branch: int) -> list[AgentLoopOutput]:
    for step_row in steps:
        step_row.extra_fields["turnkey"] = make_record(step_row.extra_fields["turnkey"]["steps"], branch=branch)
    return steps


@pytest.mark.parametrize("fork", [0, 1, 2, 3])
def test_a_branch_trains_its_own_steps_in_the_context_of_all(fork):
    steps = of_branch(spoken("1 2 > 3 4; + 5 > 6; + 7 8 > 9 10 11; + 12 > 13"), 2)
    for t, step_row in enumerate(steps):
        step_row.extra_fields["turnkey_cached"] = [t / 10]
    (whole,) = merge_rows(steps)
    before = copy.deepcopy(whole)
    (row,) = without_steps([whole], fork)
    assert whole == before  # the argument is not changed
    assert (row.prompt_ids, row.response_ids) == (whole.prompt_ids, whole.response_ids)
    assert split(row) == split(whole)[fork:]
    assert sum(row.response_mask) == sum(len(step_row.response_ids) for step_row in steps[fork:])
    own = row.response_mask.index(1)
    assert row.response_logprobs == [0.0] * own + whole.response_logprobs[own:]
    assert row.extra_fields["turnkey"]["branch"] == 2
    assert row.extra_fields["turnkey_cached"] == [t / 10 for t in range(fork, 4)]


def test_rows_that_hold_only_steps_of_others_are_left_out():
    steps = of_branch([step(t, [t], [t + 10]) for t in range(4)], 1)
    assert numbers(without_steps(merge_rows(steps), 2)) == [[2], [3]]
    assert without_steps(steps, 4) == []


def test_rows_of_two_branches_do_not_merge():
    steps = spoken("1 > 2; + 3 > 4")
    rows = merge_rows([steps[0], *of_branch(steps[1:], 1)])
    assert why(rows) == ["first", "branch"]
