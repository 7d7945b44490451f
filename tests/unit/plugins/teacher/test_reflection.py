"""A text that a model writes: what it is shown, how often it is called, and what its failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from judge_server import JudgeServer
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError, make_step
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.teacher import TeacherEpisode, TeacherRow, read_source
from verl_turnkey.plugins.teacher.rows import Texts, TextWriter


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with JudgeServer(lambda question: "<think>hm</think>DO look first") as running:
        yield running


def episode(name: str, score: float, *turns: str) -> TeacherEpisode:
    step = make_step(step=0, reward=score, action=None, success=score >= 1, extra={"text": "a door" + 500 * "."})
    return TeacherEpisode(name, score, score >= 1, [step], lambda: list(turns))


SEEN = "Seen: a door" + 394 * "." + "\n"
GROUP = [
    episode("a_0", 1.0, "<think>which way?</think>left", "up"),
    episode("a_1", 0.0, "down"),
    episode("a_2", 2.0, "jump"),
    episode("a_3", 0.5, "stay"),
    episode("a_4", 1.5, "run"),
]
ALIKE = [episode("b_0", 0.0, "down"), episode("b_1", 0.0, "stay")]


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
    texts = written(server, rows(GROUP, ALIKE), episodes=1)
    assert texts.by_row == dict.fromkeys(range(5), "DO look first")
    (question,) = server.questions
    assert question["model"] == "m"
    (prompt,) = [message["content"] for message in question["messages"]]
    solved, failed = prompt.split("\n\n")[1:]
    assert solved == f"This attempt solved the task:\n{SEEN}Turn 1: jump"
    assert failed == f"This attempt did not solve the task:\n{SEEN}Turn 1: down"


def test_an_episode_is_shown_without_thoughts(server: JudgeServer):
    texts = written(server, rows(GROUP[:2]), about="episode", prompt="Judge: {attempts}")
    assert set(texts.by_row) == {0, 1}
    prompts = sorted(question["messages"][0]["content"] for question in server.questions)
    assert prompts == [
        f"Judge: This attempt did not solve the task:\n{SEEN}Turn 1: down",
        f"Judge: This attempt solved the task:\n{SEEN}Turn 1: left\nTurn 2: up",
    ]


def test_batch_after_batch(server: JudgeServer):
    """Each batch has an event loop of its own."""
    source = read_source({"name": "reflection", "url": server.url, "model": "m", "about": "episode"})[1]
    (first, second) = rows([GROUP[0], GROUP[1]]).values()
    for row in (first, second):
        assert asyncio.run(source(row)) == "DO look first"  # pyright: ignore[reportArgumentType]
    assert server.calls == 2


def test_a_request_that_fails_costs_its_rows_their_text(server: JudgeServer):
    server.replies = [(500, {}, "down")]
    texts = written(server, rows(GROUP[:2]), about="episode")
    assert (len(texts.by_row), texts.errors) == (1, 1)
    server.replies = [(500, {}, "down")] * 2
    with pytest.raises(RuntimeError, match=r"the model of reflections at .* gave no answer in 1 attempt"):
        written(server, rows(GROUP[:2]), about="episode")


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
