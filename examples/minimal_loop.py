"""Turn-level RL for a language model in one file: play, credit, update. Without verl, vLLM and Ray.

    python examples/quickstart/warm_start.py --out runs/tiny
    python examples/minimal_loop.py --model runs/tiny --method gigpo

The defaults suit that model, of 0.14M parameters, on MiniGrid's DoorKey. There is no sharding and no mixed precision:
SmolLM2-135M does not fit into 24 GB with these sizes. Environments, prompts, parsing and credit are the package's own;
sampling, log-probabilities and the clipped loss are written out here, in padded batches on the CPU. This is where to
try an estimator or an environment within seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.actions import INSTRUCTIONS, parse_action
from verl_turnkey.envs.prompting.prompts import PromptTurn, build_messages, load_template
from verl_turnkey.plugins.cpu.patches import by_length

CLIP, DUAL_CLIP, MAX_GRAD_NORM = 0.2, 3.0, 1.0
PENALTY = 0.1
"""subtracted from the advantage of a turn without a valid action, as in the recipes"""
DOOR_KEY = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}
MICRO_BATCH_TOKENS = 16384
"""of one forward pass, padding included"""


class Row(NamedTuple):
    """What one turn trains on: token ids of its prompt and of its response."""

    prompt: tuple[int, ...]
    response: tuple[int, ...]


class Response(NamedTuple):
    """Sampled tokens, their log-probabilities, and the mean entropy of the distributions they come from."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    entropy: float


@dataclass(frozen=True)
class Turn:
    """One step of an episode."""

    prompt: tuple[int, ...]
    response: Response
    anchor: str
    """the environment's ``state_key`` before the action: turns of a group with equal anchors are compared"""
    action: str | None
    valid: bool
    reward: float
    terminated: bool
    truncated: bool


@dataclass
class Episode:
    """An environment and what has happened in it; ``group`` numbers the task that several episodes play."""

    env: Any
    group: int
    task: str
    observation: str
    info: dict[str, Any]
    turns: list[Turn] = field(default_factory=list)
    past: list[PromptTurn] = field(default_factory=list)


# --- play -------------------------------------------------------------------------------------------------------------


class Sampler:
    """Samples at temperature 1 to the end of the turn, ``max_tokens`` at most; draws follow torch's global seed."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> None:
        self.model, self.max_tokens = model, max_tokens
        self.eos, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: Sequence[tuple[int, ...]]) -> list[Response]:
        index = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}  # equal prompts pass the model once
        width = max(map(len, index))
        ids = torch.full((len(index), width), self.pad)
        mask = torch.zeros_like(ids)
        for prompt, row in index.items():
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = self.model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        rows = torch.tensor([index[prompt] for prompt in prompts])
        cache, hidden = output.past_key_values, output.last_hidden_state[rows, -1]
        cache.reorder_cache(rows)
        mask, position = mask[rows], positions[rows, -1]
        active = torch.arange(len(prompts))
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        entropies: list[list[float]] = [[] for _ in prompts]
        for n in range(1, self.max_tokens + 1):
            scores = torch.log_softmax(self.model.lm_head(hidden).float(), dim=-1)
            probs = scores.exp()
            sampled = torch.multinomial(probs, 1)
            chosen_scores, entropy = scores.gather(1, sampled)[:, 0], -(probs * scores).sum(dim=1)
            for i, row in enumerate(active.tolist()):
                tokens[row].append(int(sampled[i]))
                log_probs[row].append(float(chosen_scores[i]))
                entropies[row].append(float(entropy[i]))
            unfinished = sampled[:, 0] != self.eos
            if n == self.max_tokens or not unfinished.any():
                break
            cache.reorder_cache(unfinished.nonzero()[:, 0])
            active, sampled, position = active[unfinished], sampled[unfinished], position[unfinished] + 1
            mask = torch.cat([mask[unfinished], torch.ones_like(sampled)], dim=1)
            hidden = self.model.model(
                input_ids=sampled, attention_mask=mask, position_ids=position[:, None], past_key_values=cache
            ).last_hidden_state[:, -1]
        return [
            Response(tuple(ids), tuple(scores), sum(entropy) / len(entropy))
            for ids, scores, entropy in zip(tokens, log_probs, entropies, strict=True)
        ]


@dataclass(frozen=True)
class Game:
    """An environment and how its prompts look."""

    env_id: str
    kwargs: dict[str, Any]
    template: str
    history: int
    """past turns in a prompt"""
    max_turns: int

    def prompt(self, tokenizer: PreTrainedTokenizerBase, episode: Episode) -> tuple[int, ...]:
        messages = build_messages(
            system=None,
            template=self.template,
            task=episode.task,
            history=episode.past[max(0, len(episode.past) - self.history) :],
            observation=episode.observation,
            admissible=None,
            instruction=INSTRUCTIONS["plain"],
        )
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        return tuple(ids)

    def play(
        self, sampler: Sampler, tokenizer: PreTrainedTokenizerBase, seeds: Sequence[int], rollouts: int
    ) -> list[Episode]:
        """``rollouts`` episodes of each seed, all in lock-step: one batch of responses a turn."""
        episodes = []
        for group, seed in enumerate(seeds):
            for _ in range(rollouts):
                env = make(self.env_id, self.kwargs)
                observation, info = env.reset(seed=seed)
                episodes.append(Episode(env, group, info["task"], observation, info))
        active = episodes
        for number in range(1, self.max_turns + 1):
            prompts = [self.prompt(tokenizer, episode) for episode in active]
            for episode, prompt, response in zip(active, prompts, sampler(prompts), strict=True):
                self._act(episode, prompt, response, tokenizer, last=number == self.max_turns)
            active = [
                episode for episode in active if not (episode.turns[-1].terminated or episode.turns[-1].truncated)
            ]
            if not active:
                break
        return episodes

    def _act(
        self,
        episode: Episode,
        prompt: tuple[int, ...],
        response: Response,
        tokenizer: PreTrainedTokenizerBase,
        last: bool,
    ) -> None:
        """Take the action of a response; a response without one leaves the environment where it is."""
        text = tokenizer.decode(response.ids, skip_special_tokens=True)
        parsed = parse_action(text, "plain", episode.info["admissible"])
        anchor, observation = episode.info["state_key"], episode.observation
        reward, terminated, truncated, valid = 0.0, False, False, parsed.valid
        if parsed.action is not None:
            episode.observation, reward, terminated, truncated, episode.info = episode.env.step(parsed.action)
            valid = valid and not episode.info["invalid"]
        truncated = truncated or (last and not terminated)
        episode.past.append(PromptTurn(observation, parsed.action or text))
        episode.turns.append(Turn(prompt, response, anchor, parsed.action, valid, float(reward), terminated, truncated))


# --- credit -----------------------------------------------------------------------------------------------------------


def step_batch(episodes: Sequence[Episode]) -> StepBatch:
    """All turns of all episodes as a table, the input of every estimator."""
    turns = [(number, episode, turn) for number, episode in enumerate(episodes) for turn in episode.turns]
    return StepBatch(
        group=[episode.group for _, episode, _ in turns],
        trajectory=[number for number, _, _ in turns],
        step=[step for episode in episodes for step in range(len(episode.turns))],
        reward=[turn.reward for _, _, turn in turns],
        penalty=[0.0 if turn.valid else PENALTY for _, _, turn in turns],
        anchor=[turn.anchor for _, _, turn in turns],
        action=[turn.action for _, _, turn in turns],
        valid=[turn.valid for _, _, turn in turns],
        terminated=[turn.terminated for _, _, turn in turns],
        truncated=[turn.truncated for _, _, turn in turns],
        success=[bool(episode.info["success"]) for _, episode, _ in turns],
        tokens=[len(turn.response.ids) for _, _, turn in turns],
    )


# --- update -----------------------------------------------------------------------------------------------------------


def hidden_states(body: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """For the response tokens of ``rows``, (B, longest): the hidden state that predicts each, a mask, and their ids."""
    width = max(len(prompt) + len(response) for prompt, response in rows)
    longest = max(len(response) for _, response in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)  # padded on the right, which no earlier token sees
    labels = torch.zeros((len(rows), longest), dtype=torch.long)
    mask = torch.zeros((len(rows), longest), dtype=torch.bool)
    for i, (prompt, response) in enumerate(rows):
        ids[i, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        labels[i, : len(response)] = torch.tensor(response)
        mask[i, : len(response)] = True
    first = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    position = (first[:, None] + torch.arange(longest)).clamp(max=width - 1)
    hidden = body(input_ids=ids).last_hidden_state
    return hidden[torch.arange(len(rows))[:, None], position], mask, labels


def log_probs(model: PreTrainedModel, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Log-probability of every response token, (B, longest), 0 outside of the mask; and the mask."""
    hidden, mask, labels = hidden_states(model.model, rows)
    scores = torch.log_softmax(model.lm_head(hidden[mask]).float(), dim=-1)
    values = torch.zeros(mask.shape)
    values[mask] = scores.gather(1, labels[mask][:, None])[:, 0]
    return values, mask


def micro_batches(rows: Sequence[Row]) -> list[list[int]]:
    """Indices of ``rows`` in batches of like length, each of ``MICRO_BATCH_TOKENS`` at most, or of one row."""
    return by_length([sum(map(len, row)) for row in rows], MICRO_BATCH_TOKENS)


def policy_loss(ratio: Tensor, advantage: Tensor) -> Tensor:
    """PPO's clipped loss of each token, with dual clip for negative advantages: verl's ``vanilla``."""
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(advantage < 0, torch.minimum(loss, -advantage * DUAL_CLIP), loss)


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, turns: Sequence[Turn], advantage: Sequence[float]
) -> float:
    """One optimizer step on all turns, averaged over their tokens; returns the norm of the gradient."""
    rows = [Row(turn.prompt, turn.response.ids) for turn in turns]
    total = sum(len(row.response) for row in rows)
    optimizer.zero_grad()
    for batch in micro_batches(rows):
        new, mask = log_probs(model, [rows[i] for i in batch])
        old = torch.zeros_like(new)
        for i, row in enumerate(batch):
            old[i, : len(rows[row].response)] = torch.tensor(turns[row].response.log_probs)
        weight = torch.tensor([advantage[row] for row in batch], dtype=new.dtype)[:, None]
        ((policy_loss((new - old).exp(), weight) * mask).sum() / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(norm)


# --- the loop ---------------------------------------------------------------------------------------------------------


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    game: Game,
    *,
    method: str,
    params: dict[str, Any],
    steps: int,
    groups: int,
    rollouts: int,
    max_tokens: int,
    lr: float,
    seed: int,
) -> Iterator[dict[str, float]]:
    """Yields the metrics of each step."""
    torch.manual_seed(seed)
    seeds = np.random.default_rng(seed).integers(2**31, size=(steps, groups)).tolist()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    sampler = Sampler(model, tokenizer, max_tokens)
    for step, task_seeds in enumerate(seeds, 1):
        episodes = game.play(sampler, tokenizer, task_seeds, rollouts)
        turns = [turn for episode in episodes for turn in episode.turns]
        credit = compute_credit(method, step_batch(episodes), **params)
        norm = update(model, optimizer, turns, credit.advantage.tolist())
        yield {
            "step": step,
            "success": float(np.mean([episode.info["success"] for episode in episodes])),
            "turns": len(turns) / len(episodes),
            "invalid": float(np.mean([not turn.valid for turn in turns])),
            "advantage_std": float(np.std(credit.advantage)),
            "grad_norm": norm,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a chat model")
    parser.add_argument("--method", default="gigpo", help="an estimator: turnkey list methods")
    parser.add_argument("--params", type=json.loads, default={}, help="of the method, as JSON")
    parser.add_argument("--env", default="turnkey/MiniGrid-v0", help="gymnasium id")
    parser.add_argument("--kwargs", type=json.loads, default=DOOR_KEY, help="of the environment, as JSON")
    parser.add_argument("--template", default="minigrid", help="prompt template: a name or a file")
    parser.add_argument("--history", type=int, default=1, help="past turns in a prompt")
    parser.add_argument("--max-turns", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=4, help="of a response")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8, help="tasks per step")
    parser.add_argument("--rollouts", type=int, default=8, help="episodes per task")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    game = Game(args.env, args.kwargs, load_template(args.template), args.history, args.max_turns)
    sizes = {key: getattr(args, key) for key in ("method", "params", "steps", "groups", "rollouts", "lr", "seed")}
    for metrics in train(model, tokenizer, game, max_tokens=args.max_tokens, **sizes):
        print("  ".join(f"{name} {value:.3g}" for name, value in metrics.items()), flush=True)


if __name__ == "__main__":
    main()
