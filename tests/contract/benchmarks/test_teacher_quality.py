"""Texts are those of the sources, gaps those of the policy, and the page's numbers are those kept."""

from __future__ import annotations

import re
from pathlib import Path

import hinted_policy as hinted
import learned_quality
import numpy as np
import pytest
import teacher_quality as quality
import torch
from exact_values import WON, WORDS
from hinted_policy import KINDS, Task, locks
from learned_quality import BEST, SCORERS, Place, Scorer
from teacher_tables import CONTROLS, CURVES, EXACT, GAP, MODIFIERS

from verl_turnkey.advantage import compute_credit, modifiers
from verl_turnkey.losses.objectives import gradient, objectives

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def setting() -> quality.Setting:
    """Locks under a policy that was taught for a short time."""
    tasks = hinted.locks(np.random.default_rng(0))
    return quality.Setting.of(tasks, hinted.taught(tasks, 0.5, 0.8, seed=0, steps=120), seed=0)


@pytest.fixture(scope="module")
def batch(setting: quality.Setting):
    """Groups of two: some episodes are without another success in their group."""
    return setting.world.batch(2, 64, np.random.default_rng(1))


def test_the_expert_takes_a_shortest_way():
    following = np.array([[1, 2, 0], [WON, 0, 1], [1, 1, 2], [3, 3, 3]])
    task = Task(list("abcd"), [("a",)] * 4, following, ())
    assert task.expert.tolist() == [[1, 0, 0], [1, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3]


def test_a_lock_opens_by_its_combination_alone():
    task = hinted.locks(np.random.default_rng(0))[0]
    assert [WORDS[row.argmax()] for row in task.expert] == list(task.skill)
    assert (np.sort(task.following, axis=1)[:, :-1] <= 0).all()


def test_an_observation_is_cut_at_its_punctuation():
    seen = "You see a locked yellow door 1 step forward; a green goal 2 steps left."
    text = f"Free steps: 1 ahead, 0 left. {seen} You carry nothing."
    assert hinted.clauses(text) == (
        "1 ahead",
        "0 left",
        "a locked door 1 step forward",
        "a goal 2 steps left",
        "You carry nothing",
    )


def test_equal_rows_in_any_order_have_equal_numbers_and_the_end_of_a_long_text_counts(setting: quality.Setting):
    reader = setting.reader
    prompt = setting.tasks[0].prompt
    long = hinted.transcript([0] * 30 + [1, 2])
    texts = [None, hinted.hint(0), None, long, hinted.hint(1)]
    rows = [prompt[0], prompt[0], prompt[1], prompt[0], prompt[0]]
    with torch.no_grad():
        whole = reader.log_probs(rows, texts)
        single = torch.cat([reader.log_probs([row], [text]) for row, text in zip(rows, texts, strict=True)])
        cut = reader.log_probs([prompt[0]], [long[-hinted.TEXT_SLOTS :]])
    assert torch.allclose(whole, single, atol=1e-5)
    assert torch.equal(whole[3:4], cut) or torch.allclose(whole[3:4], cut, atol=1e-5)
    assert not torch.allclose(whole[0], whole[1], atol=1e-3)


def test_texts_are_those_of_the_sources(setting: quality.Setting, batch):
    steps, tasks = batch.steps, setting.tasks
    texts = {kind: setting.texts(kind, batch) for kind in KINDS}
    episodes = {
        int(e): (batch.action[steps.trajectory == e], bool(steps.success[steps.trajectory == e][0]))
        for e in np.unique(steps.trajectory)
    }
    group = dict(zip(steps.trajectory.tolist(), steps.group.tolist(), strict=True))
    with_text = 0
    for row in range(len(steps)):
        task, here, action = tasks[batch.game[row]], batch.situation[row], batch.action[row]
        own = int(steps.trajectory[row])
        right, wrong = (WORDS.index(texts[kind][row][1]) for kind in ("right hint", "wrong hint"))
        assert task.expert[here, right] > 0
        assert task.expert[here, wrong] == 0
        assert texts["skill"][row] == ("skill", *task.skill)
        assert len(texts["placebo"][row]) == len(texts["skill"][row])
        following = task.following[here, action]
        ahead = texts["next observation"][row]
        assert ahead == (None if following == WON else ("next observation", *task.prompt[following]))
        successes = [
            hinted.transcript(done)
            for e, (done, won) in episodes.items()
            if won and e != own and group[e] == group[own]
        ]
        assert texts["episode"][row] in (successes or [None])
        with_text += bool(successes)
        known = bool(successes) or episodes[own][1]
        assert (texts["outcome"][row] is not None) == known
        if known:  # a lock opens at its last stage by its last action
            assert texts["outcome"][row] == ("outcome", *task.prompt[-1], task.skill[-1])
    assert 0 < with_text < len(steps), "no group without a success, or none with one"


def test_the_gap_is_that_of_two_prompts_and_drives_the_modifiers(setting: quality.Setting, batch):
    table, tokens = setting.teach("episode", batch)
    texts = setting.texts("episode", batch)
    row = next(place for place, text in enumerate(texts) if text is not None)
    without = next(place for place, text in enumerate(texts) if text is None)
    prompt = setting.tasks[batch.game[row]].prompt[batch.situation[row]]
    with torch.no_grad():
        student, teacher = setting.reader.log_probs([prompt] * 2, [None, texts[row]])[:, batch.action[row]].tolist()
    assert tokens.gap[row] == pytest.approx(teacher - student, abs=1e-5)
    assert tokens.gap[without] == 0
    assert np.isnan(table.extra["teacher_gap"][without])
    plain = compute_credit("grpo_steps", batch.steps).advantage
    for method in MODIFIERS:
        assert not np.allclose(quality.modified(method, table, tokens), plain), method
    assert quality.modified(GAP, table, tokens).tolist() == tokens.gap.tolist()


def test_every_shipped_modifier_that_reads_a_teacher_is_compared():
    reads = {name for name, spec in modifiers().items() if any("teacher" in column for column in spec.needs)}
    assert reads == set(MODIFIERS)


def test_agreement_is_that_of_known_numbers():
    agreement = quality.Agreement()
    agreement.add(np.array([1.0, 10.0]), np.array([1.0, 2.0]), 0.5)
    agreement.add(np.array([100.0, -1.0, 0.0]), np.array([3.0, 1.0, -1.0]), 0.7)
    result = agreement.result()
    assert result["sign"] == 6 / 8
    assert result["cosine"] == 0.6
    assert result["spearman"] == pytest.approx(np.corrcoef([3, 4, 5, 1, 2], [2.5, 4, 5, 2.5, 1])[0, 1])
    assert result["pearson"] == pytest.approx(np.corrcoef([1, 10, 100, -1, 0], [1, 2, 3, 1, -1])[0, 1])


def test_exact_advantages_are_the_bound_and_learn(setting: quality.Setting):
    result = quality.measure(setting, 2, seed=0)
    assert result[EXACT]["pearson"] == pytest.approx(1)
    assert result[EXACT]["sign"] == pytest.approx(1)
    assert result[EXACT]["cosine"] > max(result[name]["cosine"] for name in ("grpo_steps", "gigpo"))
    assert set(result) == {
        "grpo_steps",
        "gigpo",
        EXACT,
        quality.SKILL_GRPO,
        *(f"{GAP}, {kind}" for kind in KINDS),
        *(f"{method}, {kind}" for method, own in MODIFIERS.items() for kind in (own, *CONTROLS)),
    }
    curve = quality.learn(setting, EXACT, 0, 6)["success"]
    assert len(curve) == 7
    assert curve[0] == pytest.approx(setting.success)
    assert curve[-1] > 1.1 * curve[0]


@pytest.mark.parametrize("name", [name for name in CURVES if name != EXACT])
def test_each_method_trains_a_copy(setting: quality.Setting, name: str):
    before = [parameter.clone() for parameter in setting.reader.parameters()]
    curves = quality.learn(setting, name, 0, 1)
    assert curves["success"][1] != curves["success"][0]
    assert ("without text" in curves) == (name == quality.SKILL_GRPO)
    assert all(map(torch.equal, before, setting.reader.parameters()))


def test_a_second_run_goes_on_where_the_first_one_stopped(tmp_path: Path):
    path = tmp_path / "results.json"
    quality.Kept(path, {"batches": 1}).add(("credit", "lock"), lambda: 1.0)
    quality.Kept(path, {"batches": 1}).add(("credit", "lock"), lambda: pytest.fail("measured again"))
    with pytest.raises(SystemExit, match="other settings"):
        quality.Kept(path, {"batches": 2})


@pytest.mark.parametrize(("script", "name"), [(quality, "self-distillation"), (learned_quality, "learned-signals")])
def test_the_intervals_of_the_page_are_those_of_the_kept_results(capsys, script, name):
    script.tables()
    printed = capsys.readouterr().out
    page = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    intervals = re.findall(r"[+-]?\d\.\d+ \[[^\]]+\]", " ".join(page.split()))
    assert len(intervals) > 5
    assert [interval for interval in intervals if interval not in printed] == []


# --- learned scorers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place() -> Place:
    return Place.of(locks(np.random.default_rng(0)), 0.5)


def test_every_shipped_objective_is_compared():
    assert {objective for _, objective in SCORERS.values()} == set(objectives())


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_begins_at_0_and_lowers_its_objective(place: Place, name: str):
    batch = place.world(place.start).batch(8, 64, np.random.default_rng(0))
    prompts, scorer = place.prompts(batch), Scorer(name, place.start, 0.003)
    factor = 1 if scorer.kind == "head" else 1 / scorer.params.beta

    def loss() -> float:
        objective = gradient(
            scorer.objective, factor * scorer.scores(prompts, batch, place.start), batch.steps, scorer.params
        )
        assert objective is not None
        return objective.loss

    assert np.abs(scorer.scores(prompts, batch, place.start)).max() < 1e-15
    before = loss()
    scorer.learn(prompts, batch, place.start)
    assert loss() < before


def test_log_ratios_are_to_the_policy_of_now_or_to_the_first_one(place: Place):
    batch = place.world(place.start).batch(8, 64, np.random.default_rng(0))
    prompts, moved = place.prompts(batch), 0.9 * place.start + 0.1 / place.start.shape[1]
    old, ref = (
        Scorer("preference", place.start, 0.1, reference).scores(prompts, batch, moved) for reference in ("old", "ref")
    )
    ratio = np.log(place.start / moved)[prompts, batch.action]
    assert old == pytest.approx(0.05 * ratio)
    assert np.abs(ref).max() < 1e-15


def test_bounds_and_agreement_on_batches_that_no_scorer_has_seen(place: Place):
    result = learned_quality.standing(place, 0, checks=(1, 16), tests=3)
    assert result[learned_quality.EXACT][0] == pytest.approx(1)
    assert 0.9 < result[BEST][0] < 1
    assert set(result) == {*learned_quality.USUAL, BEST, learned_quality.EXACT, *SCORERS}
    for name in SCORERS:
        best = learned_quality.best_rate([result], name, "16")
        assert 0.4 < result[name][best]["16"]["alone"][0] < result[BEST][0]


@pytest.mark.parametrize("name", ["gigpo", "sum_to_outcome"])
def test_a_policy_learns(place: Place, name: str):
    scorer = Scorer(name, place.start, 0.1) if name in SCORERS else None
    ahead = [place.world(place.start).batch(8, 64, np.random.default_rng(0))]
    curve = learned_quality.learning(place, name, 0, scorer, ahead, updates=4)
    assert len(curve) == 5
    assert curve[-1] > 1.2 * curve[0]
