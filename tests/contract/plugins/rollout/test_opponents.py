"""Others play the other roles in the real loop, at random or a model behind a URL; only the policy is trained."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kuhn
import pytest
from judge_server import JudgeServer
from test_role_memory import CONVERSATION, SHORT, Here, leaks, steps

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.eval.player import outcome
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION
from verl_turnkey.plugins.rollout.turn_answer import seat_of
from verl_turnkey.plugins.view import terminal
from verl_turnkey.plugins.view.conversations import conversations
from verl_turnkey.plugins.view.join import load, read

RANDOM = "turnkey.opponent=random"


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_worker.WorkerProcess, "pool", Here())


def game(seed: int = 5, **kwargs: Any) -> Task:
    return Task("tests/Kuhn-v0", seed, {"hands": 2, **kwargs})


def calls(prompt: str) -> str:
    """The policy: calls each bet, and checks else."""
    return "call" if "'bet'" in prompt.rpartition("Moves")[2] else "check"


def raises(prompt: str) -> str:
    """The policy, or a model: bets whenever it may."""
    return "call" if "'bet'" in prompt.rpartition("Moves")[2] else "bet"


def bets(question: dict[str, Any]) -> str:
    return raises(question["messages"][-1]["content"])


@pytest.fixture
def model() -> Iterator[JudgeServer]:
    with JudgeServer(bets) as server:
        yield server


def at(server: JudgeServer, key: str = "opponent", **further: Any) -> str:
    config = {"url": server.url, "model": "fixed", "retries": 0, **further}
    return override(f"turnkey.{key}", config)


def text_of(question: dict[str, Any]) -> str:
    return "\n".join(message["content"] for message in question["messages"])


def replayed(seed: int, policy: list[str], others: list[dict[str, Any]]) -> kuhn.Kuhn:
    """The game after the moves of both, in their turns."""
    env = kuhn.Kuhn(hands=2)
    env.reset(seed=seed)
    moves = {seat_of(kuhn.ROLES, seed): iter(policy)}
    moves[next(role for role in kuhn.ROLES if role not in moves)] = iter(turn["action"] for turn in others)
    for _ in range(len(policy) + len(others)):
        env.step(next(moves[kuhn.ROLES[env.mover]]))
    return env


def others_of(folder: Path) -> list[dict[str, Any]]:
    texts = read(folder, "texts").sort_values(["episode", "turn"])
    return [turn for listed in texts["opponents"].dropna() for turn in json.loads(listed)]


# --- whose turns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [4, 5], ids=["first", "second"])
@pytest.mark.parametrize("overrides", [(), (*CONVERSATION, SHORT)], ids=["template", "conversation"])
def test_only_turns_of_the_policy_are_trained(play, tmp_path: Path, overrides: tuple[str, ...], seed: int):
    """The rows hold its tokens and no other's, and it is paid what its role gets at the end."""
    log = f"turnkey.log.trajectories={tmp_path}/log"
    outputs, script = play(calls, game(seed), RANDOM, log, *overrides)
    records, seat = steps(outputs), kuhn.ROLES[seed % 2]
    assert {record["extra"]["role"] for record in records} == {seat}
    trained = [id for row in outputs for id, own in zip(row.response_ids, row.response_mask, strict=True) if own]
    assert trained == [id for answer in script.answers for id in answer]
    others = others_of(tmp_path / "log")
    assert {turn["role"] for turn in others} == {*kuhn.ROLES} - {seat}
    env = replayed(seed, [record["action"] for record in records], others)
    assert env.hand == 2
    end = env.won if seat == "first" else -env.won
    assert {record["extra"]["role_outcome"] for record in records} == {end}
    assert [record["success"] for record in records] == [end > 0] * len(records)
    assert records[-1]["terminated"]
    assert sum(record["reward"] for record in records) == end + 0.25 * (
        [record["action"] for record in records].count("bet") - [turn["action"] for turn in others].count("bet")
    )


def test_a_state_of_the_policy_leads_to_the_next_one_in_which_it_moves(play):
    outputs, script = play(calls, game(4), RANDOM)
    records = steps(outputs)
    assert [record["next_anchor"] for record in (r["extra"] for r in records[:-1])] == [
        r["anchor"] for r in records[1:]
    ]
    assert [record["step"] for record in records] == list(range(len(script.prompts)))


def test_seats_take_turns_by_seed_and_a_group_has_one(play):
    def seat(seed: int) -> list[str]:
        outputs, _ = play(calls, game(seed), RANDOM, sessions=4)
        return [role for rows in outputs for role in {record["extra"]["role"] for record in steps(rows)}]

    assert [seat(seed) for seed in range(4)] == [["first"] * 4, ["second"] * 4] * 2


def test_random_moves_are_legal_and_differ_between_rollouts(play, tmp_path: Path):
    play(raises, game(5), RANDOM, f"turnkey.log.trajectories={tmp_path}/log", sessions=24)
    moves = [(turn["observation"], turn["action"]) for turn in others_of(tmp_path / "log")]
    assert {action for _, action in moves} == {"check", "bet", "call", "fold"}
    assert all((action in ("call", "fold")) == ("'bet'" in seen) for seen, action in moves)


def test_a_validation_meets_the_same_moves_each_time(play, tmp_path: Path):
    def moves(name: str, *overrides: str, **fields: Any) -> list[str]:
        log = f"turnkey.log.trajectories={tmp_path / name}"
        play(calls, game(5), *overrides, log, sessions=8, fields=fields)
        return [turn["action"] for turn in others_of(tmp_path / name)]

    validated = [moves(uid, "turnkey.val_opponent=random", uid=uid, **{VALIDATION: True}) for uid in ("a", "b")]
    assert validated[0] == validated[1] != []
    trained = [moves(f"train {uid}", RANDOM, uid=uid) for uid in ("a", "b")]
    assert trained[0] != trained[1]


# --- a model behind a URL ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [4, 5], ids=["first", "second"])
@pytest.mark.parametrize(
    "overrides", [("turnkey.rollout.history=3",), (*CONVERSATION, SHORT)], ids=["template", "talk"]
)
def test_neither_reads_what_the_other_saw(play, model: JudgeServer, overrides: tuple[str, ...], seed: int):
    systems = "turnkey.rollout.system={first: You lead., second: You follow.}"
    outputs, script = play(calls, game(seed), at(model), systems, *overrides)
    seat, other = kuhn.ROLES[seed % 2], kuhn.ROLES[1 - seed % 2]
    prompts = [script.text(t) for t in range(len(script.prompts))]
    questions = [text_of(question) for question in model.questions]
    assert prompts
    assert questions
    for text, role in [*((text, seat) for text in prompts), *((text, other) for text in questions)]:
        assert leaks(text, role) == []
        assert f"marked {role}" in text
        assert ("You lead." in text, "You follow." in text) == (role == "first", role == "second")
    assert "Action: bet" in questions[-1] or any(m["role"] == "assistant" for m in model.questions[-1]["messages"])
    assert not any(leaks(script.tokenizer.decode(row.prompt_ids + row.response_ids), seat) for row in outputs)


def test_it_is_asked_by_name_with_its_parameters_and_a_seed(play, model: JudgeServer):
    play(calls, game(), at(model, params={"temperature": 0.5}), "turnkey.rollout.max_tokens_per_turn=9")
    assert {(q["model"], q["temperature"], q["max_tokens"]) for q in model.questions} == {("fixed", 0.5, 9)}
    assert len({q["seed"] for q in model.questions}) == len(model.questions)


def test_hints_are_for_the_policy(play, model: JudgeServer):
    hint = {"turnkey_hint": "bluff often", "turnkey_hint_share": 1.0}
    _, script = play(calls, game(), at(model), fields=hint)
    assert "Hint: bluff often" in script.text(0)
    assert not any("bluff" in text_of(question) for question in model.questions)


def test_its_thoughts_and_slips_are_not_its_moves(play, tmp_path: Path):
    """What it says in vain is in its memory, and it is asked again; the log says why a turn is invalid."""
    answers = iter(["<think>bet?</think>check", "I pass", "bet", "call"])
    with JudgeServer(lambda question: next(answers, "call")) as server:
        play(calls, game(4, hands=1), at(server), f"turnkey.log.trajectories={tmp_path}/log")
        first = others_of(tmp_path / "log")
        assert [turn["action"] for turn in first] == ["check"]
        play(lambda _: "check", game(4, hands=1), at(server), f"turnkey.log.trajectories={tmp_path}/again")
        again = others_of(tmp_path / "again")
        assert [turn.get("action") for turn in again] == [None, "bet"]
        assert again[0]["invalid"] == "not an admissible action: 'I pass'"
        assert "I pass" in text_of(server.questions[-1])


def test_an_opponent_that_fails_costs_its_episode_alone(play):
    with JudgeServer(lambda _: "I resign") as server:
        outputs, _ = play(calls, game(4), at(server))
        assert "(opponent): fixed as 'second' found no valid action in 5 turns" in failed(outputs)
    outputs, _ = play(calls, game(4), at(server))
    assert re.search(rf"\(opponent\): the opponent at {server.url}/chat/completions gave no answer", failed(outputs))
    outputs, _ = play(calls, Task("turnkey/FrozenLake-v0", 4), RANDOM)
    assert "(opponent): turnkey.opponent needs an environment whose metadata declares its roles" in failed(outputs)


def failed(outputs: list[Any]) -> str:
    (row,) = outputs
    assert not any(row.response_mask)
    return row.extra_fields["turnkey"]["failed"]


def test_validation_has_an_opponent_of_its_own(play, model: JudgeServer):
    outputs, _ = play(calls, game(), at(model, "val_opponent"))
    assert {record["extra"]["role"] for record in steps(outputs)} == {*kuhn.ROLES}
    assert not model.questions
    outputs, _ = play(calls, game(), at(model, "val_opponent"), fields={VALIDATION: True})
    assert {record["extra"]["role"] for record in steps(outputs)} == {"second"}
    assert model.questions


# --- branches, evaluations, the log -----------------------------------------------------------------------------------


def test_branches_meet_moves_of_their_own(play):
    """A fork copies what the opponent remembers, and each branch is paid its own end."""
    outputs, _ = play(calls, game(4), RANDOM, "turnkey.rollout.strategy={name: tree, branches: 2}")
    assert {record["extra"]["role"] for record in steps(outputs)} == {"first"}
    branches = {row.extra_fields["turnkey"].get("branch", 0) for row in outputs}
    assert len(branches) > 1


def test_an_evaluation_tells_the_ends_by_role(play):
    outputs, _ = play(calls, game(4), RANDOM)
    assert outcome(outputs)["outcomes"] == {"first": steps(outputs)[0]["extra"]["role_outcome"]}
    outputs, _ = play(calls, game(4))
    ends = outcome(outputs)["outcomes"]
    assert ends.keys() == {*kuhn.ROLES}
    assert sum(ends.values()) == 0


def test_the_log_names_the_opponent_beside_the_turn_that_it_followed(play, tmp_path: Path, model: JudgeServer):
    play(calls, game(5), at(model), f"turnkey.log.trajectories={tmp_path}/log")
    texts = read(tmp_path / "log", "texts").sort_values("turn")
    listed = [json.loads(turns) for turns in texts["opponents"].fillna("[]")]
    opening, *_ = listed[0]
    assert opening == {"role": "first", "by": "fixed", "response": "bet", "action": "bet", "before": True} | {
        "observation": opening["observation"]
    }
    assert "marked first" in opening["observation"]
    assert all("before" not in turn for turns in listed[1:] for turn in turns)
    assert list(texts["turn"]) == list(range(len(texts)))


def test_the_terminal_shows_whose_turns_they_are(play, tmp_path: Path, model: JudgeServer):
    """The opponent's before the policy's first, and after it the one that answered."""
    play(calls, game(5, hands=1), at(model), f"turnkey.log.trajectories={tmp_path}/turnkey_log")
    run = load(tmp_path)
    (talk,) = conversations(run, [0])
    lines = [line.plain for line in terminal.lines(talk, 1.0)]
    labels = [line.split()[0] for line in lines]
    assert labels.index("opponent") < labels.index("turn")
    assert lines[labels.index("opponent")].split(None, 1)[1] == "first (fixed): bet"
