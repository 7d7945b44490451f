"""Leave-one-out TD(lambda): values of states by turns left, from the group's own episodes, without a critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, mean
from verl_turnkey.advantage.methods._turns_left import Paths, baseline, state_values
from verl_turnkey.advantage.methods._words import fit_shares, word_values
from verl_turnkey.advantage.params import AtLeastOne, NotNegative, PositiveUnit, Ranged, Unit, check
from verl_turnkey.advantage.registry import register_estimator

PRIORS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class LooTdParams(Ranged):
    gamma: PositiveUnit = 1.0
    """discount, one factor per step; 0.98 to 0.995 at high success, where only the speed of a solution still differs"""
    lam: Unit = 0.6
    """0: targets are the group's values; 1: the trajectory's own return, unbiased whatever the states hide"""
    horizon: AtLeastOne | None = None
    """turn limit; null: the column extra.turn_limit, else the longest trajectory of a group in which a limit ended one,
    else that of the batch, else twice the longest of the batch"""
    prior: float | Literal["averaged"] | None = None
    """visits that the expectation without the state's own value counts for; null: the best of 0.3, 1, 3, 10, 30 and 100
    at predicting returns that the prediction has not seen; averaged: all of them, by how well they predict"""
    lone: NotNegative = 1.0  # visits below which the credit of a step is toned down; 0: never
    scale: Literal["rms", "none"] = "rms"  # divide by the root mean square over the batch
    text: Literal["words", "none"] = "words"
    """words: where there are observation texts, values also by their words, as far as they predict unseen outcomes"""

    def __post_init__(self) -> None:
        super().__post_init__()
        number = not isinstance(self.prior, str) and self.prior is not None
        check(not number or 0 < self.prior < np.inf, "prior", "null, averaged or a finite number > 0", self.prior)  # pyright: ignore[reportOperatorIssue]

    @property
    def compares_texts(self) -> bool:
        """Whether the rollout keeps the text of every observation."""
        return self.text == "words"


@register_estimator(
    "loo_td",
    params=LooTdParams,
    needs=("anchor", "terminated"),
    before=("extra.turn_limit",),
    paper="this project's own",
    summary="compares each step with what the group's other episodes expect from its state with as many turns left",
    independent=True,
)
def loo_td(batch: StepBatch, params: LooTdParams) -> Credit:
    """Advantage of each step over the value of its state, both by the turns that are left before the limit.

    ::

        V_0(s)    = 0;  V = 0 after the end of a trajectory, unless the turn limit was the end
        V_L(s)    = mean of  r + gamma V_{L-1}(s')  over all steps of the group from s
        V_L^-i(s) = the same mean over the steps of the other trajectories;  n(t) of these were in s(t)

        e(t) = (b(t-1) - r(t-1)) / gamma + [f(t) - (f(t-1) - r(t-1)) / gamma];  e(0) = mean outcome of the others
        b(t) = (n(t) V_L^-i(s(t)) + kappa e(t)) / (n(t) + kappa)                    baseline, forwards

        m    = n(t+1) + 1, or 0 where n(t+1) = 0
        v    = (m V_{L-1}(s(t+1)) + kappa tau e(t+1)) / (m + kappa tau)
        w    = (1 - lam) (m + kappa tau) / (m + kappa);  0 at the last step
        G(t) = r(t) + gamma (w v + (1 - w) G(t+1))                                  target, backwards

        A(t) = (G(t) - b(t)) (n(t) + lone F) / (n(t) + lone) / rms - penalty(t)

    L is the turns left before step t, kappa the ``prior``, F = h + (1 - h) tau with the share h of the batch's steps
    that have n = 0, rms that of the credit over the batch. f are values by the words of observations and tau the trust
    in them (:func:`~._words.word_values`); without texts, or where words explain nothing, the brackets and tau are 0. A
    group of one gets 0. Where no state recurs and tau is 0, credit is the outcome minus the mean outcome of the others
    (RLOO).

    b(t) depends on other trajectories and on the past of its own, so with ``lam=1`` the policy gradient is unbiased
    whatever the states hide; with less, it is biased by at most 1 - lam times the error of V at the next state.
    A limit that ends a trajectory leads to the next state, ``extra["next_anchor"]``, which other trajectories may reach
    with turns left; a trajectory that something else ended before (tokens, time) is worth 0 after its end.
    ``extra["turn_limit"]``: how many turns the episode may take; the largest of a group is that of all its episodes.

    Source: this project's own; relatives are GRAFT (Bellman values on the group's graph), RTMC, RLOO and TD(lambda).
    A near tie of two values of ``prior`` may flip with a vanishing change of the rewards; ``averaged`` does not jump.
    """
    paths = Paths.of(batch, params.horizon)
    others = paths.others
    before, after = state_values(paths, params.gamma)
    returns = paths.returns(paths.reward, params.gamma)
    start = paths.mean_of_others(returns[paths.begin])
    averaged = params.prior == "averaged"
    texts = batch.text[paths.order] if params.text == "words" and "text" in batch.given else None
    words, trust = word_values(paths, texts, returns, start, params.gamma, averaged)

    priors = PRIORS if params.prior is None or averaged else (float(params.prior),)
    tried = [baseline(paths, before, start, prior, params.gamma, words) for prior in priors]
    share = fit_shares(np.array([np.sum((returns - b) ** 2) for b, _ in tried]), paths.n_trajectories, averaged)

    met = np.append(others[1:], 0.0)
    met = np.where(paths.last, 0.0, np.where(met > 0, met + 1, 0.0))
    lone = mean((others == 0)[paths.in_company])
    lone += (1 - lone) * trust
    weight = (others + params.lone * lone) / (others + params.lone) if params.lone else np.ones(len(others))
    credit, value, target_share = np.zeros(len(others)), np.zeros(len(others)), np.zeros(len(others))
    for part, kappa, (b, expected) in zip(share, priors, tried, strict=True):
        if part == 0:
            continue
        by_words = np.where(paths.last, 0.0, kappa * trust)
        w = np.where(paths.last, 0.0, (1 - params.lam) * (met + by_words) / (met + kappa))
        ahead = (met * after + by_words * params.gamma * np.append(expected[1:], 0.0)) / np.maximum(
            met + by_words, 1e-12
        )
        target = paths.returns(paths.reward + w * ahead, params.gamma * (1 - w))
        credit += part * weight * (target - b)
        value += part * b
        target_share += part * w
    credit[np.abs(credit) <= 1e-12 * np.abs(returns).max(initial=0.0)] = 0.0
    rms = float(np.sqrt(mean(credit**2))) if params.scale == "rms" and credit.any() else 1.0

    def as_given(values: Floats) -> Floats:
        result = np.empty_like(values)
        result[paths.order] = values
        return result

    return Credit.of_parts(
        {"step_level": as_given(credit / rms)},
        batch.penalty,
        metrics={
            "credit/groups": float(batch.n_groups),
            "credit/prior": float(np.exp(np.sum(share * np.log(priors)))) if len(batch) else 0.0,
            "credit/text_trust": trust,
            "credit/share_steps_met": mean(others > 0),
            "credit/share_from_values": mean(target_share),
            "credit/rms": rms,
            "credit/turn_limit": mean((paths.left + paths.position).astype(float)),
            "credit/share_cut_early": mean(paths.cut_early[paths.last]),
        },
        levels={"state_value": as_given(value)},
        groups={"step_level": batch.anchor_groups[0], "state_value": batch.anchor_groups[0]},
    )
