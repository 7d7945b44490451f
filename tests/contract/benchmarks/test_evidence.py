"""The plain loop computes what verl computes, the plan chooses before it reports, and the page has the kept lines."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.core_algos import compute_policy_loss_vanilla, compute_value_loss
from verl.workers.config import ActorConfig

from verl_turnkey.advantage import StepBatch

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks" / "evidence"))

import lines  # noqa: E402
import loop  # noqa: E402
import policy  # noqa: E402
import studies  # noqa: E402
import tables  # noqa: E402
from loop import Loop  # noqa: E402
from tasks import TASKS  # noqa: E402

ROWS = [((5, 6, 7), (8, 9, 2)), ((5, 6), (8, 2)), ((5, 6, 7), (8, 9, 2)), ((5, 6, 7, 8), (4,))]


@pytest.fixture(scope="module")
def model(model_dir: Path):
    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_the_loss_of_rows_taken_together_is_verls_of_each():
    rng = np.random.default_rng(0)
    now = torch.tensor(rng.normal(0, 1, (6, 3)), dtype=torch.float64, requires_grad=True)
    old = torch.tensor(rng.normal(0, 1, (6, 3)))
    advantage = torch.tensor([1.0, -2.0, 0.5, -0.1, 3.0, -1.0], dtype=torch.float64)[:, None]
    mask = torch.tensor(rng.random((6, 3)) < 0.8)
    sizes = {"dp_size": 1, "batch_num_tokens": 100, "global_batch_size": 1, "loss_scale_factor": None}
    config = ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, global_batch_info=sizes)
    # The same six rows twice, with opposite advantages as well: as twelve rows for verl, as six for the loop.
    verls, _ = compute_policy_loss_vanilla(
        torch.cat([old, old]),
        torch.cat([now, now]),
        torch.cat([advantage, -advantage / 2]).expand(12, 3),
        torch.cat([mask, mask]),
        config=config,
    )
    up = advantage.clamp(min=0) + (-advantage / 2).clamp(min=0)
    down = (-advantage).clamp(min=0) + (advantage / 2).clamp(min=0)
    ours = (loop.policy_loss(torch.exp(now - old), up, down) * mask).sum() / 100
    assert float(ours.detach()) == pytest.approx(float(verls.detach()))
    found = [torch.autograd.grad(loss, now)[0].numpy() for loss in (ours, verls)]
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)
    assert np.abs(found[0]).max() > 0


def test_the_critics_loss_is_verls():
    rng = np.random.default_rng(0)
    now, before = (torch.tensor(rng.normal(0, 1, (6, 3))) for _ in range(2))
    target = torch.tensor(rng.normal(0, 1, (6, 1)))
    mask = torch.tensor(rng.random((6, 3)) < 0.8)
    verls, _ = compute_value_loss(now, target.expand(6, 3), before, mask, loop.CLIP_VALUE, batch_num_tokens=100)
    assert float((loop.value_loss(now, before, target) * mask).sum() / 100) == pytest.approx(float(verls))


def test_what_is_sampled_has_the_probabilities_of_the_model(model, model_dir: Path):
    torch.manual_seed(0)
    prompts = [prompt for prompt, _ in ROWS] * 3
    said = policy.Sampler(model, AutoTokenizer.from_pretrained(model_dir), 4)(prompts)
    rows = [(prompt, each.ids) for prompt, each in zip(prompts, said, strict=True)]
    found, inside = policy.log_probs(model, rows)
    assert len({each.ids for each in said}) > 3
    for row, each in enumerate(said):
        assert len(each.ids) <= 4
        assert found[row, inside[row]].tolist() == pytest.approx(each.log_probs, abs=1e-4)


def test_log_probs_are_those_of_each_row_alone(model):
    found, inside = policy.log_probs(model, ROWS)
    for row, (prompt, response) in enumerate(ROWS):
        scores = torch.log_softmax(model(torch.tensor([prompt + response])).logits[0], dim=-1)
        alone = [scores[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]
        assert found[row, inside[row]].tolist() == pytest.approx(alone, abs=1e-5)


def test_micro_batches_hold_every_row_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(policy, "MICRO", 12)
    batches = list(policy.micro_batches(ROWS))
    assert sorted(row for batch in batches for row in batch) == sorted(ROWS)
    assert len(batches) > 1
    assert all(len(batch) * max(len(p) + len(r) for p, r in batch) <= 12 for batch in batches)


@pytest.mark.parametrize("method", ["gigpo", "turn_gae", studies.REINFORCE])
def test_a_step_plays_credits_and_moves_the_model(method: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loop, "GROUPS", 2)
    monkeypatch.setattr(loop, "ROLLOUTS", 2)
    task = TASKS["doorkey"]
    made = Loop(task, model_dir, method, 1e-3, seed=0, n_val=4)
    monkeypatch.setattr(loop, "table", _won(loop.table))
    before = [weight.clone() for weight in made.model.parameters()]
    found = dict(made.run(1, 1))
    assert set(found) == {0, 1}
    assert found[0].keys() == {"val-core/doorkey/acc/mean@1"}
    assert found[1]["episode/count"] == 4
    assert found[1]["episode/length/mean"] == task.max_turns, "this model knows no action"
    assert found[1]["episode/invalid_rate"] == 1
    assert any(not torch.equal(now, then) for now, then in zip(made.model.parameters(), before, strict=True))


def _won(table):
    """The first episode has an outcome of 1, so that there is something to credit."""

    def changed(steps, won, values) -> StepBatch:
        first = next(row for row, step in enumerate(steps) if step.episode == 0)
        steps = [SimpleNamespace(**{**vars(step), "row": step.row}) for step in steps]
        steps[first].reward = 1.0
        return table(steps, won, values)

    return changed


def test_reinforce_is_centred_by_group_and_scaled_over_tokens():
    batch = StepBatch(
        group=["a", "a", "a", "b", "b"],
        trajectory=[0, 0, 1, 2, 3],
        step=[0, 1, 0, 0, 0],
        reward=[0.0, 1.0, 0.0, 1.0, 0.0],
        penalty=[0.5, 0.0, 0.0, 0.0, 0.0],
        tokens=[1, 1, 2, 2, 2],
    )
    assert loop.reinforce(batch).advantage.tolist() == pytest.approx([0.5, 1.0, -1.0, 1.0, -1.0])


# --- plan and lines ---------------------------------------------------------------------------------------------------


def _line(variant: str, lr: float, seed: int, success: list[float], **further) -> lines.Line:
    about = {"task": "doorkey", "variant": variant, "lr": lr, "seed": seed, "warm_start": f"of {seed}"}
    steps = {
        4 * i: {"val-core/doorkey/acc/mean@1": value, "episode/success_rate": value, "episode/count": 64.0}
        | {"episode/failed": 0.0, "episode/length/mean": 10.0, "rows/trained_tokens": 1000.0}
        for i, value in enumerate(success)
    }
    return {**lines.line(about, steps), **further}


def _tuned(variant: str = "gigpo", last: tuple[float, ...] = (0.2, 0.9, 0.6)) -> list[lines.Line]:
    """At the first rates, each ending at one of ``last``."""
    return [
        _line(variant, lr, studies.TUNING_SEED, [0.4, value])
        for lr, value in zip(studies.RATES, last, strict=False)
        if value
    ]


def test_rates_are_chosen_on_a_seed_of_their_own_before_anything_is_reported():
    first = list(studies.methods([]))
    assert {each.seed for each in first} == {studies.TUNING_SEED}
    assert {each.lr for each in first} == set(studies.RATES[1:3])
    assert len(first) == len(studies.METHODS) * 2 * len(studies.METHOD_TASKS)
    then = [each for each in studies.methods(_tuned()) if each.seed != studies.TUNING_SEED]
    assert [(each.name, each.seed) for each in then] == [("gigpo", seed) for seed in studies.SEEDS]
    assert {each.lr for each in then} == {studies.RATES[1]}


@pytest.mark.parametrize(("lower", "higher", "third"), [(0.9, 0.6, 0), (0.6, 0.9, 3), (0.6, 0.6, 0)])
def test_the_third_rate_is_beyond_the_better_one(lower: float, higher: float, third: int):
    two = _tuned(last=(0, lower, higher))
    further = [each for each in studies.methods(two) if each.name == "gigpo" and each.lr not in studies.RATES[1:3]]
    assert [(each.lr, each.seed) for each in further] == [(studies.RATES[third], studies.TUNING_SEED)]
    assert studies.best_rate(two, "doorkey", "gigpo") is None


def test_lines_are_kept_in_order_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lines, "RESULTS", tmp_path)
    made = [_line("gigpo", 5e-4, seed, [0.4, 0.123456789]) for seed in (1, 0)]
    for each in made:
        lines.add("some", each)
    kept = lines.load("some")
    assert [each["seed"] for each in kept] == [0, 1]
    assert lines.validations(kept[0]) == ([0, 4], [0.4, 0.12346])
    assert len((tmp_path / "some.json").read_text().splitlines()) == 2 + len(made)
    run = lines.as_run(kept[0], {})
    assert run.interactions().tolist() == [640, 1280]


def test_the_table_reports_the_chosen_rate_alone():
    kept = [*_tuned(), *_tuned("grpo_steps")]
    kept += [_line("gigpo", studies.RATES[1], seed, [0.4, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8]) for seed in range(3)]
    kept += [_line("gigpo", studies.RATES[2], 0, [0.0] * 7)]
    lost = [0.4, 0.6, 0.9, 0.9, 0.1, 0.1, 0.1]
    kept += [_line("grpo_steps", studies.RATES[1], seed, lost) for seed in range(3)]
    found = tables.methods(kept)
    assert "| gigpo | 0.00025 | 3 | 0.800 |" in found
    assert "1.00 (1.00 to 1.00)" in found
    [row] = [row for row in found.splitlines() if row.startswith("| grpo_steps | 0.00025")]
    assert row.endswith("| 3 of 3, median 1920 | 3 |"), "all three fell below half of their best"


def test_runs_of_a_seed_that_started_from_two_models_are_not_compared():
    kept = [_line("gigpo", 5e-4, 0, [0.5]), _line("hgpo", 5e-4, 0, [0.5], warm_start="another")]
    with pytest.raises(ValueError, match="doorkey with seed 0 started from 2 different models"):
        tables.check(kept)


@pytest.mark.parametrize("name", list(tables.CONTENTS))
def test_the_page_has_the_tables_of_the_kept_lines(name: str):
    marked = tables.MARKS.format(name=name, content=tables.CONTENTS[name]())
    assert marked in tables.PAGE.read_text(encoding="utf-8")


def test_kept_lines_are_of_this_plan():
    for study in studies.STUDIES:
        for line in lines.load(study):
            assert line["task"] in TASKS
            assert all(math.isfinite(value) for value in lines.validations(line)[1])
            assert line["command"]
            assert line["versions"]["torch"]
