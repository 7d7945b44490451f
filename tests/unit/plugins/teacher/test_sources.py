"""The texts of the sources: which episodes they read, and that a row's own is left out."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from judge_server import JudgeServer
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from verl_turnkey.advantage import ConfigError, make_record, make_step
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.config.scorers import TeacherConfig
from verl_turnkey.plugins.teacher import (
    TeacherEpisode,
    TeacherRow,
    read_source,
    register_teacher_source,
    teacher_sources,
)
from verl_turnkey.plugins.teacher.column import contrast, gap_metrics
from verl_turnkey.plugins.teacher.rows import (
    TextIds,
    TextWriter,
    place_in,
    places,
    read_rows,
    selected,
    splice,
    tail_of,
)
from verl_turnkey.plugins.teacher.sources import reads_observations


def episode(name: str, score: float, answers: list[str], **extra: Any) -> TeacherEpisode:
    steps = [
        make_step(
            step=t,
            reward=score if t == len(answers) - 1 else 0.0,
            action=answer.rpartition(">")[2],
            success=score >= 1,
            extra={"text": f"saw {name}{t}"} | (extra if t == len(answers) - 1 else {}),
        )
        for t, answer in enumerate(answers)
    ]
    return TeacherEpisode(name, score, score >= 1, steps, lambda: answers)


WON = episode("a_0", 1.0, ["<think>hm</think>left", "up"], feedback="well done")
BEST = episode("a_1", 2.0, ["jump"])
LOST = episode("a_2", 0.0, ["right", "down"], feedback="fell into the lake", gold_answer="the key")
CLOSE = episode("a_3", 0.5, ["stay"])
GROUP = [WON, BEST, LOST, CLOSE]


def row(of: TeacherEpisode, step: int = 0, group: list[TeacherEpisode] = GROUP, **data: Any) -> TeacherRow:
    others = [other for other in group if other is not of]
    return TeacherRow(f"{of.name}_{step}", data, of.steps[step : step + 1], of, others)


def text(source: Any, of: TeacherRow) -> Any:
    return read_source(source)[1](of)


def test_a_skill_is_a_column_or_a_key_of_extra_info():
    assert text("task_skill", row(WON, skill="look first")) == "look first"
    assert text("task_skill", row(WON, skill=None, extra_info={"skill": "key"})) == "key"
    assert text({"name": "task_skill", "column": "plan"}, row(WON, skill="no", plan="yes")) == "yes"
    assert read_source({"name": "task_skill", "column": "plan"})[1].columns == ("plan",)
    for nothing in ({}, {"skill": math.nan}, {"skill": " "}, {"extra_info": None}):
        assert text("task_skill", row(WON, **nothing)) is None


def test_the_right_answer_is_the_environments_or_the_data_rows():
    truth = {"reward_model": {"ground_truth": ["seven", "7"]}}
    assert text("gold_answer", row(WON, **truth)) == "seven"
    assert text("gold_answer", row(WON)) is None
    first = episode("b_0", 0.0, ["right"], gold_answer="the key")
    assert text("gold_answer", row(first, group=[first], **truth)) == "the key"


def test_feedback_is_the_last_text_of_the_own_episode():
    assert text("feedback", row(LOST)) == "fell into the lake"
    assert text("feedback", row(CLOSE)) is None
    with_feedback = row(CLOSE)
    with_feedback.reward_info = {"feedback": "too slow"}
    assert text("feedback", with_feedback) == "too slow"
    assert text({"name": "feedback", "key": "gold_answer"}, row(LOST)) == "the key"


def test_other_episodes_of_the_group_leave_out_the_own_one_and_thoughts():
    assert text("group_success", row(LOST)) == "jump", "the best one"
    assert text("group_success", row(BEST)) == "Turn 1: left\nTurn 2: up", "not its own"
    assert text({"name": "group_success", "episodes": 5}, row(LOST)) == "jump\n\nTurn 1: left\nTurn 2: up"
    assert text("group_failures", row(WON)) == "stay"
    assert text("group_failures", row(CLOSE)) == "Turn 1: right\nTurn 2: down"
    assert text("group_success", row(LOST, group=[LOST, CLOSE])) is None
    assert text("group_failures", row(LOST, group=[LOST, WON])) is None
    with pytest.raises(ConfigError, match=r"turnkey\.teacher\.source\.episodes: expected positive"):
        read_source({"name": "group_success", "episodes": 0})


def test_of_the_rows_in_the_queue_a_texts_writer_sees_the_other_played_episodes_of_the_group():
    """Neither the row's own episode, nor failed ones, padding, or other groups; branches are others."""
    played = {"a_0_0": 0, "a_0_1": 0, "a_1_0": 0, "b_0_0": 0, "a_0_2": 1}
    records = [make_record([make_step(step=0, reward=1.0)], branch=branch) for branch in played.values()]
    records += [make_record([], failed="it died"), records[0]]
    keys, tags = [*played, "a_2_0", "a_3_0"], [{}] * 6 + [{"is_padding": True}]
    masks = [torch.tensor([int(i != 5)]) for i in range(7)]
    jagged = torch.nested.as_nested_tensor(masks, layout=torch.jagged)
    data = TensorDict({"response_mask": jagged, "responses": jagged}, batch_size=7)
    data["extra_fields"] = NonTensorStack(*({"turnkey": record} for record in records))
    rows = read_rows(keys, tags, data, None)
    others = {keys[i]: [other.name for other in of.others] for i, of in rows.items()}
    assert others == {
        "a_0_0": ["a_0.1", "a_1"],
        "a_0_1": ["a_0.1", "a_1"],
        "a_0_2": ["a_0", "a_1"],
        "a_1_0": ["a_0", "a_0.1"],
        "b_0_0": [],
    }
    assert {keys[i]: of.episode.name for i, of in rows.items()}["a_0_2"] == "a_0.1"


def test_a_texts_writer_sees_the_turns_of_the_rows_role_alone():
    """Of several roles in an episode; a role wins by its own outcome."""
    players, rows = "abab", []
    for episode, won in ((0, 1.0), (1, -1.0)):
        for t, role in enumerate(players):
            outcome = won if role == "a" else -won
            extra = {"role": role, "role_outcome": outcome, "text": f"what {role} saw in {episode} at {t}"}
            rows.append((f"g_{episode}_{t}", make_record([make_step(step=t, reward=outcome, extra=extra)])))
    mask = torch.nested.as_nested_tensor([torch.tensor([1])] * len(rows), layout=torch.jagged)
    data = TensorDict({"response_mask": mask, "responses": mask}, batch_size=len(rows))
    data["extra_fields"] = NonTensorStack(*({"turnkey": record} for _, record in rows))
    keys = [key for key, _ in rows]
    read = dict(zip(keys, read_rows(keys, [{}] * len(keys), data, None).values(), strict=True))
    for key, row_of_role in read.items():
        role = row_of_role.steps[0]["extra"]["role"]
        (other,) = row_of_role.others
        steps = [*row_of_role.episode.steps, *other.steps]
        assert {step["extra"]["role"] for step in steps} == {role}
        assert row_of_role.episode.success == (row_of_role.steps[0]["extra"]["role_outcome"] > 0) != other.success, key
    assert text("next_observation", read["g_0_0"]) == "what a saw in 0 at 2"


def test_episodes_of_a_role_are_compared_where_only_it_moved():
    """A role may win before another one moves; without an outcome by role it wins with its episode."""
    extras = {"0_0": {"role": "a"}, "0_1": {"role": "b"}, "1_0": {"role": "a", "role_outcome": math.nan}}
    records = {
        f"g_{key}": make_record([make_step(step=int(key[-1]), reward=0.0, success=True, extra=extra)])
        for key, extra in extras.items()
    }
    mask = torch.nested.as_nested_tensor([torch.tensor([1])] * len(records), layout=torch.jagged)
    data = TensorDict({"response_mask": mask, "responses": mask}, batch_size=len(records))
    data["extra_fields"] = NonTensorStack(*({"turnkey": record} for record in records.values()))
    rows = read_rows([*records], [{}] * len(records), data, None)
    assert [[other.name for other in of.others] for _, of in sorted(rows.items())] == [["g_1"], [], ["g_0"]]
    assert all(of.episode.success for of in rows.values())


def test_the_next_observation_is_that_of_the_rows_own_turn():
    assert text("next_observation", row(LOST, 0)) == "saw a_21"
    assert text("next_observation", row(LOST, 1)) is None


def test_the_outcome_is_the_own_success_or_the_groups_best():
    assert text("outcome", row(WON)) == "The task was solved.\nsaw a_01\nLast action: up"
    assert text("outcome", row(LOST)) == "The task was solved.\nsaw a_10\nLast action: jump"
    assert text("outcome", row(LOST, group=[LOST, CLOSE])) is None
    bare = TeacherEpisode("c_0", 1.0, True, (), lambda: ["<think>so</think> 42"])
    alone = TeacherRow("c_0_0", {}, (), bare)
    assert text("outcome", alone) == "The task was solved.\nLast action: 42"


def placebo(of: Any, row: TeacherRow) -> Any:
    return asyncio.run(text({"name": "placebo", "of": of}, row))


def test_a_placebo_has_as_many_words_and_says_nothing():
    words = placebo("task_skill", row(WON, skill="one two three four five six seven eight nine"))
    assert len(words.split()) == 9
    assert words.startswith("This line says nothing about the task. This")
    assert placebo("task_skill", row(WON)) is None
    assert len(placebo("group_success", row(LOST)).split()) == 1
    assert read_source("placebo")[1].columns == ("skill",)
    with pytest.raises(ConfigError, match="no source 'skil'"):
        read_source({"name": "placebo", "of": "skil"})


def test_a_placebo_waits_for_its_source_and_reads_the_same():
    made = []

    @register_teacher_source("slow", per_turn=True, observations=True)
    @dataclass(frozen=True)
    class Slow:
        """Two words, later."""

        def __post_init__(self) -> None:
            made.append(self)

        async def __call__(self, row: TeacherRow) -> str | None:
            await asyncio.sleep(0)
            return "two words"

    made.clear()
    spec, source = read_source({"name": "placebo", "of": "slow"})
    assert spec is teacher_sources()["slow"]
    assert [asyncio.run(source(row(of))) for of in (WON, LOST)] == ["This line"] * 2
    assert len(made) == 1, "one source, with one connection to its endpoint"
    assert reads_observations(TeacherConfig(source={"name": "placebo", "of": "outcome"}))
    assert read_source({"name": "placebo", "of": "json:dumps"})[0] is None, "which may read any column"


def test_unknown_sources_and_options_are_named():
    with pytest.raises(ConfigError, match="no source 'task_skil'; did you mean 'task_skill'"):
        read_source("task_skil")
    with pytest.raises(ConfigError, match=r"turnkey\.teacher\.source\.colum: unknown key; did you mean 'column'"):
        read_source({"name": "task_skill", "colum": "x"})
    with pytest.raises(ConfigError, match="is a function and takes no options, got column"):
        read_source({"name": "json:dumps", "column": "x"})
    with pytest.raises(ModuleImportError, match="no_such_module"):
        read_source("no_such_module:text")
    assert read_source("json:dumps")[0] is None


def test_a_source_of_ones_own():
    @register_teacher_source("of_test", per_turn=True, observations=True)
    @dataclass(frozen=True)
    class OfTest:
        """Says who won."""

        def __call__(self, row: TeacherRow) -> str | None:
            return str(row.episode.success)

    spec = teacher_sources()["of_test"]
    assert (spec.per_turn, spec.observations, spec.summary) == (True, True, "Says who won.")
    assert text("of_test", row(WON)) == "True"
    with pytest.raises(ValueError, match="registered already"):
        register_teacher_source("of_test")(OfTest)
    with pytest.raises(ValueError, match="frozen"):
        register_teacher_source("thawed")(type("Thawed", (), {}))


def test_observations_are_recorded_where_a_source_reads_them():
    expected = {None: False, "task_skill": False, "outcome": True, "next_observation": True, "json:dumps": True}
    for source, reads in expected.items():
        assert reads_observations(TeacherConfig(source=source)) == reads


def test_which_rows_may_have_a_text():
    rows = {i: row(e) for i, e in enumerate(GROUP)}
    assert selected(rows, "all").keys() == {0, 1, 2, 3}
    assert selected(rows, "failed").keys() == {2, 3}
    assert selected(rows, "mixed_groups").keys() == {0, 1, 2, 3}
    alike = {i: row(e, group=[WON, BEST]) for i, e in enumerate((WON, BEST))}
    assert selected(alike, "mixed_groups") == {}


# --- reflection -------------------------------------------------------------------------------------------------------
@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(lambda question: "<think>hm</think>DO look first") as running:
        yield running


def attempt(name: str, score: float, *turns: str) -> TeacherEpisode:
    step = make_step(step=0, reward=score, action=None, success=score >= 1, extra={"text": "a door" + 500 * "."})
    return TeacherEpisode(name, score, score >= 1, [step], lambda: list(turns))


SEEN = "Seen: a door" + 394 * "." + "\n"
ATTEMPTS = [
    attempt("a_0", 1.0, "<think>which way?</think>left", "up"),
    attempt("a_1", 0.0, "down"),
    attempt("a_2", 2.0, "jump"),
    attempt("a_3", 0.5, "stay"),
    attempt("a_4", 1.5, "run"),
]
ALIKE = [attempt("b_0", 0.0, "down"), attempt("b_1", 0.0, "stay")]


def rows(*groups: list[TeacherEpisode]) -> dict[int, TeacherRow]:
    pairs = [(episode, [other for other in group if other is not episode]) for group in groups for episode in group]
    return {
        i: TeacherRow(f"{episode.name}_0", {}, episode.steps, episode, others)
        for i, (episode, others) in enumerate(pairs)
    }


def written(server: JudgeServer, of: dict[int, TeacherRow], **options: Any) -> tuple[dict[int, str], int]:
    source = {"name": "reflection", "url": server.url, "model": "m", "retries": 0, **options}
    config = OmegaConf.create({"turnkey": {"teacher": {"source": source}}})
    return TextWriter(config, turnkey_config(config)).write(of)


def test_a_group_with_both_outcomes_is_compared_once(server: JudgeServer):
    texts, _ = written(server, rows(ATTEMPTS, ALIKE), episodes=1)
    assert texts == dict.fromkeys(range(5), "DO look first")
    (question,) = server.questions
    assert question["model"] == "m"
    (prompt,) = [message["content"] for message in question["messages"]]
    solved, failed = prompt.split("\n\n")[1:]
    assert solved == f"This attempt solved the task:\n{SEEN}Turn 1: jump"
    assert failed == f"This attempt did not solve the task:\n{SEEN}Turn 1: down"


def test_an_episode_is_shown_without_thoughts(server: JudgeServer):
    texts, _ = written(server, rows(ATTEMPTS[:2]), about="episode", prompt="Judge: {attempts}")
    assert set(texts) == {0, 1}
    prompts = sorted(question["messages"][0]["content"] for question in server.questions)
    assert prompts == [
        f"Judge: This attempt did not solve the task:\n{SEEN}Turn 1: down",
        f"Judge: This attempt solved the task:\n{SEEN}Turn 1: left\nTurn 2: up",
    ]


def test_batch_after_batch(server: JudgeServer):
    """Each batch has an event loop of its own."""
    source = read_source({"name": "reflection", "url": server.url, "model": "m", "about": "episode"})[1]
    (first, second) = rows([ATTEMPTS[0], ATTEMPTS[1]]).values()
    for row in (first, second):
        assert asyncio.run(source(row)) == "DO look first"  # pyright: ignore[reportArgumentType]
    assert server.calls == 2


def test_a_request_that_fails_costs_its_rows_their_text(server: JudgeServer):
    server.replies = [(500, {}, "down")]
    texts, errors = written(server, rows(ATTEMPTS[:2]), about="episode")
    assert (len(texts), errors) == (1, 1)
    server.replies = [(500, {}, "down")] * 2
    with pytest.raises(RuntimeError, match=r"the model of reflections at .* gave no answer in 1 attempt"):
        written(server, rows(ATTEMPTS[:2]), about="episode")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "judge:8000"}, "url"),
        ({"prompt": "Say something."}, "{attempts}"),
        ({"episodes": 0}, "episodes"),
        ({"about": "turn"}, "about"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read_source({"name": "reflection", "url": "http://host/v1", "model": "m", **options})


# --- Where a text goes into a prompt, and what the row becomes; a tokenizer of one token per character ----------------
class Characters:
    """A token per character; ``template`` is the chat template."""

    chat_template = "<{role}>{content}</s>"
    all_special_tokens = ("</s>",)

    def __init__(self, end: str = "</s><assistant>") -> None:
        self.end = end

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> list[int]:
        assert settings["add_generation_prompt"]
        assert settings["return_dict"] is False
        opened = "<think>" if settings.get("thinking") else ""
        return self.encode("".join(f"<user>{m['content']}" for m in messages) + self.end + opened)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


TOKENIZER = Characters()
TAIL = TOKENIZER.encode("</s><assistant>")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def test_the_tail_is_what_every_prompt_ends_with():
    assert tail_of(TOKENIZER) == TAIL
    assert tail_of(TOKENIZER, thinking=True) == [*TAIL, *ids("<think>")]


def test_a_template_without_a_tail_has_no_place():
    with pytest.raises(ConfigError, match="writes nothing between"):
        tail_of(Characters(end=""))

    class Bare(Characters):
        def apply_chat_template(self, messages: Any, **settings: Any) -> list[int]:
            raise ValueError("no chat template")

    with pytest.raises(ConfigError, match=r"no chat template.*turnkey\.teacher\.source=null"):
        tail_of(Bare())


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        ("<user>go</s><assistant>", 8),
        ("<user>a</s><assistant>b</s><user>go</s><assistant>", 35),
        ("<user>go</s><assistant>Sure, ", 8),  # the agent begins the turn itself
        ("<user>go", None),
        ("", None),
    ],
)
def test_the_text_goes_before_the_last_tail(prompt, place):
    assert place_in(ids(prompt), TAIL) == place
    if place is not None:
        assert prompt[place:].startswith("</s><assistant>")


def conversation(turns: int) -> list[list[int]]:
    prompts, text = [], "<user>task</s><assistant>"
    for t in range(turns):
        prompts.append(ids(text))
        text += f"turn {t}</s><user>seen {t}</s><assistant>"
    return prompts


def test_the_turns_of_a_conversation_share_the_place_of_the_first():
    prompts = conversation(4)
    keys = [f"a_0_{t}" for t in range(4)]
    first = place_in(prompts[0], TAIL)
    assert places(keys, prompts, TAIL) == [first] * 4
    # Another episode, or a prompt that was rendered anew, has a place of its own.
    assert places(["a_1_0", *keys[1:]], prompts, TAIL) == [first] + [place_in(prompts[1], TAIL)] * 3
    anew = ids("<user>task, seen 1</s><assistant>")
    assert places(keys, [prompts[0], prompts[1], anew, [*anew, *ids("x</s><user>y</s><assistant>")]], TAIL) == [
        first,
        first,
        place_in(anew, TAIL),
        place_in(anew, TAIL),
    ]


def test_the_order_of_rows_and_how_they_are_merged_do_not_matter():
    draw = random.Random(0)
    prompts = conversation(6)
    for _ in range(50):
        kept = sorted({0, *draw.sample(range(6), draw.randint(1, 6))})  # rows of merged turns begin with these
        rows = [(f"a_0_{index}", prompts[t]) for index, t in enumerate(kept)]
        draw.shuffle(rows)
        positions = places([key for key, _ in rows], [prompt for _, prompt in rows], TAIL)
        assert positions == [place_in(prompts[0], TAIL)] * len(rows)


def test_a_row_with_a_text_keeps_all_of_its_own_ids():
    prompt, response = ids("<user>go</s><assistant>"), ids("left")
    row = {
        "input_ids": torch.tensor(prompt + response),
        "prompts": torch.tensor(prompt),
        "position_ids": torch.arange(len(prompt) + 4),
        "responses": torch.tensor(response),
    }
    text = ids(" hint")
    result = splice(row, text, 8)
    assert TOKENIZER.decode(result["input_ids"].tolist()) == "<user>go hint</s><assistant>left"
    assert TOKENIZER.decode(result["prompts"].tolist()) == "<user>go hint</s><assistant>"
    assert result["position_ids"].tolist() == list(range(len(prompt) + 4 + 5))
    assert result["responses"] is row["responses"]
    assert len(row["input_ids"]) == len(prompt) + 4, "the row itself is not changed"
    same = splice(row, [], 8)
    assert all(torch.equal(same[name], row[name]) for name in row)


def test_positions_of_images_stay_and_text_counts_on_from_them():
    """A 2 x 2 image after two tokens of text, then the tail's two tokens: axes text, time, height, width."""
    axes = torch.tensor(
        [
            [0, 1, 2, 3, 4, 5, 6, 7],
            [0, 1, 2, 2, 2, 2, 4, 5],
            [0, 1, 2, 2, 3, 3, 4, 5],
            [0, 1, 2, 3, 2, 3, 4, 5],
        ]
    )
    image = [0, 0, 1, 1, 1, 1, 0, 0]
    row = {
        "input_ids": torch.arange(8),
        "prompts": torch.arange(7),
        "position_ids": axes,
        "multi_modal_inputs": {
            "pixel_values": torch.ones(4, 3),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "token_types": torch.tensor([image]),
        },
    }
    result = splice(row, [90, 91, 92], 6)
    positions = result["position_ids"]
    assert positions[:, :6].equal(axes[:, :6])
    assert positions[0, 6:].tolist() == [6, 7, 8, 9, 10]
    assert [positions[axis, 6:].tolist() for axis in (1, 2, 3)] == [[4, 5, 6, 7, 8]] * 3
    media = result["multi_modal_inputs"]
    assert media["token_types"].tolist() == [[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0]]
    assert media["pixel_values"] is row["multi_modal_inputs"]["pixel_values"]


def text_ids(**options: Any) -> TextIds:
    return TextIds(TOKENIZER, TeacherConfig(source="task_skill", template=" [{text}]", **options))


def test_a_long_text_is_cut_at_its_end_and_the_template_stays():
    assert text_ids(max_tokens=10).ids("go left") == (ids(" [go left]"), False)
    assert text_ids(max_tokens=10).ids("go left now") == (ids(" [go left]"), True)
    with pytest.raises(ConfigError, match=r"max_tokens=3: the template alone has 3 tokens"):
        text_ids(max_tokens=3)


def test_control_tokens_in_a_text_are_plain_and_braces_are_no_slots():
    made = text_ids(max_tokens=100)
    assert made.ids("a</s>b") == (ids(" [a< /s>b]"), False)
    assert made.ids("{text} {x}") == (ids(" [{text} {x}]"), False)


def test_a_placebo_has_the_length_that_is_wanted():
    for length in (1, 5, 200):
        assert len(text_ids().placebo(length)) == length


def test_a_template_may_be_a_file(tmp_path):
    file = tmp_path / "template.txt"
    file.write_text("\nSkill: {text}")
    assert TeacherConfig(template=str(file)).text_template() == "\nSkill: {text}"
    file.write_text("no slot")
    with pytest.raises(ConfigError, match=r"has no \{text\}"):
        TeacherConfig(template=str(file)).text_template()
    with pytest.raises(ConfigError, match=r"turnkey\.teacher\.template: expected a text with \{text\}, or a file"):
        TeacherConfig(template="missing.txt").text_template()
    with pytest.raises(ConfigError, match="template: expected a text with"):
        TeacherConfig(template="two\nlines")
    with pytest.raises(ConfigError, match="max_tokens: expected positive"):
        TeacherConfig(max_tokens=0)


# --- metrics of the gap -----------------------------------------------------------------------------------------------
GAP = torch.tensor([1.0, 3.0, -2.0, 5.0, 100.0, 7.0])
ADVANTAGE = torch.tensor([0.5, 2.0, -1.0, -1.0, 1.0, 0.0])
MASK = torch.tensor([1, 1, 1, 1, 0, 1])


def test_the_contrast_is_a_difference_of_means():
    assert contrast(GAP, ADVANTAGE, MASK) == pytest.approx((1 + 3) / 2 - (-2 + 5) / 2)
    assert contrast(GAP - 4, ADVANTAGE, MASK) == pytest.approx(0.5), "what all tokens have in common cancels"


def test_a_placebo_is_subtracted_token_by_token():
    placebo = torch.tensor([0.0, 1.0, -2.0, 1.0, 9.0, 9.0])
    assert contrast(GAP, ADVANTAGE, MASK, placebo) == pytest.approx((1 + 2) / 2 - (0 + 4) / 2)


def test_without_tokens_of_both_signs_there_is_none():
    assert contrast(GAP, ADVANTAGE.abs(), MASK) is None
    assert contrast(GAP, ADVANTAGE, MASK * 0) is None
    assert contrast(None, ADVANTAGE, MASK) is None


def test_metrics_are_over_the_models_tokens():
    rows = [(GAP[:3], MASK[:3]), (GAP[3:], MASK[3:])]
    control = [(torch.tensor([0.0, -0.5]), torch.tensor([0, 1]))]
    assert gap_metrics(rows, control) == {
        "teacher/gap/mean": pytest.approx((1 + 3 - 2 + 5 + 7) / 5),
        "teacher/gap_abs/mean": pytest.approx((1 + 3 + 2 + 5 + 7) / 5),
        "teacher/gap_abs/control": 0.5,
    }
    assert gap_metrics([], []) == {}
