"""HiPER on stock verl: a model that writes switches and subgoals, and a critic with a head for each decision."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import POLICY, Run, critic, minigrid, train
from naive.critics import streams
from transformers import AutoModelForTokenClassification

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 6}
VALUES = {"low": "values", "high": "turnkey_value_high", "term": "turnkey_value_term"}
STEPS = (1, 2)


@pytest.fixture(scope="module")
def run(out: Path) -> Run:
    """Every turn is paid, so that targets are far from the values that the critic begins with."""
    model = out / "model"
    subprocess.run([sys.executable, HERE / "hiper_model.py", model], check=True)
    return train(
        out,
        model,
        "+turnkey=hae",
        *minigrid(out, LEVEL, seed=1),
        "turnkey.rollout.action_format=hiper",
        "turnkey.rollout.history=1",
        f"turnkey.rewards=[{{name: step}}, {{name: '{POLICY}:forward', weight: 0.5}}]",
        "turnkey.credit.normalise=false",
        "data.max_response_length=32",
        "critic.enable=true",
        *critic(model, lr=1e-3),
        f"trainer.default_local_dir={out}/checkpoints",
        "trainer.save_freq=1",
        mini_batch=4,
        lr=1e-4,
        modules=(HERE / "learned_spy.py",),
    )


def seen(run: Run, step: int) -> dict[str, dict[str, Any]]:
    """By the key of the row, what the critic was fitted with."""
    columns = torch.load(run.out / "spy" / f"heads{step}.pt", weights_only=False)
    padding, names = columns.pop("padding"), list(columns)
    rows = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return {row["keys"]: row for row, padded in zip(rows, padding, strict=True) if not padded}


def decided(run: Run, step: int) -> list[dict[str, Any]]:
    """The turns of a step; ``places``: before which token each head is read."""
    turns = [turn for turn in run.steps() if turn["global_step"] == step]
    rows = seen(run, step)
    for turn in turns:
        tokens = int(rows[turn["row"]]["response_mask"].sum())
        behind = turn["extra"]["to_subgoal"] or turn["extra"]["to_switch"]
        turn["places"] = {"low": int(min(behind, tokens - 1)), "high": 0, "term": 0}
        turn["switch"] = turn["extra"]["switch"]
        for name, field in VALUES.items():
            turn[f"value_{name}"] = float(rows[turn["row"]][field][turn["places"][name]])
    return turns


def critic_weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    path = run.out / "checkpoints" / f"global_step_{step}" / "critic" / "model_world_size_1_rank_0.pt"
    state = torch.load(path, map_location="cpu", weights_only=False)
    return {name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("step", STEPS)
def test_switches_and_subgoals_are_read_from_what_the_model_wrote(run: Run, step: int) -> None:
    turns = decided(run, step)
    assert {turn["switch"] for turn in turns} == {0, 1}
    assert {bool(turn["extra"]["to_subgoal"]) for turn in turns} == {True, False}
    assert np.mean([turn["extra"]["has_action"] for turn in turns]) > 0.8
    assert len({turn["places"]["low"] for turn in turns}) > 1


@pytest.mark.parametrize("step", STEPS)
def test_targets_and_advantages_are_those_of_the_naive_twin(run: Run, step: int) -> None:
    turns, rows = decided(run, step), seen(run, step)
    by_hand = streams(turns, normalise=False)
    update = run.seen(step)
    advantages = dict(zip(update["keys"], update["advantages"], strict=True))
    for t, turn in enumerate(turns):
        row, of_tokens = rows[turn["row"]], np.zeros(len(rows[turn["row"]]["response_mask"]))
        for name, place in turn["places"].items():
            target = row[f"turnkey_target_{name}"].numpy()
            expected = np.full(len(target), np.nan)
            if name != "high" or by_hand["opens"][t]:
                expected[place] = by_hand[name][t]
            np.testing.assert_allclose(target, expected, atol=1e-5, err_msg=f"{turn['row']} {name}")
        for decision in ("switch", "subgoal", "action"):
            first, behind = (int(turn["extra"][f"{word}_{decision}"]) for word in ("from", "to"))
            if decision != "subgoal" or by_hand["opens"][t]:
                of_tokens[first:behind] = by_hand[decision][t] - turn["penalty"] * (decision == "action")
        np.testing.assert_allclose(advantages[turn["row"]].numpy(), of_tokens, atol=1e-5, err_msg=turn["row"])
    assert 0 < sum(by_hand["opens"]) < len(turns)


def test_the_three_values_are_those_of_three_rows_of_the_head(run: Run) -> None:
    """transformers with the weights that the first step saved, on the rows of the second."""
    network = AutoModelForTokenClassification.from_pretrained(run.out / "model", num_labels=3, dtype=torch.float32)
    network.load_state_dict(critic_weights(run, 1))
    network.eval()
    apart = []
    for row in seen(run, 2).values():
        with torch.no_grad():
            values = network(row["input_ids"][None]).logits[0][-len(row["response_mask"]) - 1 : -1]
        for column, field in enumerate(VALUES.values()):
            np.testing.assert_allclose(row[field].numpy(), values[:, column].numpy(), atol=2e-5)
        apart.append((values - values.roll(1, dims=1)).abs().mean(0))
    assert torch.stack(apart).mean(0).min() > 1e-3


def test_each_head_learns(run: Run) -> None:
    before, after = (critic_weights(run, step)["score.weight"] for step in STEPS)
    assert before.shape[0] == 3
    moved = after - before
    assert all(row.abs().max() > 1e-4 for row in moved), "Adam moves what has a gradient by the learning rate"
    assert not any(torch.allclose(moved[i], moved[i - 1]) for i in range(3))
    for step in STEPS:
        metrics = run.metrics[step]
        losses = [metrics[f"critic/{name}/vf_loss"] for name in VALUES]
        assert min(losses) > 0
        assert metrics["critic/vf_loss"] == pytest.approx(sum(losses))
        assert metrics["critic/grad_norm"] > 0
        assert metrics["actor/grad_norm"] > 0
