"""Which credit from a teacher's prompt agrees with the true advantage? Against exact values, for texts and methods.

    python benchmarks/teacher_quality.py run      # run the missing measurements, print the tables: 15 minutes
    python benchmarks/teacher_quality.py tables   # print the tables of the saved results

A tiny transformer that learnt to read texts (``hinted_policy.py``) plays two kinds of tasks, whose values are computed
exactly under it. The same weights with a text before the prompt are the teacher. First, nothing is trained: each
method's credit of the steps played is compared with the exact advantages. Then each method trains the same policy, and
its exact success follows from its weights after every update, without validation noise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import hinted_policy as hinted
import numpy as np
import torch
import typer
from exact_values import WORDS, Floats, Ints
from hinted_policy import HABIT, HORIZON, KINDS, MAKERS, Clauses, Reader, Task, taught
from model_credit import EPISODES, USUAL_GROUP, Batch, World, correlation, cosine, with_extra
from page_tables import packages
from scipy.stats import rankdata
from teacher_tables import CONTROLS, CURVES, EXACT, GAP, MODIFIERS, READERS, SKILL_GRPO, WHOLE

from verl_turnkey.advantage import StepBatch, Tokens, compute_credit

RESULTS = Path(__file__).parent / "results" / "teacher_quality.json"
SEEDS, BATCHES, LESSONS = 5, 10, 300
UPDATES, RATE = 16, 2e-3
Text = Callable[[int, int], Clauses]
"""the text for a task and a situation, by their numbers"""

app = typer.Typer(add_completion=False, no_args_is_help=True)


@dataclass(frozen=True)
class Setting:
    """Tasks, a policy that reads texts, and the text that always stands in its own prompt, if any."""

    tasks: Sequence[Task]
    reader: Reader
    own: Text | None = None
    wrong: list[Ints] = field(default_factory=list)
    """for each task and situation an action that is on no shortest path (N,)"""
    exact: bool = True
    """with exact gradients, which take most of the time"""

    @classmethod
    def of(cls, tasks: Sequence[Task], reader: Reader, seed: int) -> Setting:
        draw = np.random.default_rng([seed, 2])
        noise = [draw.random(task.expert.shape) for task in tasks]
        return cls(
            tasks, reader, wrong=[((task.expert == 0) + x).argmax(1) for task, x in zip(tasks, noise, strict=True)]
        )

    @cached_property
    def world(self) -> World:
        """The tasks as games under the policy; equal prompts have one number in all of them."""
        texts = [[self.own and self.own(g, s) for s in range(len(task.key))] for g, task in enumerate(self.tasks)]
        prompts = [list(zip(text, task.prompt, strict=True)) for text, task in zip(texts, self.tasks, strict=True)]
        number = {prompt: place for place, prompt in enumerate(dict.fromkeys(chain(*prompts)))}
        with torch.no_grad():
            policy = self.reader.log_probs([p for _, p in number], [t for t, _ in number]).double().exp().numpy()
        policy /= policy.sum(axis=1, keepdims=True)
        numbers = [np.array([number[prompt] for prompt in situations]) for situations in prompts]
        games = [task.game(policy[of_task], of_task) for task, of_task in zip(self.tasks, numbers, strict=True)]
        return World.of(games, HORIZON, len(number), exact=self.exact)

    @property
    def success(self) -> float:
        """Exact, mean over the tasks."""
        return float(np.mean([values[HORIZON, 0] for values in self.world.values]))

    def texts(self, kind: str, batch: Batch) -> list[Clauses | None]:
        """The text of each step (S,), None without one: as the sources of ``turnkey.teacher.source`` choose it."""
        rows = list(zip(batch.game, batch.situation, batch.action, strict=True))
        if kind in ("episode", "outcome"):
            return self._of_success(kind, batch)
        if kind == "next observation":
            return [hinted.next_observation(self.tasks[g], s, a) for g, s, a in rows]
        return [self.fixed(kind)(g, s) for g, s, _ in rows]

    def fixed(self, kind: str) -> Text:
        """A text by task and state alone."""
        return {
            "right hint": lambda g, s: hinted.hint(int(self.tasks[g].expert[s].argmax())),
            "wrong hint": lambda g, s: hinted.hint(int(self.wrong[g][s])),
            "skill": lambda g, s: hinted.skill(self.tasks[g]),
            "placebo": lambda g, s: hinted.placebo(self.tasks[g]),
        }[kind]

    def trained(self, reader: Reader, own: Text | None = None) -> Setting:
        """Another policy, or one with a text in its own prompt, without exact gradients."""
        return replace(self, reader=reader, own=own, exact=False)

    def _of_success(self, kind: str, batch: Batch) -> list[Clauses | None]:
        """Of the group's first other success; for ``outcome`` of the row's own episode if it succeeded."""
        steps = batch.steps
        text: dict[int, Clauses] = {}
        of_group: dict[int, list[int]] = {}
        for row in steps.first_rows[steps.success[steps.first_rows]]:
            episode = int(steps.trajectory[row])
            rows = np.flatnonzero(steps.trajectory == episode)
            last = rows[-1]
            task = self.tasks[batch.game[last]]
            text[episode] = (
                hinted.transcript(batch.action[rows])
                if kind == "episode"
                else hinted.outcome(task, batch.situation[last], batch.action[last])
            )
            of_group.setdefault(int(steps.group[row]), []).append(episode)
        texts = []
        for group, own in zip(steps.group.tolist(), steps.trajectory.tolist(), strict=True):
            if kind == "outcome" and own in text:
                texts.append(text[own])
            else:
                texts.append(next((text[other] for other in of_group.get(group, ()) if other != own), None))
        return texts

    def teach(self, kind: str, batch: Batch) -> tuple[StepBatch, Tokens]:
        """The steps with the columns of a teacher, and the gaps of their tokens, one token per step."""
        texts = self.texts(kind, batch)
        prompts = [self.tasks[g].prompt[s] for g, s in zip(batch.game, batch.situation, strict=True)]
        place = np.arange(len(texts))
        with torch.no_grad():
            log_prob = self.reader.log_probs(prompts, texts).double().numpy()[place, batch.action]
        games = self.world.games
        own = [games[g].policy[s, a] for g, s, a in zip(batch.game, batch.situation, batch.action, strict=True)]
        has_text = np.array([text is not None for text in texts])
        gap = np.where(has_text, log_prob - np.log(own), np.nan)
        mean = np.where(has_text, log_prob, np.nan)
        steps = with_extra(batch.steps, teacher_gap=gap, teacher_gap_mean=gap, teacher_log_prob_mean=mean)
        return steps, Tokens(place, np.nan_to_num(gap))

    def credit(self, method: str, kind: str | None, batch: Batch) -> Floats:
        """Of an estimator, of the exact advantages, of the gap alone, or of a modifier of ``grpo_steps``."""
        if method == EXACT:
            return batch.exact
        if kind is None:
            return compute_credit(method, batch.steps).advantage
        return modified(method, *self.teach(kind, batch))


def modified(method: str, table: StepBatch, tokens: Tokens) -> Floats:
    """The gap alone, or ``grpo_steps`` under a modifier with the defaults of its recipe, in the first training step."""
    if method == GAP:
        return tokens.gap
    return compute_credit("grpo_steps", table, modify=[method], tokens=tokens).advantage


def credit_by_name(setting: Setting, batch: Batch) -> Iterator[tuple[str, Floats]]:
    """Every method of the first tables with its credit of the batch."""
    for name in ("grpo_steps", "gigpo", EXACT):
        yield name, setting.credit(name, None, batch)
    for kind in KINDS:
        table, tokens = setting.teach(kind, batch)
        for method in (GAP, *(name for name, own in MODIFIERS.items() if kind in (own, *CONTROLS))):
            yield f"{method}, {kind}", modified(method, table, tokens)


class Agreement:
    """How well a method's credit of many batches agrees with the exact advantages."""

    def __init__(self) -> None:
        self._pairs: list[Floats] = []
        self._cosines: list[float] = []

    def add(self, advantage: Floats, exact: Floats, cosine: float) -> None:
        self._pairs.append(np.stack([advantage, exact]))
        self._cosines.append(cosine)

    def result(self) -> dict[str, float]:
        """``sign``: share of all \\|exact advantage\\| at steps whose credit has the same sign."""
        advantage, exact = np.concatenate(self._pairs, axis=1)
        size = np.abs(exact)
        return {
            "pearson": correlation(advantage, exact),
            "spearman": correlation(rankdata(advantage), rankdata(exact)),
            "sign": float(size[advantage * exact > 0].sum() / size.sum()),
            "cosine": float(np.mean(self._cosines)),
        }


def measure(setting: Setting, batches: int, seed: int) -> dict[str, dict[str, float]]:
    """Every method on the same batches; Skill-GRPO on those of the policy with the skill in its prompt."""
    with_skill = replace(setting, own=setting.fixed("skill"))
    agreements: dict[str, Agreement] = {}
    for current in (setting, with_skill):
        draw = np.random.default_rng([seed, 3])
        for _ in range(batches):
            batch = current.world.batch(USUAL_GROUP, EPISODES, draw)
            truth = current.world.truth(batch)
            direction = _directions(current.world, batch)
            own = [(SKILL_GRPO, current.credit("grpo_steps", None, batch))]
            for name, advantage in credit_by_name(setting, batch) if current is setting else own:
                near = cosine(direction(advantage), truth)
                agreements.setdefault(name, Agreement()).add(advantage, batch.exact, near)
    return {name: agreement.result() for name, agreement in agreements.items()}


def _directions(world: World, batch: Batch) -> Callable[[Floats], Floats]:
    """``World.estimate`` of the batch, for many advantages."""
    rows = list(zip(batch.game, batch.situation, strict=True))
    prompt = np.array([world.games[g].prompt[s] for g, s in rows])
    score = np.eye(len(WORDS))[batch.action] - np.stack([world.games[g].policy[s] for g, s in rows])

    def estimate(advantage: Floats) -> Floats:
        total = np.zeros((world.prompts, len(WORDS)))
        np.add.at(total, prompt, advantage[:, None] * score)
        return total

    return estimate


def successes(setting: Setting) -> dict[str, float]:
    """Exact success without a text, and with one in the policy's own prompt."""
    texts = {"none": None} | {kind: setting.fixed(kind) for kind in ("right hint", "skill", "wrong hint", "placebo")}
    return {name: setting.trained(setting.reader, own).success for name, own in texts.items()}


def learn(start: Setting, name: str, seed: int, updates: int) -> dict[str, list[float]]:
    """Exact success before training and after each of ``updates`` updates, each on one batch."""
    method, kind = CURVES[name]
    reader = deepcopy(start.reader)
    own = start.fixed("skill") if name == SKILL_GRPO else None
    optimizer = torch.optim.AdamW(reader.parameters(), lr=RATE, weight_decay=0.0)
    draw = np.random.default_rng([seed, 4])
    curve: dict[str, list[float]] = {"success": [], "without text": []}
    for update in range(updates + 1):
        setting = start.trained(reader, own)
        curve["success"].append(setting.success)
        if own:
            curve["without text"].append(start.trained(reader).success)
        if update == updates:
            break
        batch = setting.world.batch(USUAL_GROUP, EPISODES, draw)
        advantage = torch.tensor(setting.credit(method, kind, batch), dtype=torch.float32)
        rows = list(zip(batch.game, batch.situation, strict=True))
        scores = reader.log_probs([start.tasks[g].prompt[s] for g, s in rows], [own and own(g, s) for g, s in rows])
        loss = -(advantage * scores[torch.arange(len(rows)), torch.tensor(batch.action)]).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
    return {key: values for key, values in curve.items() if values}


class Kept:
    """Results by path, saved after each new one."""

    def __init__(self, path: Path, about: Mapping[str, Any]) -> None:
        self._path = path
        saved = json.loads(path.read_text()) if path.is_file() else {}
        if saved and any(saved["settings"].get(key) != value for key, value in about.items()):
            raise SystemExit(f"{path}: the results are of other settings, {saved['settings']}; move the file away")
        self._all: dict[str, Any] = saved or {"settings": dict(about), "packages": packages()}

    def add(self, path: Sequence[str], make: Callable[[], Any]) -> None:
        """``make()`` under ``path``, unless there is a result."""
        place = self._all
        for key in path[:-1]:
            place = place.setdefault(key, {})
        if path[-1] not in place:
            place[path[-1]] = make()
            self._path.write_text(json.dumps(self._all, indent=1) + "\n")
            print("done:", *path, flush=True)


@app.command()
def run(seeds: int = SEEDS) -> None:
    """Run the missing measurements, save them, and print the tables."""
    torch.set_num_threads(1)
    about = {"batches": BATCHES, "updates": UPDATES, "rate": RATE, "lessons": LESSONS, "habit": HABIT}
    kept = Kept(RESULTS, about)
    settings: dict[tuple[str, str, int], Setting] = {}
    tasks = {name: make(np.random.default_rng(0)) for name, make in MAKERS.items()}

    def setting(task: str, reader: str, seed: int) -> Setting:
        if (task, reader, seed) not in settings:
            policy = taught(tasks[task], HABIT[task], READERS[reader], seed, LESSONS)
            settings[task, reader, seed] = Setting.of(tasks[task], policy, seed)
        return settings[task, reader, seed]

    places = [(task, reader, seed) for reader in READERS for seed in range(seeds) for task in MAKERS]
    for place in places:
        path = (*place[:2], str(place[2]))
        kept.add(("success", *path), lambda: successes(setting(*place)))  # noqa: B023  called at once
        kept.add(("credit", *path), lambda: measure(setting(*place), BATCHES, place[2]))  # noqa: B023
    for task, reader, seed in places:
        for name in CURVES if reader == "attentive" else ():
            path = ("learning", task, reader, name, str(seed))
            kept.add(path, lambda: learn(setting(task, reader, seed), name, seed, UPDATES))  # noqa: B023
    tables()


@app.command()
def tables() -> None:
    """Print all tables of the saved results."""
    saved = json.loads(RESULTS.read_text())
    for make in WHOLE:
        print(make(saved))


if __name__ == "__main__":
    app()
