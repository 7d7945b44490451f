"""A small model as policy and as critic: sampling, log-probabilities, values, all in padded batches on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

Prompt = tuple[int, ...]
Row = tuple[Prompt, tuple[int, ...]]
"""token ids of a prompt and of the response to it"""
MICRO = 16384
"""tokens of a forward pass, padding included"""
T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """A response: its tokens, their log-probabilities, and the mean entropy of the distributions they are from."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    entropy: float


class Sampler:
    """Responses at temperature 1, up to the end of the turn or ``most`` tokens; draws follow torch's global seed."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, most: int) -> None:
        self.model, self.most = model, most
        self.end, self.pad = tokenizer.eos_token_id, tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Prompt]) -> list[Said]:
        place = {prompt: i for i, prompt in enumerate(dict.fromkeys(prompts))}  # equal ones pass the model once
        width = max(map(len, place))
        ids = torch.full((len(place), width), self.pad)
        mask = torch.zeros_like(ids)
        for prompt, row in place.items():
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = self.model.model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True)
        rows = torch.tensor([place[prompt] for prompt in prompts])
        cache, hidden = out.past_key_values, out.last_hidden_state[rows, -1]
        cache.reorder_cache(rows)
        mask, position = mask[rows], positions[rows, -1]
        going = torch.arange(len(prompts))
        tokens: list[list[int]] = [[] for _ in prompts]
        chances: list[list[float]] = [[] for _ in prompts]
        entropies: list[list[float]] = [[] for _ in prompts]
        for number in range(self.most):
            scores = torch.log_softmax(self.model.lm_head(hidden), dim=-1)
            shares = scores.exp()
            chosen = torch.multinomial(shares, 1)
            entropy = -(shares * scores).sum(dim=1)
            found = zip(
                going.tolist(), chosen[:, 0].tolist(), scores.gather(1, chosen)[:, 0].tolist(), entropy.tolist(),
                strict=True,
            )  # fmt: skip
            for row, token, score, uncertain in found:
                tokens[row].append(token)
                chances[row].append(score)
                entropies[row].append(uncertain)
            further = chosen[:, 0] != self.end
            if number + 1 == self.most or not further.any():
                break
            cache.reorder_cache(further.nonzero()[:, 0])
            going, chosen, position = going[further], chosen[further], position[further] + 1
            mask = torch.cat([mask[further], torch.ones_like(chosen)], dim=1)
            hidden = self.model.model(
                input_ids=chosen, attention_mask=mask, position_ids=position[:, None], past_key_values=cache
            ).last_hidden_state[:, -1]
        return [
            Said(tuple(ids), tuple(scores), sum(each) / len(each))
            for ids, scores, each in zip(tokens, chances, entropies, strict=True)
        ]


def log_probs(model: PreTrainedModel, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Log-probability of every token of the responses, (B, longest), and which of these are there."""
    hidden, inside, answers = _responses(model.model, rows)
    scores = torch.log_softmax(model.lm_head(hidden[inside]), dim=-1)
    found = torch.zeros(inside.shape)
    found[inside] = scores.gather(1, answers[inside][:, None])[:, 0]
    return found, inside


class Critic(nn.Module):
    """Values before each token of a response; starts from the policy's weights, with a head of random ones."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.body: Any = AutoModel.from_pretrained(model)
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        nn.init.normal_(self.head.weight, std=self.body.config.initializer_range)
        nn.init.zeros_(self.head.bias)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """(B, longest response), and which of these are there."""
        hidden, inside, _ = _responses(self.body, rows)
        return self.head(hidden)[..., 0] * inside, inside

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> dict[Row, list[float]]:
        """The values of each row, equal rows once."""
        found = {}
        for some in micro_batches(list(dict.fromkeys(rows))):
            now, _ = self(some)
            found.update((row, value[: len(row[1])]) for row, value in zip(some, now.tolist(), strict=True))
        return found


def _responses(body: Any, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states from which each response token is predicted, which are there, and the tokens."""
    width, longest = max(len(p) + len(r) for p, r in rows), max(len(r) for _, r in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.long)  # padded on the right, which no earlier token sees
    answers = torch.zeros((len(rows), longest), dtype=torch.long)
    inside = torch.zeros((len(rows), longest), dtype=torch.bool)
    for row, (prompt, response) in enumerate(rows):
        ids[row, : len(prompt) + len(response)] = torch.tensor(prompt + response)
        answers[row, : len(response)] = torch.tensor(response)
        inside[row, : len(response)] = True
    first = torch.tensor([len(prompt) - 1 for prompt, _ in rows])
    at = (first[:, None] + torch.arange(longest)).clamp(max=width - 1)
    hidden = body(input_ids=ids).last_hidden_state
    return hidden[torch.arange(len(rows))[:, None], at], inside, answers


def micro_batches(items: list[T], row: Callable[[T], Row] = lambda item: item) -> Iterator[list[T]]:  # type: ignore[assignment,return-value]
    """``items`` in batches of similar length, each of at most ``MICRO`` tokens or one item."""
    ordered = sorted(items, key=lambda item: sum(map(len, row(item))), reverse=True)
    while ordered:
        most = max(1, MICRO // sum(map(len, row(ordered[0]))))
        yield ordered[:most]
        ordered = ordered[most:]
