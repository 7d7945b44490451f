"""Policy losses: they turn advantages into an update of the policy.

>>> import torch
>>> from verl_turnkey.losses import policy_loss
>>> ones = torch.ones(1, 4)
>>> loss, metrics = policy_loss(
...     "turn_ratio", log_prob=-ones, old_log_prob=-ones, advantages=ones, response_mask=torch.tensor([[1, 1, 0, 1]])
... )
>>> loss
tensor(-1.)
"""

from verl_turnkey.losses import (  # noqa: F401  importing a loss registers it
    a3po,
    dgpo,
    hdpo,
    psft,
    rebel,
    sdar,
    sdpo_sampled,
    segment_mask,
    skill_sd,
    st_ppo,
    turn_ratio,
)
from verl_turnkey.losses.registry import LossInputs, LossSpec, TokenLoss, losses, policy_loss, register_loss
from verl_turnkey.losses.turns import Turns, turn_ids

__all__ = ["LossInputs", "LossSpec", "TokenLoss", "Turns", "losses", "policy_loss", "register_loss", "turn_ids"]
