"""Does a learned step score pay? Its scores against exact advantages, and what a policy learns from them.

    python benchmarks/learned_quality.py run      # measure, save the results, write the tables: 4 minutes
    python benchmarks/learned_quality.py pages    # write the tables of docs/learned-signals.md from the saved results

The tasks are those of ``teacher_quality.py``, the policy is a softmax table over their prompts, so the true advantage
of each step is known. The scorer is a table of the same shape, in float64, trained by the objectives of
``verl_turnkey.losses.objectives`` with one step of Adam per batch, as ``turnkey.prm`` trains its model. First the
policy is fixed, then it learns together with the scorer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from credit_quality import EPISODES, USUAL_GROUP, Batch, World, correlation, cosine, with_extra
from exact_values import WORDS, Floats, Ints
from hinted_policy import HABIT, HORIZON, MAKERS, Task
from page_tables import cell, packages, write_tables

from verl_turnkey.advantage import compute_credit
from verl_turnkey.losses.objectives import ObjectiveParams, gradient
from verl_turnkey.plugins.cli.tables import excerpt, table

RESULTS = Path(__file__).parent / "results" / "learned_quality.json"
PAGE = Path(__file__).parents[1] / "docs" / "learned-signals.md"
SEEDS, TESTS, UPDATES, RATE = 5, 8, 24, 0.1
CHECKS = (1, 16, 64, 256)
"""numbers of batches after which the scorer of a fixed policy is compared"""
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
"""learning rates of the scorer; each number of the tables is of the best, which favours the learned scores"""
SCORERS = {
    "preference": ("implicit", "preference"),
    "outcome_ce": ("implicit", "outcome_ce"),
    "sum_to_outcome": ("head", "sum_to_outcome"),
}
AHEAD = (0, 64)
"""batches of the first policy from which the scorer learns before the policy does"""
BEST, EXACT = "mean exact advantage of a prompt and action", "exact advantages"
USUAL = ("grpo_steps", "gigpo")

app = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Place:
    """Tasks whose policy is a table over P prompts; ``numbers``: the prompt of each situation of each task."""

    tasks: Sequence[Task]
    numbers: list[Ints]
    start: Floats
    """probabilities of the actions at the beginning, (P, A)"""

    @classmethod
    def of(cls, tasks: Sequence[Task], habit: float) -> Place:
        """The policy plays the expert's action with probability ``habit``, and any otherwise."""
        number = {p: n for n, p in enumerate(dict.fromkeys(chain.from_iterable(task.prompt for task in tasks)))}
        numbers = [np.array([number[prompt] for prompt in task.prompt]) for task in tasks]
        every = np.concatenate(numbers)
        expert = np.zeros((len(number), len(WORDS)))
        np.add.at(expert, every, np.concatenate([task.expert for task in tasks]))
        expert /= np.bincount(every)[:, None]
        return cls(tasks, numbers, habit * expert + (1 - habit) / len(WORDS))

    def world(self, policy: Floats, *, exact: bool = False) -> World:
        """The tasks under ``policy`` (P, A), by default without exact gradients."""
        games = [task.game(policy[numbers], numbers) for task, numbers in zip(self.tasks, self.numbers, strict=True)]
        return World.of(games, HORIZON, len(policy), exact=exact)

    def prompts(self, batch: Batch) -> Ints:
        """The prompt of each step (S,)."""
        return np.array([self.numbers[g][s] for g, s in zip(batch.game, batch.situation, strict=True)])


class Scorer:
    """A table over prompts and actions: log-ratios to the policy (``implicit``), or the numbers themselves (``head``).

    Args:
        start: (P, A) the policy that an implicit scorer begins as.
        reference: what log-ratios are to, as ``turnkey.prm.reference``: the policy of now, ``old``, or ``start``,
            ``ref``.
    """

    def __init__(self, name: str, start: Floats, rate: float, reference: str = "old") -> None:
        self.kind, self.objective = SCORERS[name]
        self._reference = reference
        self.params = ObjectiveParams()
        self._start = torch.tensor(np.log(start))
        self._table = torch.zeros_like(self._start, requires_grad=True)
        self._optimizer = torch.optim.Adam([self._table], lr=rate)

    def _q(self, prompts: Ints, batch: Batch, policy: Floats) -> torch.Tensor:
        if self.kind == "head":
            return self._table[prompts, batch.action]
        log_probs = torch.log_softmax(self._start + self._table, dim=-1)
        reference = torch.tensor(np.log(policy)) if self._reference == "old" else self._start
        return (log_probs - reference)[prompts, batch.action]

    def learn(self, prompts: Ints, batch: Batch, policy: Floats) -> None:
        """One step on one batch, if the objective is defined on it."""
        q = self._q(prompts, batch, policy)
        objective = gradient(self.objective, q.detach(), batch.steps, self.params)
        if objective is not None:
            self._optimizer.zero_grad()
            (objective.coefficients * q).sum().backward()
            self._optimizer.step()

    @torch.no_grad()
    def scores(self, prompts: Ints, batch: Batch, policy: Floats) -> Floats:
        """Of each step (S,), as ``extra.turn_score`` has them."""
        q = self._q(prompts, batch, policy).numpy()
        return q if self.kind == "head" else self.params.beta * q


def step_credit(batch: Batch, scores: Floats) -> Floats:
    """Advantages of ``step_episode``, as ``+turnkey=istar`` has them, on ``scores`` (S,)."""
    return compute_credit("step_episode", with_extra(batch.steps, turn_score=scores), estimator="grpo").advantage


def agreement(world: World, batches: Sequence[Batch], credits: Sequence[Floats]) -> tuple[float, float]:
    """Correlation with the exact advantages, and the mean cosine of a batch's gradient with the exact one."""
    advantage, exact = np.concatenate(credits), np.concatenate([batch.exact for batch in batches])
    pairs = zip(batches, credits, strict=True)
    cosines = [cosine(world.estimate(batch, credit), world.truth(batch)) for batch, credit in pairs]
    return correlation(advantage, exact), float(np.mean(cosines))


def standing(place: Place, seed: int, checks: Sequence[int] = CHECKS, tests: int = TESTS) -> dict[str, Any]:
    """Agreement of the usual credit and of each scorer, on batches that no scorer was trained on.

    For a scorer by rate, then by check: of its scores alone, and of ``step_episode`` on them.
    """
    policy, draw = place.start, np.random.default_rng([seed, 1])
    world = place.world(policy, exact=True)
    test = [world.batch(USUAL_GROUP, EPISODES, draw) for _ in range(tests)]
    train = [world.batch(USUAL_GROUP, EPISODES, draw) for _ in range(checks[-1])]
    test_prompts, train_prompts = [[place.prompts(batch) for batch in part] for part in (test, train)]

    def rate(credits: Sequence[Floats]) -> tuple[float, float]:
        return agreement(world, test, credits)

    result: dict[str, Any] = {name: rate([compute_credit(name, b.steps).advantage for b in test]) for name in USUAL}
    total, count = np.zeros(policy.shape), np.zeros(policy.shape)
    for prompts, batch in zip(train_prompts, train, strict=True):
        np.add.at(total, (prompts, batch.action), batch.exact)
        np.add.at(count, (prompts, batch.action), 1)
    mean = total / np.maximum(count, 1)
    result[BEST] = rate([mean[prompts, batch.action] for prompts, batch in zip(test_prompts, test, strict=True)])
    result[EXACT] = rate([batch.exact for batch in test])
    for name in SCORERS:
        result[name] = {str(speed): {} for speed in RATES}
        for speed, at in result[name].items():
            scorer = Scorer(name, policy, float(speed))
            for update, (prompts, batch) in enumerate(zip(train_prompts, train, strict=True), 1):
                scorer.learn(prompts, batch, policy)
                if update in checks:
                    scores = [scorer.scores(p, b, policy) for p, b in zip(test_prompts, test, strict=True)]
                    whole = [step_credit(b, values) for b, values in zip(test, scores, strict=True)]
                    at[str(update)] = {"alone": rate(scores), "credit": rate(whole)}
    return result


def learning(
    place: Place,
    name: str,
    seed: int,
    scorer: Scorer | None = None,
    ahead: Sequence[Batch] = (),
    updates: int = UPDATES,
) -> list[float]:
    """Exact success before training and after each of ``updates`` updates of the policy, each on one batch.

    ``name``: a method, or the exact advantages; ``scorer``: use ``step_episode`` on its scores instead; ``ahead``:
    batches of the first policy from which the scorer learns before.
    """
    logits = torch.tensor(np.log(place.start), requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=RATE)
    for batch in ahead:
        if scorer:
            scorer.learn(place.prompts(batch), batch, place.start)
    draw = np.random.default_rng([seed, 2])
    curve = []
    for update in range(updates + 1):
        policy = torch.softmax(logits.detach(), dim=-1).numpy()
        world = place.world(policy)
        curve.append(float(np.mean([values[HORIZON, 0] for values in world.values])))
        if update == updates:
            break
        batch = world.batch(USUAL_GROUP, EPISODES, draw)
        prompts = place.prompts(batch)
        if scorer:  # score after the update, which iStar does
            scorer.learn(prompts, batch, policy)
            advantage = step_credit(batch, scorer.scores(prompts, batch, policy))
        else:
            advantage = batch.exact if name == EXACT else compute_credit(name, batch.steps).advantage
        chosen = torch.log_softmax(logits, dim=-1)[prompts, batch.action]
        optimizer.zero_grad()
        (-(torch.tensor(advantage) * chosen).mean()).backward()
        optimizer.step()
    return curve


@app.command()
def run(seeds: int = SEEDS) -> None:
    """Measure everything, save the results, write the tables."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {"seeds": seeds, "packages": packages(), "standing": {}, "learning": {}}
    for task, make in MAKERS.items():
        place = Place.of(make(np.random.default_rng(0)), HABIT[task])
        results["standing"][task] = [_rounded(standing(place, seed)) for seed in range(seeds)]
        print("done:", task, "fixed policy", flush=True)
        curves = results["learning"][task] = {}
        for name in (*USUAL, EXACT):
            curves[name] = {"runs": [_rounded(learning(place, name, seed)) for seed in range(seeds)]}
        for name, (kind, _) in SCORERS.items():
            for reference, ahead in product(("old", "ref") if kind == "implicit" else ("old",), AHEAD):
                label = f"{name}{', reference ref' * (reference == 'ref')}{f', {ahead} ahead' * (ahead > 0)}"
                curves[label] = _best_runs(place, name, reference, ahead, seeds)
        print("done:", task, "learning policy", flush=True)
    RESULTS.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    pages()


def _best_runs(place: Place, name: str, reference: str, ahead: int, seeds: int) -> dict[str, Any]:
    """The runs of the scorer's learning rate with the highest success, mean over all updates."""
    by_rate: dict[float, list[list[float]]] = {rate: [] for rate in RATES}
    for seed in range(seeds):
        world, draw = place.world(place.start), np.random.default_rng([seed, 3])
        before = [world.batch(USUAL_GROUP, EPISODES, draw) for _ in range(ahead)]
        for rate, runs in by_rate.items():
            runs.append(learning(place, name, seed, Scorer(name, place.start, rate, reference), before))
    best = max(by_rate, key=lambda rate: np.mean([run[1:] for run in by_rate[rate]]))
    return {"rate": best, "runs": _rounded(by_rate[best])}


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else [_rounded(item) for item in value]


def best_rate(runs: Sequence[Mapping[str, Any]], name: str, check: str, what: str = "alone") -> str:
    """The learning rate with the highest mean correlation at ``check``."""
    return max(map(str, RATES), key=lambda speed: np.mean([measured[name][speed][check][what][0] for measured in runs]))


def by_updates(results: Mapping[str, Any]) -> str:
    """Markdown: correlation with the exact advantages by number of the scorer's updates, and the credit's cosine."""
    rows = []
    for task, runs in results["standing"].items():
        for name in (*USUAL, BEST, EXACT):
            agreed, near = (cell([measured[name][i] for measured in runs]) for i in (0, 1))
            rows.append([task, f"`{name}`" if name in USUAL else name, *[agreed] * len(CHECKS), near])
        for name in SCORERS:
            for what, label in (("alone", f"score of `{name}`"), ("credit", f"`step_episode` on `{name}`")):
                speeds = {check: best_rate(runs, name, check, what) for check in map(str, CHECKS)}
                cells = [[measured[name][speed][check][what] for measured in runs] for check, speed in speeds.items()]
                correlations = [cell([pair[0] for pair in pairs]) for pairs in cells]
                rows.append([task, label, *correlations, cell([pair[1] for pair in cells[-1]])])
    heads = [f"{n} update{'s' * (n > 1)}" for n in CHECKS]
    return table(["task", "credit", *heads, f"cosine, {CHECKS[-1]}"], rows)


def by_curve(results: Mapping[str, Any]) -> str:
    """Markdown: exact success of a policy that learns, over seeds, and how much more than with ``gigpo``."""
    rows = []
    for task, curves in results["learning"].items():
        usual = [np.mean(run[1:]) for run in curves["gigpo"]["runs"]]
        for name, curve in curves.items():
            scorer, *ahead = name.split(",")
            label = f"`step_episode` on `{scorer}`" if scorer in SCORERS else f"`{name}`" if name in USUAL else name
            runs = curve["runs"]
            more = [float(np.mean(run[1:]) - other) for run, other in zip(runs, usual, strict=True)]
            cells = [f"{curve['rate']:g}" if "rate" in curve else "-"]
            cells += [cell([run[n] for run in runs]) for n in (UPDATES // 4, UPDATES // 2, UPDATES)]
            rows.append([task, ",".join([label, *ahead]), *cells, "" if name == "gigpo" else cell(more, sign="+")])
    heads = [f"after {n}" for n in (UPDATES // 4, UPDATES // 2, UPDATES)]
    return table(["task", "trained with", "scorer's rate", *heads, "mean over that of `gigpo`"], rows)


CONTENTS = {
    "scores by updates": lambda results: excerpt(
        by_updates(results),
        ("task", "credit", "1 update", "16 updates", "256 updates"),
        lambda row: row[1] == "`gigpo`" or row[1].startswith("score of"),
    ),
    "success by score": lambda results: excerpt(
        by_curve(results),
        ("task", "trained with", "mean over that of `gigpo`"),
        lambda row: row[1] != "`gigpo`" and "reference ref" not in row[1],
    ),
}
"""what the page shows of the whole tables"""


@app.command()
def pages() -> None:
    """Write the tables of the page from the saved results, and print all tables."""
    write_tables(PAGE, RESULTS, (by_updates, by_curve), CONTENTS)


if __name__ == "__main__":
    app()
