"""A tiny transformer that learnt to read texts in its prompt, and two kinds of tasks with exact advantages.

``doorkey``: games of MiniGrid's DoorKey-5x5, of which a prompt shows the partial view. ``lock``: four actions in the
right order open a lock, every other action leads back to its start. Both are tables, as in ``exact_values.py``, so the
true advantage of each action is known under any policy.

A prompt is a sequence of clauses, a turn is one token: an action. A text stands before the prompt. Soft targets teach
the model what to do with each kind of text: ``trust`` times what the text says, plus ``1 - trust`` times its habit, the
policy that it learns without a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import torch
from exact_values import WON, WORDS, Floats, Game, Ints, play
from known_values import different, states
from torch import Tensor, nn

LEVEL, SEEDS = "MiniGrid-DoorKey-5x5-v0", range(50_000, 50_080)
TASKS, STAGES, HORIZON = 8, 4, 20
HABIT = {"doorkey": 0.45, "lock": 0.36}
"""share of the expert in the targets without a text; the rest is uniform"""
COLORS = re.compile(r"\b(red|green|blue|purple|yellow|grey) ")
TEXT_SLOTS, SHORT = HORIZON + 2, 11
"""most words of a text; texts of up to ``SHORT`` words are batched apart from longer ones, to save padding"""
Clauses = tuple[str, ...]
Row = tuple[Clauses | None, Clauses]
KINDS = ("right hint", "episode", "skill", "outcome", "next observation", "wrong hint", "placebo")


@dataclass(frozen=True)
class Task:
    """N situations and A actions; situation 0 is the start.

    ``key`` (N,): the state. ``prompt`` (N,): what the policy reads. ``following`` (N, A): the situation that follows,
    ``WON`` where the task is solved. ``skill``: a text of the task.
    """

    key: list[str]
    prompt: list[Clauses]
    following: Ints
    skill: Clauses

    @cached_property
    def expert(self) -> Floats:
        """Uniform over the first actions of shortest paths: (N, A)."""
        distance = np.full(len(self.key) + 1, np.inf)
        distance[WON] = 0
        while True:
            ahead = distance[self.following]
            nearer = np.append(1 + ahead.min(axis=1), 0)
            if (nearer == distance).all():
                break
            distance = nearer
        best = ahead == ahead.min(axis=1, keepdims=True)
        return best / best.sum(axis=1, keepdims=True)

    def game(self, policy: Floats, prompt: Ints | None = None) -> Game:
        """The task under a policy (N, A); ``prompt`` (N,): numbers of the prompts, by default of the situations."""
        numbers = np.arange(len(self.key)) if prompt is None else prompt
        return Game(self.key, [" ".join(clauses) for clauses in self.prompt], numbers, policy, self.following)


def doorkeys(draw: np.random.Generator) -> list[Task]:
    """``TASKS`` games of the level with different starts."""
    starts = draw.choice(different(LEVEL, SEEDS), TASKS, replace=False)
    skill = ("pick up the key", "toggle the door", "go to the goal")
    tasks = []
    for start in starts:
        table = states(LEVEL, int(start))
        order = [table.start, *(key for key in table.moves if key != table.start)]
        number = {key: place for place, key in enumerate(order)} | {None: WON}
        following = np.array([[number[there] for there in table.moves[key]] for key in order])
        tasks.append(Task(order, [clauses(table.text[key]) for key in order], following, skill))
    return tasks


def locks(draw: np.random.Generator) -> list[Task]:
    """``TASKS`` locks; the skill of a lock is its combination."""
    tasks = []
    for number in range(TASKS):
        combination = draw.integers(0, len(WORDS), STAGES)
        following = np.zeros((STAGES, len(WORDS)), dtype=np.int64)
        following[np.arange(STAGES), combination] = [*range(1, STAGES), WON]
        keys = [f"{number}-{stage}" for stage in range(STAGES)]
        prompts = [(f"lock {number}", f"stage {stage}") for stage in range(STAGES)]
        tasks.append(Task(keys, prompts, following, tuple(WORDS[action] for action in combination)))
    return tasks


MAKERS = {"doorkey": doorkeys, "lock": locks}


def clauses(observation: str) -> Clauses:
    """An observation of MiniGrid, cut at its punctuation, without colors, which do not matter in this level."""
    parts = re.split(r"[.;,:] ?|You see ", COLORS.sub("", observation))
    return tuple(part.strip() for part in parts if part.strip() not in ("", "Free steps"))


class Reader(nn.Module):
    """A policy over the actions, given a prompt and perhaps a text before it."""

    def __init__(self, tasks: Sequence[Task], width: int = 32) -> None:
        super().__init__()
        vocabulary = words_of(tasks)
        self._prompt_slots = max(len(clauses) for task in tasks for clauses in task.prompt)
        self._numbers = {word: number for number, word in enumerate(vocabulary, 1)}  # 0 is padding
        self._cache: dict[tuple[Clauses, int], list[int]] = {}
        self.words = nn.Embedding(len(vocabulary) + 1, width)
        self.places = nn.Embedding(TEXT_SLOTS + self._prompt_slots, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, len(WORDS))

    def log_probs(self, prompts: Sequence[Clauses], texts: Sequence[Clauses | None]) -> Tensor:
        """Log-probabilities of the actions (n, A); equal rows are computed once."""
        rows = list(zip(texts, prompts, strict=True))
        parts: list[list[Row]] = [[], [], []]
        for row in dict.fromkeys(rows):
            parts[0 if row[0] is None else 1 if len(row[0]) <= SHORT else 2].append(row)
        number = {row: place for place, row in enumerate(chain(*parts))}
        return torch.cat([self._scores(part) for part in parts if part])[[number[row] for row in rows]]

    def _scores(self, rows: Sequence[Row]) -> Tensor:
        codes = [self._codes(text or (), TEXT_SLOTS) + self._codes(prompt, self._prompt_slots) for text, prompt in rows]
        ids = torch.tensor(codes)
        first = int((ids != 0).any(dim=0).nonzero()[0])  # columns before it are padding in all rows
        hidden = self.words(ids[:, first:]) + self.places.weight[first:]
        hidden = self.body(hidden, src_key_padding_mask=ids[:, first:] == 0)
        return torch.log_softmax(self.head(hidden[:, -1]), dim=-1)

    def _codes(self, words: Clauses, slots: int) -> list[int]:
        """Numbers of the words at the end of ``slots`` places; the beginning of a longer text is cut."""
        if (words, slots) not in self._cache:
            numbers = [self._numbers[word] for word in words][-slots:]
            self._cache[words, slots] = [0] * (slots - len(numbers)) + numbers
        return self._cache[words, slots]


def words_of(tasks: Sequence[Task]) -> list[str]:
    words = {*KINDS, *WORDS, "neutral"}
    return sorted(words.union(*(clauses for task in tasks for clauses in (*task.prompt, task.skill))))


def hint(action: int) -> Clauses:
    return ("right hint", WORDS[action])


def transcript(actions: Sequence[int]) -> Clauses:
    """What a successful episode wrote."""
    return ("episode", *(WORDS[action] for action in actions))


def outcome(task: Task, situation: int, action: int) -> Clauses:
    """The last observation and the last action of a successful episode."""
    return ("outcome", *task.prompt[situation], WORDS[action])


def next_observation(task: Task, situation: int, action: int) -> Clauses | None:
    """What the environment answers; None where the task is solved."""
    following = task.following[situation, action]
    return None if following == WON else ("next observation", *task.prompt[following])


def skill(task: Task) -> Clauses:
    return ("skill", *task.skill)


def placebo(task: Task) -> Clauses:
    """As long as the skill."""
    return ("placebo", *["neutral"] * len(task.skill))


class Lessons:
    """Texts, prompts and soft targets from which a policy learns its habit, and what to do with texts."""

    def __init__(self, tasks: Sequence[Task], habit: float, trust: float, draw: np.random.Generator) -> None:
        self.tasks, self._trust, self._draw = tasks, trust, draw
        self.habits = [habit * task.expert + (1 - habit) / len(WORDS) for task in tasks]
        games = [task.game(policy) for task, policy in zip(tasks, self.habits, strict=True)]
        self._places = [game.visits(HORIZON).mean(axis=0) for game in games]
        self._hindsight = [self._posterior(game) for game in games]
        self._episodes = [self._successes(game) for game in games]

    @staticmethod
    def _posterior(game: Game) -> Floats:
        """Of the actions, given that the episode succeeds from here in half of the turns: (N, A)."""
        values = game.values(HORIZON // 2)
        joint = game.policy * game.action_values(values)[-1] + 1e-9 * game.policy
        return joint / joint.sum(axis=1, keepdims=True)

    def _successes(self, game: Game) -> list[tuple[Ints, int, int]]:
        """Actions, last situation and last action of some successful episodes."""
        won, situations, actions = play([game], np.zeros(150, dtype=int), HORIZON, self._draw)
        lengths = (situations >= 0).sum(axis=1)
        return [(actions[e, :n], situations[e, n - 1], actions[e, n - 1]) for e, n in enumerate(lengths) if won[e]]

    def draw(self, kind: str | None) -> tuple[Clauses | None, Clauses, Floats]:
        """One text of a kind, None for no text, a prompt, and the target (A,)."""
        draw = self._draw
        number = int(draw.integers(len(self.tasks)))
        task, habit = self.tasks[number], self.habits[number]
        here = int(draw.choice(len(task.key), p=self._places[number] / self._places[number].sum()))
        text, reading = None, habit[here]
        actions, situation, last = self._episodes[number][draw.integers(len(self._episodes[number]))]
        if kind in ("right hint", "wrong hint"):  # the policy cannot tell one from the other
            action = int(draw.integers(len(WORDS)))
            text, reading = hint(action), np.eye(len(WORDS))[action]
        elif kind == "episode":
            text, reading = transcript(actions), task.expert[here]
        elif kind == "skill":
            text, reading = skill(task), task.expert[here]
        elif kind == "outcome":
            text, reading = outcome(task, situation, last), self._hindsight[number][here]
        elif kind == "next observation":
            action = int(draw.choice(len(WORDS), p=habit[here]))
            text = next_observation(task, here, action)
            same = np.array([next_observation(task, here, other) == text for other in range(len(WORDS))])
            reading = habit[here] * same / (habit[here] * same).sum() if text else reading
        elif kind == "placebo":
            text = placebo(task)
        return text, task.prompt[here], self._trust * reading + (1 - self._trust) * habit[here]


def taught(tasks: Sequence[Task], habit: float, trust: float, seed: int, steps: int, rows: int = 100) -> Reader:
    """A policy trained for ``steps`` updates on ``rows`` lessons each, a third of them without a text."""
    torch.manual_seed(seed)
    lessons = Lessons(tasks, habit, trust, np.random.default_rng([seed, 1]))
    reader = Reader(tasks)
    optimizer = torch.optim.AdamW(reader.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps, pct_start=0.1)
    kinds = [*KINDS, None, None, None]
    for _ in range(steps):
        texts, prompts, targets = zip(*(lessons.draw(kinds[row % len(kinds)]) for row in range(rows)), strict=True)
        scores = reader.log_probs(prompts, texts)
        loss = -(torch.tensor(np.array(targets), dtype=scores.dtype) * scores).sum(dim=-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return reader.eval()
