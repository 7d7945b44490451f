"""The weights of a batch's tokens under which steps, episodes or tasks weigh alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_turnkey.losses.turns import like, row_offsets
from verl_turnkey.plugins.credit.row_turns import split_key


def token_weights(by: str, keys: Sequence[str], turn: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The weight of each token, (B, L) jagged like ``mask``, float32. They sum to 1; tokens outside the mask have 0.

    ::

        1 / (units  x tokens of the unit)                                by="step" or "episode"
        1 / (tasks  x episodes of the task x tokens of the episode)      by="task"

    Units without a token in the mask do not count: failed episodes, padding, fully rejected steps.

    Args:
        keys: keys of the rows, B, which name the task and the episode of each.
        turn: (B, L) jagged int64, the number of each token's turn, in its row or in the batch, before any rejection.
        mask: (B, L) jagged, the tokens that the loss trains, after any rejection.
    """
    trained = mask.values().bool()
    row = torch.repeat_interleave(torch.arange(len(keys)), row_offsets(mask).diff().cpu())[trained]
    if by == "step":
        width = int(turn.values().max()) + 1 if len(trained) else 1
        units, unit = (row * width + turn.values()[trained]).unique(return_inverse=True)
        group = torch.zeros(len(units), dtype=torch.int64)
    else:
        rows, place = row.unique(return_inverse=True)
        names = [split_key(keys[int(i)])[:2] for i in rows.tolist()]  # (task, episode)
        episodes = {episode: i for i, episode in enumerate(dict.fromkeys(names))}
        unit = torch.tensor([episodes[name] for name in names], dtype=torch.int64)[place]
        tasks = {task: i for i, task in enumerate(dict.fromkeys(task for task, _ in episodes))}
        group = torch.tensor([tasks[task] if by == "task" else 0 for task, _ in episodes], dtype=torch.int64)
    # Groups weigh alike, the units within a group, and the tokens within a unit. By step or episode: one group.
    in_group = torch.bincount(group)
    share = 1 / (len(in_group) * in_group[group] * torch.bincount(unit)).double()
    weight = torch.zeros(len(trained), dtype=torch.float64)
    weight[trained] = share[unit]
    return like(weight.float(), mask)
