"""Play a model in many episodes in lock-step, sampled as in training. For checks without verl and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.actions import ControlTokens, parse_action
from verl_turnkey.envs.prompting.prompts import LINE, PromptTurn, build_messages, history_text, load_template


@dataclass
class Player:
    """One episode in progress: its environment and what happened so far."""

    env: Any
    task: str
    observation: str
    info: dict[str, Any]
    past: list[PromptTurn] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    responses: list[list[int]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    invalid: int = 0
    done: bool = False


def render(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    task: str,
    history: Sequence[PromptTurn],
    observation: str,
    line: str = LINE,
) -> list[int]:
    """Token ids of a prompt, as the agent loop renders them."""
    messages = build_messages(
        system=None, template=template, task=task, history=history, observation=observation, admissible=None, line=line
    )
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    level: str,
    seeds: Sequence[int],
    *,
    history: int,
    max_turns: int,
    max_new_tokens: int = 8,
) -> list[Player]:
    """One episode of a MiniGrid level per element of ``seeds``, see :func:`play_in`."""
    return play_in(
        [make("turnkey/MiniGrid-v0", {"level": level}) for _ in seeds],
        model,
        tokenizer,
        seeds,
        template=load_template("minigrid"),
        history=history,
        max_turns=max_turns,
        max_new_tokens=max_new_tokens,
    )


@torch.no_grad()
def play_in(
    environments: Sequence[Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seeds: Sequence[int],
    *,
    template: str,
    history: int,
    max_turns: int,
    max_new_tokens: int,
    line: str = LINE,
) -> list[Player]:
    """One episode per environment and seed, at temperature 1. Sampling follows torch's global seed."""
    players, control = [], ControlTokens(tokenizer)
    for env, seed in zip(environments, seeds, strict=True):
        observation, info = env.reset(seed=seed)
        players.append(Player(env, info["task"], observation, info))
    for _ in range(max_turns):
        active = [player for player in players if not player.done]
        if not active:
            break
        prompts = [
            render(tokenizer, template, p.task, p.past[len(p.past) - min(history, len(p.past)) :], p.observation, line)
            for p in active
        ]
        for player, prompt, ids in zip(
            active, prompts, _sample(model, tokenizer, prompts, max_new_tokens), strict=True
        ):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            parsed = parse_action(text, "plain", player.info["admissible"])
            player.prompts.append(prompt)
            player.responses.append(ids)
            player.keys.append(player.info["state_key"])
            player.past.append(PromptTurn(player.observation, control.plain(history_text(parsed, text, whole=False))))
            if parsed.action is None:
                player.invalid += 1
                continue
            player.observation, _, terminated, _, player.info = player.env.step(parsed.action)
            player.done = terminated
    return players


def summarize(players: Sequence[Player]) -> dict[str, float]:
    """Success rate, mean number of turns, share of invalid actions, longest prompt in tokens."""
    turns = sum(len(player.responses) for player in players)
    return {
        "success": sum(player.info["success"] for player in players) / len(players),
        "turns": turns / len(players),
        "invalid": sum(player.invalid for player in players) / turns,
        "longest_prompt": max(len(prompt) for player in players for prompt in player.prompts),
    }


def _sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[list[int]], max_new_tokens: int
) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
    mask = (ids != tokenizer.pad_token_id).long()
    out = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        max_new_tokens=max_new_tokens, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    responses = []
    for row in out[:, width:].tolist():
        end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        responses.append(row[:end])
    return responses
