"""iStar in real runs: a language model that learns from how episodes end, and whose scores become credit."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from launch import SEPARATE, Run, minigrid, train

from verl_turnkey.losses import turn_ids

SPY = Path(__file__).with_name("learned_spy.py")
LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 14}
BETA = 0.05


def play(out: Path, model: Path, *overrides: str, recipe: str = "istar", **more: Any) -> Run:
    return train(
        out,
        model,
        f"+turnkey={recipe}",
        *minigrid(out, LEVEL, train=4, seed=5),
        "turnkey.rollout.history=1",
        "turnkey.prm.optim.lr=1e-3",
        *overrides,
        rollouts=8,
        mini_batch=2,
        lr=1e-4,
        modules=(SPY,),
        **more,
    )


@pytest.fixture(scope="module")
def sync(model: Path, out: Path) -> Run:
    """Two steps; a third in a new process, from the checkpoint."""
    out /= "sync"
    saved = (f"trainer.default_local_dir={out}/checkpoints", "trainer.save_freq=2")
    first = play(out, model, *saved)
    log, spy = f"turnkey.log.trajectories={out}/episodes", {"TURNKEY_SPY": f"{out}/spy"}
    resumed = play(out / "resumed", model, *saved, log, steps=3, env=spy)
    assert min(resumed.metrics) == 3
    return Run(out, first.metrics | resumed.metrics)


#: The further settings of each asynchronous mode, and the updates of its two steps.
MODES = {
    "colocate": (["trainer.v1.trainer_mode=turnkey_colocate_async", "turnkey.prm.normalise=max"], (0,)),
    "separate": ([*SEPARATE, "turnkey.prm.lora_rank=8", "turnkey.prm.reference=base"], (0, 1)),
}


@pytest.fixture(scope="module", params=MODES)
def asynchronous(request: pytest.FixtureRequest, model: Path, out: Path) -> Any:
    settings, updates = MODES[request.param]
    return play(out / request.param, model, *settings), updates


def scored(run: Run, step: int, update: int = 0) -> dict[str, Any]:
    return torch.load(run.out / "spy" / f"prm{step}.{update}.pt", weights_only=False)


def turn_scores(run: Run, step: int, update: int = 0) -> dict[tuple[str, int], float]:
    """The score of each turn of each row."""
    seen, scores = scored(run, step, update), {}
    columns = zip(seen["keys"], seen["padding"], seen["response_mask"], seen["turnkey_prm_score"], strict=True)
    for key, padding, mask, tokens in columns:
        assert not tokens[~mask.bool()].any()
        if not padding:
            turns = turn_ids(mask[None])[0]
            scores |= {(key, int(t)): tokens[turns == t].double().sum().item() for t in turns.unique() if t >= 0}
    return scores


def advantages_are_those_of_the_scores(run: Run, step: int, update: int = 0) -> None:
    scores = turn_scores(run, step, update)

    def expected(steps: list[dict[str, Any]]) -> Any:
        rows = [{**record, "turn_score": scores[record["row"], record["turn"]]} for record in steps]
        return naive.step_episode(rows, estimator="grpo")

    run.agrees_with(expected, step, update)


def ends(run: Run, step: int) -> dict[str, tuple[str, bool]]:
    """Group and success of each episode of a step."""
    episodes = [
        episode for episode in run.episodes("train") if episode["global_step"] == step and not episode["failed"]
    ]
    return {episode["episode"]: (episode["group"], bool(episode["success"])) for episode in episodes}


def number_of_pairs(run: Run, step: int) -> int:
    groups = defaultdict(list)
    for group, success in ends(run, step).values():
        groups[group].append(success)
    return sum(sum(of) * (len(of) - sum(of)) for of in groups.values())


@pytest.mark.parametrize("step", [1, 2, 3])
def test_advantages_are_those_of_the_dumped_scores(sync: Run, step: int) -> None:
    advantages_are_those_of_the_scores(sync, step)
    assert len({round(score, 6) for score in turn_scores(sync, step).values()}) > 10


def test_the_model_learns_to_prefer_what_succeeded(sync: Run) -> None:
    for step in (1, 2, 3):
        metrics = sync.metrics[step]
        assert metrics["prm/pairs"] == number_of_pairs(sync, step) > 0
        assert metrics["prm/loss_after"] < metrics["prm/loss"]
        assert metrics["prm/pair_accuracy_after"] > 0.5
        assert metrics["prm/updates"] == 1
        assert metrics["prm/lr"] == pytest.approx(1e-3)
        assert metrics["prm/grad_norm"] > 0
    first = sync.metrics[1]
    assert first["prm/loss"] == pytest.approx(math.log(2)), "policy and model are the same weights"
    assert first["prm/pair_accuracy"] == 0
    assert first["prm/score/success_minus_failure"] > 0


def test_a_resumed_run_goes_on_with_what_the_model_has_learnt(sync: Run) -> None:
    """A fresh model beside the policy after two steps would have a log-ratio of the policy's small change alone."""
    assert (sync.out / "checkpoints" / "global_step_2" / "turnkey_prm").is_dir()
    assert abs(sync.metrics[3]["prm/loss"] - math.log(2)) > 1e-3


def test_the_gradient_is_that_of_one_graph_over_the_whole_batch(sync: Run, model: Path) -> None:
    """transformers on the first batch; micro-batches and rows cut its pairs anywhere."""
    from transformers import AutoModelForCausalLM

    network, seen = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), scored(sync, 1)
    values: dict[str, Any] = defaultdict(float)
    rows = zip(seen["keys"], seen["input_ids"], seen["response_mask"], seen["old_log_probs"], strict=True)
    for key, ids, mask, old in rows:
        if not mask.any():
            continue
        log_probs = network(ids[None]).logits[0].log_softmax(-1)
        response = range(len(ids) - len(mask), len(ids))
        own = torch.stack([log_probs[t - 1, ids[t]] for t in response])
        values[key.rpartition("_")[0]] += BETA * ((own - old) * mask).sum()
    of = ends(sync, 1)
    gaps = [
        values[good] - values[bad]
        for good, (group, won) in of.items()
        for bad, (other, lost) in of.items()
        if group == other and won and not lost
    ]
    loss = -torch.nn.functional.logsigmoid(torch.stack(gaps)).mean()
    loss.backward()
    assert len(gaps) == sync.metrics[1]["prm/pairs"]
    norm = torch.stack([p.grad.norm() for p in network.parameters() if p.grad is not None]).norm().item()
    assert sync.metrics[1]["prm/grad_norm"] == pytest.approx(norm, rel=1e-3)
    sums = [float(row.double().sum()) for row in seen["turnkey_prm_coef"]]
    assert max(map(abs, sums)) > 0


@pytest.fixture(scope="module")
def head(model: Path, out: Path) -> Run:
    """Scores of before the update, which are those that the objective saw, in the place of rewards."""
    return play(
        out / "head",
        model,
        "turnkey.prm.kind=head",
        "turnkey.prm.objective=sum_to_outcome",
        "turnkey.prm.use=redistribute",
        "turnkey.prm.scores=before",
        recipe="rebn",
    )


@pytest.mark.long
@pytest.mark.parametrize("step", [1, 2])
def test_a_head_redistributes_the_outcome(head: Run, step: int) -> None:
    """SPA-RL: scores that shall add up to the outcome are the rewards, and their derivatives are on last tokens."""
    scores, sums, outcomes = turn_scores(head, step), defaultdict(float), defaultdict(float)
    steps = [record for record in head.steps() if record["global_step"] == step]
    for record in steps:
        sums[record["trajectory"]] += scores[record["row"], record["turn"]]
        outcomes[record["trajectory"]] += record["reward"]
    head.agrees_with(lambda rows: naive.rebn([{**r, "reward": scores[r["row"], r["turn"]]} for r in rows]), step)

    errors = {name: sums[name] - outcomes[name] for name in sums}
    assert len({round(error, 6) for error in errors.values()}) > 10
    metrics = head.metrics[step]
    assert metrics["prm/loss"] == pytest.approx(np.mean([error**2 for error in errors.values()]), rel=1e-4)
    assert metrics["prm/updates"] == 1
    assert metrics["prm/grad_norm"] > 0

    seen = scored(head, step)
    columns = zip(seen["response_mask"], seen["turnkey_prm_coef"], strict=True)
    coefficients = dict(zip(seen["keys"], columns, strict=True))
    for record in steps:
        mask, coefficient = coefficients[record["row"]]
        own = torch.nonzero(turn_ids(mask[None])[0] == record["turn"])[:, 0]
        expected = [0.0] * (len(own) - 1) + [2 * errors[record["trajectory"]] / len(errors)]
        np.testing.assert_allclose(coefficient[own].numpy(), expected, atol=1e-6)


@pytest.mark.long
def test_the_model_learns_beside_an_asynchronous_trainer(asynchronous: Any) -> None:
    run, updates = asynchronous
    for step in (1, 2):
        for update in updates:
            advantages_are_those_of_the_scores(run, step, update)
        metrics = run.metrics[step]
        assert metrics["prm/updates"] > 0
        assert metrics["prm/loss_after"] < metrics["prm/loss"]
        assert np.isfinite(metrics["prm/score/mean"])
