"""In place of the language model, the rest is real: what tests of the agent loop share and is no fixture."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import StepBatch
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.credit.rows import read_rows
from verl_turnkey.plugins.eval.player import Completions


class Script:
    """The language model server's client: answers with the next text, or with what ``turns(prompt)`` returns.

    A turn of ids has no token that ends it, unless it is among them.
    """

    def __init__(self, tokenizer: Any, turns: list[str | list[int]] | Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.answers: list[list[int]] = []
        self.cached: int | None = None  # what the server says of its cache
        self.seen: list[dict[str, Any]] = []

    def text(self, t: int) -> str:
        return self.tokenizer.decode(self.prompts[t])

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **seen: Any
    ) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        self.params.append(sampling_params)
        self.seen.append(seen)
        turn = self.turns(self.text(-1)) if callable(self.turns) else self.turns[len(self.prompts) - 1]
        ids = turn
        if isinstance(turn, str):
            ids = [*self.tokenizer.encode(turn, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.answers.append(ids)
        fields = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7, "num_cached_tokens": self.cached}
        return TokenOutput(token_ids=ids, log_probs=[-0.01 * i for i in range(len(ids))], extra_fields=fields)


class Served(Completions):
    """A script in place of the server that ``turnkey eval`` asks."""

    def __init__(self, script: Script) -> None:
        super().__init__("http://nobody/v1", "script", concurrency=1)
        self.script = script

    async def generate(self, prompt_ids: list[int], sampling: Mapping[str, Any], seed: int) -> list[int]:
        return (await self.script.generate("", prompt_ids=prompt_ids, sampling_params={**sampling})).token_ids


def opening_thoughts(tokenizer: Any) -> Any:
    """A copy whose template opens the thoughts of each turn."""
    thinking = copy.deepcopy(tokenizer)
    thinking.chat_template = tokenizer.chat_template.replace(
        "assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"
    )
    return thinking


# --- episodes that fork -----------------------------------------------------------------------------------------------

TREE = Task("contract/Tree-v0", 3)
MOVES = "LR"
CONVERSATION = ("turnkey.rollout.prompt=conversation", "data.max_response_length=400")
SHORT = "turnkey.rollout.max_tokens_per_turn=8"


BRANCH: ContextVar[tuple[int, int, int] | None] = ContextVar("BRANCH", default=None)
"""of the branch that asks: the turn at which it began, its number among those that began there, and in its rollout"""


def way(prompt: str) -> str:
    """The moves so far, which the last observation shows."""
    return prompt.rpartition("at <")[2].partition(">")[0]


def table(outputs: list[AgentLoopOutput]) -> StepBatch:
    keys = [f"u_0_{i}" for i in range(len(outputs))]
    mask = torch.nested.as_nested_tensor([torch.tensor(row.response_mask) for row in outputs], layout=torch.jagged)
    return read_rows(keys, [{}] * len(keys), [row.extra_fields for row in outputs], mask).steps


def columns(batch: StepBatch, *names: str) -> tuple[list[Any], ...]:
    """Columns of a batch in the order of steps, and of branches within a step."""
    order = np.lexsort((batch.extra["branch"], batch.step)) if "branch" in batch.extra else np.argsort(batch.step)
    return tuple((batch.extra[name] if name in batch.extra else getattr(batch, name))[order].tolist() for name in names)


def trained_once(outputs: list[AgentLoopOutput], script: Script, measured: int = 0) -> None:
    """Each turn of the model that is trained is under one mask, in the context in which it was written."""
    written = Counter((tuple(p), tuple(a)) for p, a in zip(script.prompts, script.answers, strict=True))
    trained: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in outputs:
        ids, first = row.prompt_ids + row.response_ids, len(row.prompt_ids)
        edges = np.flatnonzero(np.diff([0, *row.response_mask, 0]))
        for begin, end in edges.reshape(-1, 2).tolist():
            trained[tuple(ids[: first + begin]), tuple(ids[first + begin : first + end])] += 1
    assert not trained - written
    assert sum((written - trained).values()) == measured


def counts(outputs: list[AgentLoopOutput]) -> dict[str, float]:
    """The last row's metrics ``branching/...``."""
    info = outputs[-1].extra_fields["reward_extra_info"]
    return {name.partition("/")[2]: value for name, value in info.items() if name.startswith("branching/")}
