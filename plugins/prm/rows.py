"""Where the numbers of a process reward model are: of which tokens, and how far a row's output is shifted."""

from __future__ import annotations

import torch

from verl_turnkey.losses.turns import Turns, like, row_offsets

#: Of each kind: positions between a response token and the output that is its. A token's log-probability is an output
#: of the position before it; a head is read at the token itself.
SHIFT = {"implicit": 1, "head": 0}


def of_response(output: torch.Tensor, response: torch.Tensor, shift: int) -> torch.Tensor:
    """The ``output`` (B, prompt + response) of the tokens of a ``response`` (B, L), both jagged: jagged (B, L)."""
    ends, lengths = row_offsets(output)[1:] - shift, row_offsets(response).diff()
    values = output.values()
    rows = [values[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    return like(torch.cat(rows), response)


def own_tokens(turns: Turns, kind: str) -> torch.Tensor:
    """Which tokens a turn's number is the sum over: all of the turn, or of a head the last. Jagged bool."""
    index = turns.index.values()
    of_turn = index < turns.n
    if kind == "implicit":
        return like(of_turn, turns.index)
    position = torch.arange(len(index))
    last = position.new_full((turns.n + 1,), -1).scatter_reduce_(0, index, position, "amax")
    return like(of_turn & (last[index] == position), turns.index)
