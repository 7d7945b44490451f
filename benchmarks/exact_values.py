"""Tasks small enough to be solved exactly: every situation of a DoorKey game under a model, its values and gradient.

A situation determines how an episode goes on: the state of the game and what the prompt remembers of the last step.
The level is deterministic, and the policy is the model's, restricted to the valid actions. So values follow by dynamic
programming over the turns left; nothing is sampled or estimated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from known_values import Floats, Ints, sample, states
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "quickstart"))
from play import render

from verl_turnkey.envs.adapters.minigrid import ACTIONS
from verl_turnkey.envs.prompting.prompts import PromptTurn, load_template

WON = -1
WORDS = tuple(ACTIONS)
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Game:
    """One task as a table over N situations and A actions; situation 0 is the start.

    ``key`` and ``text`` (N,): the state and what the prompt says of it. ``prompt`` (N,): the number of the whole
    prompt, the same in all games. ``policy`` (N, A): probabilities. ``following`` (N, A): the situation that follows,
    ``WON`` where the task is solved.
    """

    key: list[str]
    text: list[str]
    prompt: Ints
    policy: Floats
    following: Ints

    def values(self, horizon: int) -> Floats:
        """Probability of success with 0, 1, ... ``horizon`` turns left: (horizon + 1, N)."""
        return self._expected(horizon, self.following == WON)

    def turns(self, horizon: int) -> Floats:
        """Expected turns until the end with 0, 1, ... ``horizon`` turns left: (horizon + 1, N)."""
        return self._expected(horizon, np.ones_like(self.policy))

    def action_values(self, values: Floats) -> Floats:
        """Probability of success after each action, with 1, 2, ... turns left: (horizon, N, A)."""
        ahead = np.concatenate([values[:-1], np.ones((len(values) - 1, 1))], axis=1)  # column WON is the last one
        return ahead[:, self.following]

    def visits(self, horizon: int) -> Floats:
        """Probability of being in each situation at turn 0, 1, ...: (horizon, N)."""
        visits = np.zeros((horizon, len(self.key)))
        visits[0, 0] = 1.0
        for turn in range(1, horizon):
            flow = visits[turn - 1][:, None] * self.policy
            np.add.at(visits[turn], self.following[self.following != WON], flow[self.following != WON])
        return visits

    def gradient(self, horizon: int, prompts: int) -> Floats:
        """Of the success rate with respect to one logit for each of ``prompts`` prompts and each action."""
        values = self.values(horizon)
        advantage = (self.action_values(values) - values[1:, :, None])[::-1]  # by turn played, not by turns left
        flow = (self.visits(horizon)[:, :, None] * self.policy * advantage).sum(axis=0)
        gradient = np.zeros((prompts, len(WORDS)))
        np.add.at(gradient, self.prompt, flow)
        return gradient

    def _expected(self, horizon: int, reward: NDArray) -> Floats:
        expected = np.zeros((horizon + 1, len(self.key) + 1))  # the last column is WON, with value 0
        for left in range(1, horizon + 1):
            expected[left, :-1] = (self.policy * (reward + expected[left - 1][self.following])).sum(axis=1)
        return expected[:, :-1]


class Policy:
    """A model's probabilities of the valid actions, one row per prompt, computed on first use."""

    def __init__(self, model: Path, temperature: float = 1.0) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._model = AutoModelForCausalLM.from_pretrained(model).eval()
        self._answers = [[*self._tokenizer(word).input_ids, self._tokenizer.eos_token_id] for word in WORDS]
        self._numbers: dict[Prompt, int] = {}
        self._rows: list[Floats] = []
        self._temperature = temperature

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, task: str, before: tuple[str, str] | None, observation: str) -> Prompt:
        history = [PromptTurn(*before)] if before else []
        return tuple(render(self._tokenizer, self._template, task, history, observation))

    def numbers(self, prompts: Sequence[Prompt]) -> Ints:
        """The number of each prompt; computes the probabilities of new ones."""
        new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._numbers]
        for first in range(0, len(new), 128):
            chunk = new[first : first + 128]
            self._rows.extend(self._probabilities(chunk))
        self._numbers |= {prompt: number for number, prompt in enumerate(new, len(self._numbers))}
        return np.array([self._numbers[prompt] for prompt in prompts])

    def rows(self, numbers: Ints) -> Floats:
        return np.stack(self._rows)[numbers]

    @cached_property
    def _template(self) -> str:
        return load_template("minigrid")

    @torch.no_grad()
    def _probabilities(self, prompts: Sequence[Prompt]) -> list[Floats]:
        pairs = [(prompt, answer) for prompt in prompts for answer in self._answers]
        width = max(len(prompt) + len(answer) for prompt, answer in pairs)
        ids = torch.zeros((len(pairs), width), dtype=torch.long)  # padded on the right, which no earlier token sees
        for row, (prompt, answer) in enumerate(pairs):
            ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        logits = self._model(input_ids=ids).logits.double() / self._temperature
        scores = torch.log_softmax(logits, dim=-1)
        sums = [
            sum(scores[row, len(prompt) - 1 + place, token].item() for place, token in enumerate(answer))
            for row, (prompt, answer) in enumerate(pairs)
        ]
        chosen = torch.softmax(torch.tensor(sums, dtype=torch.float64).reshape(len(prompts), -1), dim=-1)
        return list(chosen.numpy())


def unroll(level: str, seed: int, policy: Policy) -> Game:
    """Every situation that can be reached in the game of ``seed``."""
    table = states(level, seed)
    start = (table.start, None)
    situations: dict[tuple[str, tuple[str, str] | None], int] = {start: 0}
    queue, following = [start], []
    for state, _ in queue:  # grows while it is read
        row = []
        for word, there in zip(WORDS, table.moves[state], strict=True):
            if there is None:
                row.append(WON)
                continue
            situation = (there, (table.text[state], word))
            if situation not in situations:
                situations[situation] = len(queue)
                queue.append(situation)
            row.append(situations[situation])
        following.append(row)
    numbers = policy.numbers([policy.prompt(table.task, before, table.text[state]) for state, before in queue])
    keys = [state for state, _ in queue]
    return Game(keys, [table.text[key] for key in keys], numbers, policy.rows(numbers), np.array(following))


def choose(game: Game, situation: int, draw: np.random.Generator) -> int:
    """Sample an action from the policy."""
    return sample(game.policy[situation], draw)


def play(
    games: Sequence[Game], which: Ints, horizon: int, draw: np.random.Generator
) -> tuple[NDArray[np.bool_], Ints, Ints]:
    """One episode in ``games[which[e]]`` for each e: whether it won (E,), its situations and actions (E, horizon).

    Both are -1 in turns after the end.
    """
    situations, actions = np.full((2, len(which), horizon), -1)
    won = np.zeros(len(which), dtype=bool)
    now = np.zeros(len(which), dtype=np.int64)
    for turn in range(horizon):
        for episode in np.flatnonzero(~won):
            game, here = games[which[episode]], now[episode]
            choice = choose(game, here, draw)
            situations[episode, turn], actions[episode, turn] = here, choice
            now[episode] = game.following[here, choice]
            won[episode] = now[episode] == WON
    return won, situations, actions
