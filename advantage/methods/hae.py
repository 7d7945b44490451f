"""HAE: advantages of three decisions in a turn, to keep the subgoal or not, which subgoal, and which action."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints, Runs
from verl_turnkey.advantage.methods._step_columns import refuse_trees
from verl_turnkey.advantage.params import ConfigError, NotNegative, Ranged, Unit
from verl_turnkey.advantage.registry import ValueHead, register_estimator

HEADS = (ValueHead("low", behind=("subgoal", "switch")), ValueHead("high"), ValueHead("term"))
"""low: after the subgoal and before the action; the others before the turn"""
STD_EPSILON = 1e-8  # added to the stds, as in the released code


@dataclass(frozen=True)
class HaeParams(Ranged):
    """Parameters of ``hae``; the defaults are the paper's."""

    gamma: Unit = 1.0  # discount per turn
    lam_turn: Unit = 0.95  # lambda of GAE over the turns of a segment; the released runs: 1.0
    lam_seg: Unit = 0.95  # lambda of GAE over segments
    keep_penalty: NotNegative = 0.0
    """taken from the reward of each turn that keeps its subgoal; the authors' runs: 0.3 fixed, or 3.5 normalized"""
    keep_penalty_mode: Literal["fixed", "normalized"] = "fixed"
    """the whole of it for each such turn, or divided by the turns of the episode, none in an episode of one"""
    bootstrap_truncated: bool = False  # an episode that did not terminate goes on with its last value, or with 0
    heads: Literal[3, 1] = 3
    """of the critic: one for each decision, or one value before the turn in the place of all three"""
    normalise: bool = True  # each of the three to mean 0 and population std 1, over the turns that have it

    @property
    def value_heads(self) -> tuple[ValueHead, ...]:
        return HEADS if self.heads == 3 else ()


@register_estimator(
    "hae",
    params=HaeParams,
    needs=("extra.switch", "extra.value_low", "extra.value_high", "extra.value_term"),
    gives=("subgoal_advantages", "switch_advantages", "high_returns", "term_returns"),
    paper="HiPER, arXiv:2602.16165",
    summary="separate advantages for an agent's subgoals, its decisions to switch them, and its actions; three critics",
    tier="reproduced",
)
def hae(batch: StepBatch, params: HaeParams) -> Credit:
    """Hierarchical advantage estimation over segments: the turns from a SWITCH, or the first turn, to the next one.

    ::

        A_low(t)  = r(t) + gamma V' - V_low(t) + gamma lam_turn A_low(t+1)       for the action; ends with its segment
                    V': V_low(t+1) inside a segment, V_high of the next segment at its end
        R(t)      = sum of gamma^i r to the end of the segment, + gamma^d' V_high of the next segment
        A_high(k) = R - V_high(k) + gamma^d lam_seg A_high(k+1)       for the subgoal of segment k; d: its turns
        A_term(t) = R(t) - V_term(t)                                  for the decision to keep or to switch

    ``extra.switch`` is 1 where a turn switches (a missing one keeps); ``extra.value_low``, ``value_high`` and
    ``value_term`` are the values of three critics, the second read at the first turn of a segment only: it may
    be nan elsewhere. With one critic, pass its values three times. Nothing follows an episode that terminated.

    ``Credit.advantage`` is A_low and ``Credit.returns`` its target, each minus the turn's penalty. ``Credit.extra`` has
    the rest, for a loss that tells the tokens of a turn apart: ``subgoal_advantages`` (0 but at the first turn of a
    segment), ``switch_advantages``, ``high_returns`` (likewise) and ``term_returns``. ``Credit.targets`` has what the
    three critics are fitted to, ``low``, ``high`` (nan but at the first turn of a segment) and ``term``.
    ``extra.has_action``, ``has_subgoal`` and ``has_switch`` may say, by 0, which turns own no tokens of a stream: they
    enter no normalization there and get 0.

    Source: HiPER, arXiv:2602.16165 (summaries of the paper) and its released code, whose outputs are compared. The
    paper's A_term is (q - beta) (V_high - V_low), beta the probability of SWITCH; the code has the difference above,
    and so does this, as beta is recorded nowhere. The code subtracts the penalty of an invalid action from the reward
    first; it writes keep penalties with a negative sign, and has a further one for a changed subgoal, not offered. That
    a first turn that says KEEP is charged, though it opens a segment, is our reading.
    """
    refuse_trees(batch, "hae")
    low, term = _column(batch, "value_low"), _column(batch, "value_term")
    switches = np.nan_to_num(_column(batch, "switch", read=[])) != 0
    episodes = ops.cut_runs(batch.runs, batch.terminated)
    opens = switches.copy()
    opens[episodes.order[episodes.starts]] = True
    segments = ops.cut_runs(episodes, ops.next_values(opens.astype(np.int64), episodes, 1).astype(bool))
    first = segments.order[segments.starts]
    last = segments.last
    high = _column(batch, "value_high", read=first)
    reward = batch.reward - _keep_penalties(batch, ~switches, params)

    def after(last_value: Floats) -> Floats:
        """V_high of the next segment, or what follows the end of the episode: for the last turns of segments."""
        ended = batch.terminated | (not params.bootstrap_truncated)
        return ops.next_values(high, episodes, np.where(ended, 0.0, last_value))

    following = ops.next_values(low, segments, after(low))
    a_low = ops.discounted_returns(reward + params.gamma * following - low, segments, params.gamma * params.lam_turn)

    of_segment = np.empty(len(batch))
    of_segment[segments.order] = np.repeat(high[first], segments.lengths)
    bootstrapped = reward.copy()
    bootstrapped[last] += params.gamma * after(of_segment)[last]
    target = ops.discounted_returns(bootstrapped, segments, params.gamma)
    starts = np.searchsorted(segments.starts, episodes.starts)  # the first segment of each episode
    chain = Runs(np.arange(len(first)), starts, np.diff(starts, append=len(first)))
    a_high, returns_high = np.zeros(len(batch)), np.full(len(batch), np.nan)
    a_high[first] = ops.discounted_returns(
        target[first] - high[first], chain, np.power(params.gamma, segments.lengths) * params.lam_seg
    )
    returns_high[first] = a_high[first] + high[first]

    streams = {
        "action": _finish(a_low, _owns(batch, "action"), params),
        "subgoal": _finish(a_high, opens & _owns(batch, "subgoal"), params),
        "switch": _finish(target - term, _owns(batch, "switch"), params),
    }
    returns = a_low + low - batch.penalty
    return Credit.of_parts(
        {"action_stream": streams["action"]},
        batch.penalty,
        returns,
        metrics={"credit/segment_length/mean": len(batch) / max(1, len(first))},
        extra={
            "subgoal_advantages": streams["subgoal"],
            "switch_advantages": streams["switch"],
            "high_returns": np.nan_to_num(returns_high),
            "term_returns": target,
        },
        targets={"low": returns, "high": returns_high, "term": target},
        levels={"subgoal_stream": streams["subgoal"], "switch_stream": streams["switch"]},
    )


def _column(batch: StepBatch, name: str, read: Ints | list[int] | None = None) -> Floats:
    """``extra[name]``, finite in the rows that are ``read``, by default all; the others may have none."""
    column = batch.extra[name]
    if column.dtype == object or not np.isfinite(column if read is None else column[read]).all():
        where = "the first turn of each segment" if name == "value_high" else "each step"
        raise ConfigError(f"hae: extra.{name}: expected a finite number for {where}")
    return column


def _owns(batch: StepBatch, stream: str) -> Bools:
    """Which turns have tokens of a stream: all, unless the batch says."""
    name = f"has_{stream}"
    return _column(batch, name) != 0 if f"extra.{name}" in batch.given else np.ones(len(batch), dtype=bool)


def _keep_penalties(batch: StepBatch, keeps: Bools, params: HaeParams) -> Floats:
    if params.keep_penalty_mode == "fixed":
        return params.keep_penalty * keeps.astype(np.float64)
    turns = batch.runs.lengths[batch.trajectory]
    return params.keep_penalty * keeps * (turns > 1) / turns


def _finish(advantage: Floats, counted: Bools, params: HaeParams) -> Floats:
    """A stream's advantages, 0 for the turns that have none of its tokens."""
    if params.normalise:
        whole = np.zeros(len(advantage), dtype=np.int64)  # the batch as a single group
        stats = ops.group_stats(advantage[counted], whole[counted], 1, "population")
        advantage = ops.normalize(advantage, whole, stats, "mean_std", STD_EPSILON)
    return np.where(counted, advantage, 0.0)
