"""SeeUPO's advantage: the outcome against its group, normalized over the batch, the same for every turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import group_stats, normalize
from verl_turnkey.advantage.methods._episode_level import Singleton, episode_level
from verl_turnkey.advantage.params import Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator

SMALLEST_STD = 1e-6  # the released code only centres a batch with less spread


@dataclass(frozen=True)
class SeeupoParams(Ranged):
    """Parameters of ``seeupo``; the defaults are the released code's."""

    clamp: Positive = 3.0  # advantages are cut to [-clamp, clamp]
    singleton: Singleton = "score"  # group-level advantage in a group of one: its raw score, or 0


@register_estimator(
    "seeupo",
    params=SeeupoParams,
    paper="SeeUPO, arXiv:2602.06554",
    summary="normalizes the outcome by group and batch; for updates turn by turn, from the last to the first",
    tier="reproduced",
)
def seeupo(batch: StepBatch, params: SeeupoParams) -> Credit:
    """``M_{T+1}``: the advantage of every turn, before the trainer multiplies it by the accumulated ratio.

    ::

        A_i = R_i - mean_g R                                  group level, one value per trajectory
        A_i = clip((A_i - mean A) / std A, -clamp, clamp)     over all trajectories of the batch, sample std

    For the turns before the last the trainer multiplies ``A_i`` by the accumulated ratio of the later turns' updates
    (Eq 8; ``turnkey.update.order=reverse_turns``). A batch whose groups are constant gives 0. Finally each step's own
    penalty is subtracted; it enters no statistic.

    Source: arXiv:2602.06554, Eq 9. The clamp, the sample std and the group of one are the released code's, whose
    trajectories are padded to the longest with empty turns, so that the statistics of every turn are over all
    trajectories, as they are here.
    """
    centred = episode_level(batch, "mean", singleton=params.singleton)
    everything = np.zeros(len(batch), dtype=np.int64)
    stats = group_stats(centred[batch.first_rows], everything[batch.first_rows], 1)
    norm = "mean_std" if stats.std[0] > SMALLEST_STD else "mean"
    episode = normalize(centred, everything, stats, norm, 0.0)
    advantage = episode.clip(-params.clamp, params.clamp)
    return Credit.of_parts(
        {"episode_level": episode, "clipping": advantage - episode},
        batch.penalty,
        total=advantage,
        metrics={"credit/outcome/std": float(stats.std[0])},
        groups={"episode_level": batch.group},
    )
