from naive.common import less_penalties, trajectories
from naive.turn_gae import gae, turn_gae, turn_gae_returns, whitened


def vc_gae(rows, gamma=1.0, lam_actor=0.95, length_alpha=None, lam_critic=1.0, whiten="turns"):
    del lam_critic  # only the critic's targets feel it
    if length_alpha is None:
        return turn_gae(rows, gamma, lam_actor, whiten)
    advantages = [0.0] * len(rows)
    for members in trajectories(rows):  # one episode at a time: its own lambda
        lam = max(0.0, 1 - 1 / (length_alpha * len(members)))
        for i, value in zip(members, gae([rows[i] for i in members], gamma, lam), strict=True):
            advantages[i] = value
    return less_penalties(whitened(rows, advantages) if whiten == "turns" else advantages, rows)


def vc_gae_returns(rows, gamma=1.0, lam_critic=1.0):
    return turn_gae_returns(rows, gamma, lam_critic)
