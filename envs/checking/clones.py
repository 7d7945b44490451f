"""Clones of an environment in the middle of an episode: does each continue independently from the same state?

They are made as hosts make them: a copy where the class offers one; else another instance, which is reset and plays the
same actions, in the process of the original where the class is thread-safe, and in its own where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace

from verl_turnkey.envs.base import copied, offers_copies
from verl_turnkey.envs.checking.traces import Calls, Env, Trace, replay

Elsewhere = Callable[[Sequence[Trace]], list[Trace]]
"""plays episodes once more in another process"""


def clones(
    make: Callable[[], Env], kind: type[Env], first: Sequence[Trace], calls: Calls, other: Elsewhere | None
) -> tuple[str, list[Trace]]:
    """How a host clones a ``kind``, and the episodes ``first`` on a clone made half-way and on its original, in turn.

    With replays, which take their time, it is the longest of them alone, and without another process none.
    """
    longest = max(first, key=lambda trace: len(trace.actions))
    if not (kind.metadata or {}).get("thread_safe", False):
        ends = elsewhere(make, longest, calls, other) if other else []
        return "a reset and a replay in another process", ends
    if offers_copies(kind):
        return "a copy", [end for trace in first for end in copies(make, trace, calls)]
    return "a reset and a replay", instances(make, longest, calls)


def copies(make: Callable[[], Env], trace: Trace, calls: Calls) -> list[Trace]:
    """The episode ``trace`` on a copy made half-way, then on the original.

    Before that, another copy repeats the first action over and over, which must affect neither of them.
    """
    original, half = _half(make, trace, calls)
    what = f"a copy after step {len(half.actions)}"
    astray, copy = (calls("reset", what, lambda: copied(original))[0] for _ in range(2))
    _go_on(astray, deepcopy(half), _astray(trace, half), calls)
    ends = [_go_on(env, deepcopy(half), trace.actions, calls) for env in (copy, original)]
    for env in (astray, copy, original):
        env.close()
    return ends


def instances(make: Callable[[], Env], trace: Trace, calls: Calls) -> list[Trace]:
    """The same with instances of this process that play the first half of the episode while the original waits."""
    original, half = _half(make, trace, calls)
    (astray, path), (copy, same) = (_half(make, trace, calls) for _ in range(2))
    _go_on(astray, path, _astray(trace, half), calls)
    ends = [_go_on(copy, same, trace.actions, calls), _go_on(original, half, trace.actions, calls)]
    for env in (astray, copy, original):
        env.close()
    return ends


def elsewhere(make: Callable[[], Env], trace: Trace, calls: Calls, play: Elsewhere) -> list[Trace]:
    """The same with an instance of another process, which has gone astray in an episode before."""
    original, half = _half(make, trace, calls)
    clones = play([replace(trace, actions=_astray(trace, half)), trace])
    end = _go_on(original, half, trace.actions, calls)
    original.close()
    return [clones[-1], end] if clones else []


def _half(make: Callable[[], Env], trace: Trace, calls: Calls) -> tuple[Env, Trace]:
    env = make()
    return env, replay(env, replace(trace, actions=trace.actions[: len(trace.actions) // 2]), calls)


def _astray(trace: Trace, half: Trace) -> list[str]:
    return half.actions + trace.actions[:1] * (len(trace.actions) - len(half.actions))


def _go_on(env: Env, trace: Trace, actions: Sequence[str], calls: Calls) -> Trace:
    """Play the rest of ``actions``, of which ``trace`` has the first ones."""
    for action in actions[len(trace.actions) :]:
        if not (trace.broken or trace.ended):
            calls.step(env, trace, action)
    return trace
