"""What the tests of forking episodes share: a tree of two moves, and what its rows hold."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from scripted import Script
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

from verl_turnkey.advantage import StepBatch
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.credit.rows import read_rows

TREE = Task("contract/Tree-v0", 3)
MOVES = "LR"
CONVERSATION = ("turnkey.rollout.prompt=conversation", "data.max_response_length=400")
SHORT = "turnkey.rollout.max_tokens_per_turn=8"


def way(prompt: str) -> str:
    """The moves so far, which the last observation shows."""
    return prompt.rpartition("at <")[2].partition(">")[0]


def table(outputs: list[AgentLoopOutput]) -> StepBatch:
    keys = [f"u_0_{i}" for i in range(len(outputs))]
    mask = torch.nested.as_nested_tensor([torch.tensor(row.response_mask) for row in outputs], layout=torch.jagged)
    return read_rows(keys, [{}] * len(keys), [row.extra_fields for row in outputs], mask).steps


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
