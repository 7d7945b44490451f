"""Two roles of one model in the real loop: each has a memory of its own, and each is paid its own end.

The environment runs in this process, as in a host's; nothing here starts Ray.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import kuhn
import pytest
from kuhn import ROLES

from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import EnvRunner
from verl_turnkey.envs.prompting.actions import Call, ParsedAction
from verl_turnkey.envs.prompting.prompts import PromptTurn
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.branching import Trajectory
from verl_turnkey.plugins.rollout.episode import Episode
from verl_turnkey.plugins.rollout.prompts import RolePrompts
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.rollout.turn_answer import answer_turn
from verl_turnkey.plugins.view.join import read

CONVERSATION = ("turnkey.rollout.prompt=conversation", "data.max_response_length=600")
SHORT = "turnkey.rollout.max_tokens_per_turn=8"
LAYOUTS = {
    "template": ("turnkey.rollout.history=3",),
    "a row per step": ("turnkey.rollout.history=3", "turnkey.rollout.layout=steps"),
    "conversation": (*CONVERSATION, SHORT),
    "conversation, a row per step": (*CONVERSATION, SHORT, "turnkey.rollout.layout=steps"),
    "drop_oldest": (*CONVERSATION, SHORT, "turnkey.rollout.when_full=drop_oldest", "data.max_response_length=90"),
}
TURNS = ["check", "bet", "call", "check", "bet", "call"]
"""of two hands: first, second, first, and again"""


class Here:
    """In place of the pool of hosts: environments in this process."""

    waited = 0.0

    def __init__(self, runner: EnvRunner | None = None) -> None:
        self.runner = runner or EnvRunner(())
        self.observation, self.info = "", dict[str, Any]()

    async def start(self, env_id: str, kwargs: dict[str, Any], seed: int | None) -> Here:
        episode = Here()
        episode.observation, episode.info = episode.runner.start(env_id, kwargs, seed)
        return episode

    async def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = self.runner.step(action)
        return Answer(observation, info, reward, terminated, truncated)

    async def clone(self) -> Here:
        copied = self.runner.clone()
        assert copied is not None
        return Here(copied)

    def close(self) -> None:
        self.runner.close()


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_worker.WorkerProcess, "pool", Here())


def game(**kwargs: Any) -> Task:
    return Task("tests/Kuhn-v0", 5, {"hands": 2, **kwargs})


def steps(outputs: list[Any]) -> list[dict[str, Any]]:
    records = [record for row in outputs for record in row.extra_fields["turnkey"]["steps"]]
    return sorted(records, key=lambda record: record["step"])


def movers(script: Any) -> list[str]:
    """Whose prompt each is: the last mark in it."""
    return [script.text(t).rpartition("marked ")[2].partition(".")[0] for t in range(len(script.prompts))]


def leaks(text: str, role: str) -> list[str]:
    return [other for other in ROLES if other != role and f"marked {other}" in text]


def remember(turns: list[PromptTurn]) -> str:
    return " / ".join(turn.observation for turn in turns)


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "way",
    [{}, {"fields": {VALIDATION: True}}, {"served": True}],
    ids=["training", "validation", "turnkey eval"],
)
@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_no_prompt_shows_what_another_role_saw(play, tokenizer, overrides: tuple[str, ...], way: dict[str, Any]):
    """Nor does a row, in which later turns are answers to earlier ones."""
    outputs, script = play(TURNS, game(), *overrides, **way)
    assert movers(script) == ["first", "second", "first"] * 2
    for t, role in enumerate(movers(script)):
        assert leaks(script.text(t), role) == []
    assert len(steps(outputs)) == 6
    for output in outputs:
        (role,) = {record["extra"]["role"] for record in output.extra_fields["turnkey"]["steps"]}
        assert leaks(tokenizer.decode(output.prompt_ids + output.response_ids), role) == []


@pytest.mark.parametrize("overrides", [LAYOUTS["template"], LAYOUTS["conversation"]], ids=["template", "conversation"])
def test_a_role_remembers_its_own_turns(play, overrides: tuple[str, ...]):
    _, script = play(TURNS, game(), *overrides)
    assert script.text(2).count("marked first") == 2
    assert "check" in script.text(2).partition("marked first")[2]
    assert script.text(4).count("marked second") == 2


@pytest.mark.parametrize("overrides", [(), (*CONVERSATION, SHORT, "turnkey.rollout.when_full=drop_oldest")])
def test_summaries_are_of_the_roles_own_turns(play, tmp_path: Path, overrides: tuple[str, ...]):
    (tmp_path / "with_summary.txt").write_text("{task}\nBefore: {summary}\n{observation}\n")
    words = (
        f"turnkey.rollout.summary={Path(__file__)}:remember",
        f"turnkey.rollout.template={tmp_path}/with_summary.txt",
    )
    length = ("data.max_response_length=60",) if overrides else ()
    _, script = play(TURNS, game(), "turnkey.rollout.history=0", *words, *overrides, *length)
    assert any("Before: Hand" in script.text(t) for t in range(6))
    for t, role in enumerate(movers(script)):
        assert leaks(script.text(t), role) == []


def test_a_conversation_is_one_row_for_each_role(play):
    """The one who moved last comes last: verl gives the rollout the numbers of the last row."""
    outputs, _ = play(TURNS, game(), *LAYOUTS["conversation"])
    held = [[record["step"] for record in row.extra_fields["turnkey"]["steps"]] for row in outputs]
    assert held == [[1, 4], [0, 2, 3, 5]]
    assert [row.extra_fields["turnkey_break"] for row in outputs] == ["first", "role"]
    assert [row.num_turns for row in outputs] == [10, 12]


def test_branches_keep_the_memories_apart(play):
    """Forks copy each role's memory; the turns of a branch are in its own prompts alone."""
    _, script = play(
        lambda prompt: "call" if "'bet'" in prompt.rpartition("Moves")[2] else "bet",
        game(),
        "turnkey.rollout.strategy={name: tree, branches: 2}",
        "turnkey.rollout.history=3",
    )
    assert len(script.prompts) > 4
    for t, role in enumerate(movers(script)):
        assert leaks(script.text(t), role) == []


def test_a_player_who_is_named_at_times_has_one_memory():
    """As an environment of one player may do it, which says so with its steps alone."""
    seen: list[list[str]] = []

    class Heard:
        def next(self, state: Answer, images: Any, last: bool) -> None:
            self.texts.append(state.text)

        def __init__(self) -> None:
            self.texts: list[str] = []
            seen.append(self.texts)

    prompts = RolePrompts(lambda *_: Heard())  # type: ignore[arg-type, return-value]
    for text, role in (("0", None), ("1", "a"), ("2", None), ("3", "a"), ("4", "b"), ("5", None)):
        prompts.next(Answer(text, {"extra": {"role": role}}), None)
    assert seen == [["0", "1", "2", "3"], ["4", "5"]]


def test_a_note_on_a_turn_waits_for_the_one_who_took_it():
    """Nobody else reads that a call failed, or what it gave."""

    def state(text: str, role: str, **info: Any) -> Answer:
        return Answer(text, {"extra": {"role": role}, **info})

    trajectory = Trajectory(Episode(), None, None, state("A0", "a"), "", {}, 9, None)  # type: ignore[arg-type]
    results = [{"content": "a's result", "is_error": False}]
    trajectory.add(None, state("B0", "b", note="a's note", results=results))  # type: ignore[arg-type]
    assert trajectory.seen.text == "B0"
    assert "results" not in trajectory.seen.info
    trajectory.add(None, state("A1", "a", note="b's note"))  # type: ignore[arg-type]
    assert trajectory.seen.text == "A1\na's note"
    assert trajectory.seen.info["results"] == [{"content": "a's result\nA1", "is_error": False}]
    trajectory.add(None, state("A2", "a", note="a's other note"))  # type: ignore[arg-type]
    assert trajectory.seen.text == "A2\na's other note"


def test_a_state_without_a_role_is_that_of_who_moved_last():
    def state(text: str, role: str | None, **info: Any) -> Answer:
        return Answer(text, {"extra": {"role": role}, **info})

    step: Any = SimpleNamespace
    trajectory = Trajectory(Episode(), None, None, state("A0", "a"), "", {}, 9, None)  # type: ignore[arg-type]
    trajectory.add(step(role="a"), state("A1", None, note="a's note"))
    assert trajectory.seen.text == "A1\na's note"
    trajectory.add(step(role=None), state("B0", "b", note="a's other note"))
    assert trajectory.seen.text == "B0"
    trajectory.add(step(role="b"), state("A2", "a"))
    assert trajectory.seen.text == "A2\na's other note"


def test_a_call_of_a_player_who_is_named_at_times_has_its_answer():
    seen, answer = (Answer(text, {"extra": {"role": of}, "invalid": False}) for text, of in (("0", None), ("1", "a")))
    environment: Any = SimpleNamespace(step=AsyncMock(return_value=answer))
    trajectory = Trajectory(Episode(), None, None, seen, "", {}, 9, environment)  # type: ignore[arg-type]
    parsed = ParsedAction("act", calls=(Call("act", {}),))
    assert asyncio.run(answer_turn(trajectory, parsed)).info["results"] == [{"content": "1", "is_error": False}]


def test_each_role_has_its_own_system_text(play):
    _, script = play(TURNS, game(), "turnkey.rollout.system={first: You lead., second: You follow.}")
    for t, role in enumerate(movers(script)):
        assert ("You lead." in script.text(t), "You follow." in script.text(t)) == (role == "first", role == "second")


def test_a_role_without_a_system_text_costs_its_episode(play):
    outputs, _ = play(TURNS, game(), "turnkey.rollout.system={first: You lead.}")
    assert (
        "turnkey.rollout.system: expected a text for the role 'second'" in outputs[0].extra_fields["turnkey"]["failed"]
    )


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overrides", [LAYOUTS["template"], LAYOUTS["conversation"]], ids=["template", "conversation"])
def test_each_role_is_paid_its_own_end(play, overrides: tuple[str, ...]):
    """The loser too, on its last turn; what a turn pays both, on the last turn that each had then."""
    outputs, _ = play(TURNS, game(), *overrides)
    env = kuhn.Kuhn(hands=2)
    env.reset(seed=5)
    for action in TURNS:
        env.step(action)
    rewards = [record["reward"] for record in steps(outputs)]
    # Each bet, of the second, takes a quarter from the turn that the first had just taken.
    assert rewards == [-0.25, 0.25, 0, -0.25, 0.25 - env.won, env.won]
    assert [record["composed_reward"] for record in steps(outputs)] == rewards
    roles = [record["extra"]["role"] for record in steps(outputs)]
    ends = {"first": env.won, "second": -env.won}
    assert [record["extra"]["role_outcome"] for record in steps(outputs)] == [ends[role] for role in roles]
    assert {record["success"] for record in steps(outputs)} == {env.won > 0}


def test_a_turn_that_is_not_applied_pays_nothing_again(play):
    outputs, _ = play(["bet", "no move at all", "call"], game(hands=1))
    assert [record["valid"] for record in steps(outputs)] == [True, False, True]
    won = steps(outputs)[0]["extra"]["role_outcome"]
    assert [record["reward"] for record in steps(outputs)] == [0.25 + won, -0.25, -won]


def test_what_a_role_is_paid_before_its_first_turn_is_paid_there(play):
    outputs, _ = play(["check", "bet", "call"], game(hands=1, early=0.5))
    won = steps(outputs)[0]["extra"]["role_outcome"]
    assert [record["reward"] for record in steps(outputs)] == [0, 1 - won, won]


def test_roles_that_succeed_together_have_no_outcome_of_their_own(play):
    outputs, _ = play(["bet", "call"], game(hands=1, together=True))
    assert [record["success"] for record in steps(outputs)] == [True, True]
    assert not any("role_outcome" in record["extra"] for record in steps(outputs))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "role",
            r"info['extra']['role'] must say whose move it is, not 'third': metadata['roles'] declares 'first', 'se",
        ),
        ("outcome", "info['outcome'] pays 'third': metadata['roles'] declares 'first', 'second'"),
        ("number", "info['outcome']['first'] must be a finite number, not str 'much'"),
        ("list", "info['outcome'] must be a dict of role and number, not list [1, -1]"),
    ],
)
def test_what_an_environment_may_not_answer(play, wrong: str, message: str):
    outputs, _ = play(["check", "check"], game(hands=1, wrong=wrong))
    assert message in outputs[0].extra_fields["turnkey"]["failed"]


def test_ends_by_role_need_declared_roles():
    runner = EnvRunner(())
    runner.start("tests/Kuhn-v0", {"declares": False}, 1)
    runner.step("check")
    with pytest.raises(EnvironmentFailure, match=r"info\['outcome'\] pays 'first': declare the roles in the class's"):
        runner.step("check")


# --- the log ----------------------------------------------------------------------------------------------------------


def test_the_log_has_the_role_of_each_turn(play, tmp_path: Path):
    play(TURNS, game(), *LAYOUTS["conversation"], f"turnkey.log.trajectories={tmp_path}/log")
    turns = read(tmp_path / "log", "turns").sort_values("turn")
    assert [json.loads(extra)["role"] for extra in turns["extra"]] == ["first", "second", "first"] * 2
    assert [*zip(turns["row"], turns["turn_in_row"], strict=True)] == [(1, 0), (0, 0), (1, 1), (1, 2), (0, 1), (1, 3)]
    texts = read(tmp_path / "log", "texts").sort_values("turn")
    # What each sees where the other one moved before.
    marked = [str(seen).partition("marked ")[2].partition(".")[0] for seen in texts["first_observation"]]
    assert marked == ["first", "second", "first", "", "second", "first"]
