"""The texts of the sources: which episodes they read, and that a row's own is left out."""

from __future__ import annotations

import asyncio
import math
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
from verl_turnkey.plugins.teacher.rows import Texts, TextWriter, read_rows, selected
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


def written(server: JudgeServer, of: dict[int, TeacherRow], **options: Any) -> Texts:
    source = {"name": "reflection", "url": server.url, "model": "m", "retries": 0, **options}
    config = OmegaConf.create({"turnkey": {"teacher": {"source": source}}})
    return TextWriter(config, turnkey_config(config)).write(of)


def test_a_group_with_both_outcomes_is_compared_once(server: JudgeServer):
    texts = written(server, rows(ATTEMPTS, ALIKE), episodes=1)
    assert texts.by_row == dict.fromkeys(range(5), "DO look first")
    (question,) = server.questions
    assert question["model"] == "m"
    (prompt,) = [message["content"] for message in question["messages"]]
    solved, failed = prompt.split("\n\n")[1:]
    assert solved == f"This attempt solved the task:\n{SEEN}Turn 1: jump"
    assert failed == f"This attempt did not solve the task:\n{SEEN}Turn 1: down"


def test_an_episode_is_shown_without_thoughts(server: JudgeServer):
    texts = written(server, rows(ATTEMPTS[:2]), about="episode", prompt="Judge: {attempts}")
    assert set(texts.by_row) == {0, 1}
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
    texts = written(server, rows(ATTEMPTS[:2]), about="episode")
    assert (len(texts.by_row), texts.errors) == (1, 1)
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
