"""A plain training loop instead of verl: the same prompts, sampling, credit, loss and optimizer, many times as fast.

A run on the whole stack takes ten minutes of one core, most of them for communication between processes; comparing
methods, learning rates and seeds takes hundreds of runs. Here one process plays all episodes of a batch in lock-step
and updates the model. Environments, prompts, parsing and credit are the package's own; the loss is verl's ``vanilla``
(clipped, with dual clip, mean over the tokens of a mini-batch), and the critic's is verl's. The study ``branching``
compares it with the stack: it has the same runs on both.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from forks import Forks
from numpy.typing import NDArray
from reinforce import REINFORCE, reinforce
from studies import Variant
from tasks import Task
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_turnkey.advantage import Credit, StepBatch, compute_credit
from verl_turnkey.advantage.group_ops import describe_groups, joint_codes
from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.actions import ControlTokens, parse_action
from verl_turnkey.envs.prompting.prompts import PromptTurn, history_text, load_template
from verl_turnkey.plugins.rollout.strategies import read_strategy
from verl_turnkey.plugins.trainer.partitioning import deal

# isort: split
from critic import Critic
from minimal_loop import CLIP, DUAL_CLIP, MAX_GRAD_NORM, PENALTY, Response, Row, Sampler, log_probs, micro_batches
from play import render
from players import Player, Step, columns, trained

MINI_BATCHES = 2
CLIP_VALUE = 0.5
Floats = NDArray[np.float64]
"""(S,)"""


class Loop:
    """One run: a warm-started model, the tasks of a seed, a method at a learning rate."""

    def __init__(self, task: Task, model: Path, variant: Variant, lr: float, seed: int, n_val: int) -> None:
        self.task, self.variant, self.seed = task, variant, seed
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, weight_decay=0.0)
        self.critic = Critic(model) if variant.critic_lr else None
        if self.critic and variant.critic_lr:
            rates = {"lr": variant.critic_lr, "weight_decay": 0.01}
            self.critic_optimizer = torch.optim.AdamW(self.critic.parameters(), **rates)
        # Its context is as long as the prompt's, as its page says.
        self.params = {**variant.params, **({"history": task.history} if variant.method == "hgpo" else {})}
        read = read_strategy(variant.strategy) if variant.strategy else None
        self.strategy = read[1] if read else None
        self.train_seeds, self.val_seeds = task.seeds(n_val, seed)
        self.order = np.random.default_rng(seed).permutation(len(self.train_seeds))
        self.sampler = Sampler(self.model, self.tokenizer, task.response_tokens)
        self.template, self.control = load_template(task.template), ControlTokens(self.tokenizer)
        self.envs: list[Any] = []
        self.prompts: dict[tuple, tuple[int, ...]] = {}
        torch.manual_seed(seed)  # last, so that every method begins with the same episodes

    def run(self, steps: int, validate_every: int, first: Path | None = None) -> Iterator[tuple[int, dict[str, float]]]:
        """Metrics of steps 1 to ``steps`` with the names of verl's log; of the validation before them as step 0.

        ``first``: file of that validation; None: skip it. It is the same for all methods, and so are its random draws:
        it runs once, unless the file exists.
        """
        if first:
            if not first.is_file():
                new = first.with_suffix(".new")
                torch.save({"metrics": self.validate(), "random": torch.get_rng_state()}, new)
                new.replace(first)  # atomically
            saved = torch.load(first)
            torch.set_rng_state(saved["random"])
            yield 0, saved["metrics"]
        for step in range(1, steps + 1):
            metrics = self.step(step)
            if step % validate_every == 0 or step == steps:
                metrics |= self.validate()
            yield step, metrics

    def step(self, number: int) -> dict[str, float]:
        """Play a batch, credit it, update the model."""
        began = time.perf_counter()
        groups, rollouts = self.variant.tasks, self.variant.rollouts
        first = (number - 1) * groups
        chosen = [self.train_seeds[self.order[(first + i) % len(self.order)]] for i in range(groups)]
        forks = Forks(self.strategy, rollouts) if self.strategy else None
        players = self.play([seed for seed in chosen for _ in range(rollouts)], rollouts, forks)
        steps = [step for _, step in trained(players)]
        values = self.critic.values([step.row for step in steps]) if self.critic else None
        batch = table(players, values, self.strategy)
        reinforced = self.variant.method == REINFORCE
        credit = reinforce(batch) if reinforced else compute_credit(self.variant.method, batch, **self.params)
        metrics = self.update(steps, credit, values, number)
        episodes = players[: groups * rollouts]
        length = float(np.mean([len(player.steps) for player in episodes]))
        measured = [step for player in players if not player.trained for step in player.own]
        return {
            "episode/success_rate": float(np.mean([player.info["success"] for player in episodes])),
            "episode/count": float(len(episodes)),
            "episode/failed": 0.0,
            "episode/length/mean": length,
            "episode/invalid_rate": float(np.mean([not step.valid for step in steps])),
            "branching/trained_steps": len(steps) / len(episodes) - length,
            "branching/measured_steps": len(measured) / len(episodes),
            "branching/measured_tokens": sum(len(step.turn.ids) for step in measured) / len(episodes),
            "rows/trained_tokens": float(sum(len(step.turn.ids) for step in steps)),
            **describe_groups("anchor", *joint_codes(batch.group, batch.anchor)),
            "credit/advantage/share_nonzero": float(np.mean(credit.advantage != 0)),
            "actor/entropy": float(np.mean([step.turn.entropy for step in steps])),
            **metrics,
            "timing_s/step": time.perf_counter() - began,
        }

    def validate(self) -> dict[str, float]:
        """Success in the validation tasks, sampled as in training."""
        won = [player.info["success"] for player in self.play(self.val_seeds, 1)]
        return {f"val-core/{self.task.name}/acc/mean@1": float(np.mean(won))}

    def play(self, seeds: Sequence[int], rollouts: int, forks: Forks | None = None) -> list[Player]:
        """One episode per element of ``seeds``, each ``rollouts`` in a row a group, followed by their branches."""
        while len(self.envs) < len(seeds):
            self.envs.append(make(self.task.env_id, dict(self.task.kwargs)))
        players = [Player.start(self.envs[i], i // rollouts, i, seed) for i, seed in enumerate(seeds)]
        for number in range(self.task.max_turns):
            active = [player for player in players if not player.done]
            if not active:
                break
            if forks:
                active += forks.before(active)
            prompts = [self._prompt(player) for player in active]
            turns = self.sampler(prompts)
            if forks and (more := forks.written(active, turns)):
                active += more
                prompts += [self._prompt(player) for player in more]
                turns += self.sampler(prompts[-len(more) :])
            players += [player for player in active if player.begins == number]
            for player, prompt, turn in zip(active, prompts, turns, strict=True):
                self._act(player, number, prompt, turn)
        return players

    def _act(self, player: Player, number: int, prompt: tuple[int, ...], turn: Response) -> None:
        """One turn, as the agent loop plays it: a response without an action leaves the game unchanged."""
        text = self.tokenizer.decode(turn.ids, skip_special_tokens=True)
        parsed = parse_action(text, "plain", player.info["admissible"])
        before, anchor, reward, terminated, truncated = player.observation, player.info["state_key"], 0.0, False, False
        valid = parsed.valid
        if parsed.action is not None:
            player.observation, reward, terminated, truncated, player.info = player.env.step(parsed.action)
            valid = valid and not player.info["invalid"]
        player.past.append(PromptTurn(before, self.control.plain(history_text(parsed, text, whole=False))))
        last = number + 1 == min(self.task.max_turns, player.turns or self.task.max_turns)
        player.done = terminated or truncated or last
        player.made_by.append(player.branch)
        player.steps.append(
            Step(
                group=player.group,
                rollout=player.rollout,
                number=number,
                prompt=prompt,
                turn=turn,
                anchor=anchor,
                next_anchor=player.info["state_key"],
                text=before,
                action=parsed.action,
                valid=valid,
                reward=float(reward),
                terminated=terminated,
                truncated=truncated or (not terminated and last),
            )
        )

    def _prompt(self, player: Player) -> tuple[int, ...]:
        past = tuple(player.past[max(0, len(player.past) - self.task.history) :])
        key = (player.task, past, player.observation)
        if key not in self.prompts:  # most situations recur
            self.prompts[key] = tuple(render(self.tokenizer, self.template, *key, self.task.line))
            if len(self.prompts[key]) > self.task.prompt_tokens:  # the agent loop would cut it
                raise ValueError(f"a prompt of {self.task.name} has {len(self.prompts[key])} tokens")
        return self.prompts[key]

    def update(
        self, steps: Sequence[Step], credit: Credit, values: dict[Row, list[float]] | None, number: int
    ) -> dict[str, float]:
        """One pass over the batch, in mini-batches as the trainer deals them."""
        before: Counter[int] = Counter()  # steps of each rollout
        keys = []
        for step in steps:
            keys.append(f"{step.group}_{step.rollout}_{before[step.rollout]}")
            before[step.rollout] += 1
        written = np.array([len(step.turn.ids) for step in steps])
        lengths = written + np.array([len(step.prompt) for step in steps])
        sums = np.zeros(3)
        for rows in deal(keys, lengths, written, (MINI_BATCHES,), (self.seed, number)):
            some = [steps[row].row for row in rows]
            if self.critic and values is not None and credit.returns is not None:
                self._update_critic(self.critic, some, credit.returns[rows], values)
            old = {steps[row].row: steps[row].turn.log_probs for row in rows}
            sums += self._update_actor(some, credit.advantage[rows], old)
        kl, clipped, tokens = sums.tolist()
        return {"actor/ppo_kl": kl / tokens, "actor/pg_clipfrac": clipped / tokens}

    def _update_actor(self, steps: Sequence[Row], advantage: Floats, old: Mapping[Row, Sequence[float]]) -> Floats:
        """Sums over tokens: KL, clipped, tokens.

        Steps with the same prompt and response have the same ratios: they are one row, with the sum of their positive
        and that of their negative advantages.
        """
        alike: dict[Row, list[float]] = {}
        for row, value in zip(steps, advantage.tolist(), strict=True):
            sums = alike.setdefault(row, [0.0] * 5)  # of positive and of negative ones, their counts, and that of all
            for place, more in enumerate((max(value, 0.0), max(-value, 0.0), value > 0, value < 0, 1)):
                sums[place] += more
        tokens = sum(len(response) for _, response in steps)
        totals = np.zeros(3)
        self.optimizer.zero_grad()
        unique = list(alike)
        for batch in micro_batches(unique):
            rows = [unique[i] for i in batch]
            now, inside = log_probs(self.model, rows)
            ratio = torch.exp(now - _padded([old[row] for row in rows], now))
            up, down, ups, downs, times = torch.tensor([alike[row] for row in rows]).T[:, :, None]
            ((policy_loss(ratio, up, down) * inside).sum() / tokens).backward()
            with torch.no_grad():
                clipped = ups * (ratio > 1 + CLIP) + downs * (ratio < 1 - CLIP)
                totals += [float((values * inside).sum()) for values in (-times * ratio.log(), clipped, times * inside)]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        return totals

    def _update_critic(
        self, critic: Critic, steps: list[Row], returns: Floats, old: Mapping[Row, Sequence[float]]
    ) -> None:
        tokens = sum(len(response) for _, response in steps)
        self.critic_optimizer.zero_grad()
        for batch in micro_batches(steps):
            rows = [steps[i] for i in batch]
            now, inside = critic(rows)
            before = _padded([old[row] for row in rows], now)
            target = torch.tensor(returns[batch], dtype=torch.float32)[:, None]
            ((value_loss(now, before, target) * inside).sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(critic.parameters(), MAX_GRAD_NORM)
        self.critic_optimizer.step()


def policy_loss(ratio: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """Clipped, with dual clip (verl's ``vanilla``), of tokens with positive advantages that sum to ``up`` and negative
    ones that sum to ``-down``.
    """
    return -up * ratio.clamp(max=1 + CLIP) + down * ratio.clamp(min=1 - CLIP, max=DUAL_CLIP)


def value_loss(now: torch.Tensor, before: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Half the squared distance from the returns, clipped round the values before the update (verl's)."""
    near = before + (now - before).clamp(-CLIP_VALUE, CLIP_VALUE)
    return 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2)


def table(
    players: Sequence[Player], values: Mapping[Row, Sequence[float]] | None = None, strategy: Any = None
) -> StepBatch:
    """The trained steps, as estimators take them."""
    episodes, steps = zip(*trained(players), strict=True)
    further = {} if values is None else {"value": [values[step.row][0] for step in steps]}
    return StepBatch(
        group=[step.group for step in steps],
        trajectory=episodes,
        step=[step.number for step in steps],
        reward=[step.reward for step in steps],
        penalty=[0.0 if step.valid else PENALTY for step in steps],
        anchor=[step.anchor for step in steps],
        action=[step.action for step in steps],
        valid=[step.valid for step in steps],
        terminated=[step.terminated for step in steps],
        truncated=[step.truncated for step in steps],
        success=[bool(players[episode].info["success"]) for episode in episodes],
        tokens=[len(step.turn.ids) for step in steps],
        text=[step.text for step in steps],
        extra={
            "next_anchor": [str(step.next_anchor) for step in steps],
            **(columns(players, strategy) if strategy else {}),
        },
        **further,
    )


def _padded(rows: Sequence[Sequence[float]], like: torch.Tensor) -> torch.Tensor:
    padded = torch.zeros(like.shape)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = torch.tensor(values)
    return padded
