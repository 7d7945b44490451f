from naive.turn_gae import turn_gae, turn_gae_returns


def vc_gae(rows, gamma=1.0, lam_actor=0.95, lam_critic=1.0, whiten="turns"):
    del lam_critic  # only the critic's targets feel it
    return turn_gae(rows, gamma, lam_actor, whiten)


def vc_gae_returns(rows, gamma=1.0, lam_critic=1.0):
    return turn_gae_returns(rows, gamma, lam_critic)
