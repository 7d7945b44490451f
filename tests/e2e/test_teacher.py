"""A teacher's text on stock verl: credit of turns and of tokens, a loss, and observations as a loss beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import POLICY, Run, minigrid, train
from naive.common import leave_one_out
from naive.teacher import agent_opsd, rlsd
from transformers import AutoTokenizer

from verl_turnkey.losses import turn_ids

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 6}
COEFFICIENT, BETA = 0.5, 5.0


def play(out: Path, model: Path, method: str, *overrides: str) -> Run:
    return train(
        out,
        model,
        f"+turnkey={method}",
        *minigrid(out, LEVEL, seed=1),
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.max_tokens_per_turn=8",
        "turnkey.rollout.invalid_action_penalty=0",
        f"turnkey.rewards=[{{name: step, weight: 5}}, {{name: '{POLICY}:forward', weight: 0.5}}]",
        f"turnkey.teacher.source={POLICY}:plan",
        "turnkey.teacher.max_tokens=64",
        "data.max_response_length=1024",
        *overrides,
        mini_batch=4,
        lr=1e-3,
    )


@pytest.fixture(scope="module")
def credited(model: Path, out: Path) -> Run:
    """A modifier of turns, one of tokens, and observations as a loss."""
    return play(
        out,
        model,
        "rloo_steps",
        "turnkey.credit.modify=[agent_opsd, rlsd]",
        f"turnkey.update.observation_coefficient={COEFFICIENT}",
        "turnkey.mutual_information.every=2",
    )


def rows_of(run: Run, step: int) -> dict[str, dict[str, Any]]:
    """What the spy saw of each row that is no padding."""
    names = ("mask", "old", "before", "after", "advantages", "responses", "teacher_log_prob", "has_teacher")
    names += ("turnkey_observation",) * ("turnkey_observation" in run.seen(step))
    return {key: dict(zip(names, row, strict=True)) for key, *row in run.rows(step, "keys", *names)}


@pytest.mark.parametrize("step", [1, 2])
def test_the_credit_of_tokens_is_that_of_the_naive_twins(credited: Run, step: int) -> None:
    rows = rows_of(credited, step)
    steps = [record for record in credited.steps() if record["row"] in rows]
    places = [turn_ids(rows[record["row"]]["mask"][None])[0] == record["turn"] for record in steps]
    for record, tokens in zip(steps, places, strict=True):
        row = rows[record["row"]]
        record |= {"penalty": 0.0, "gaps": (row["teacher_log_prob"] - row["old"])[tokens].double().tolist()}
        assert any(record["gaps"]) == bool(row["has_teacher"])
    base = leave_one_out(steps, "outcomes", "zero")
    per_turn = agent_opsd(steps, base)
    assert not np.allclose(per_turn, base), "the gaps change the credit of turns"
    per_token = rlsd(steps, per_turn, training_step=step)
    assert any(len({round(value, 6) for value in values}) > 1 for values in per_token), "and that of tokens"
    for record, tokens, expected in zip(steps, places, per_token, strict=True):
        np.testing.assert_allclose(rows[record["row"]]["advantages"][tokens], expected, atol=1e-5)


@pytest.mark.parametrize("step", [1, 2])
def test_what_responses_say_about_their_prompts_is_measured(credited: Run, step: int) -> None:
    names = ("prompts", "sequence", "per_token", "bound", "retrieval", "chance", "entropy")
    values = {name: credited.metrics[step][f"mutual_information/{name}"] for name in names}
    assert 2 <= values["prompts"] <= 8
    assert max(values["sequence"], values["per_token"]) <= values["bound"] == pytest.approx(np.log(values["prompts"]))
    assert values["chance"] == 1 / values["prompts"]
    assert values["entropy"] > 0


@pytest.mark.parametrize("step", [1, 2])
def test_what_the_environment_said_is_learned(credited: Run, model: Path, step: int) -> None:
    rows, tokenizer = rows_of(credited, step), AutoTokenizer.from_pretrained(model)
    observations: dict[str, list[str]] = {}
    for episode in credited.episodes("train"):
        if episode["global_step"] == step and not episode["failed"]:
            observations[f"{episode['episode']}_0"] = [text["observation"].strip() for text in episode["texts"][:-1]]
    losses: dict[str, list[torch.Tensor]] = {"before": [], "after": []}
    for key, row in rows.items():
        observed = row["turnkey_observation"] > 0
        number = turn_ids(observed[None])[0]
        runs = [tokenizer.decode(row["responses"][number == n]).strip() for n in range(int(number.max()) + 1)]
        assert runs == observations.pop(key)
        assert not (observed & row["mask"].bool()).any()
        for when, values in losses.items():
            values.append(-row[when][observed])
    assert not observations
    before, after = (torch.cat(losses[when]) for when in ("before", "after"))
    metrics = credited.metrics[step]
    assert metrics["rows/observation_tokens"] == len(before) > 50
    assert metrics["actor/observation_loss"] == pytest.approx(before.mean().item(), rel=1e-3)
    assert after.mean() < before.mean() - 0.01


def test_the_loss_is_that_of_its_formula(model: Path, tmp_path: Path) -> None:
    """One update a step: the ratio is 1, and PPO's loss is minus the advantage."""
    loss = ("+turnkey/loss=sdar", f"turnkey.loss.coefficient={COEFFICIENT}", f"turnkey.loss.beta={BETA}")
    run = play(tmp_path, model, "grpo_steps", *loss)
    for step in (1, 2):
        tokens, gates = [], []
        for row in rows_of(run, step).values():
            mask = row["mask"].bool()
            gap = (row["teacher_log_prob"] - row["old"])[mask]
            text = float(row["has_teacher"])
            gate = torch.sigmoid(BETA * gap)
            tokens.append(-row["advantages"][mask] + COEFFICIENT * text * gate * gap)
            gates += [gate] if text else []
        assert run.metrics[step]["actor/pg_loss"] == pytest.approx(torch.cat(tokens).mean().item(), abs=1e-4)
        assert run.metrics[step]["actor/teacher/gate"] == pytest.approx(torch.cat(gates).mean().item(), abs=1e-2)
        assert run.metrics[step]["teacher/rows_with_text"] > 0
