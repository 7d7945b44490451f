import math


def rlsd(rows, base, training_step=1, lam=0.5, clip=0.2, decay_steps=100):
    """The advantages of each step's tokens; ``gaps`` of a row: those of its tokens."""
    share = lam if decay_steps is None else lam * max(0.0, 1 - training_step / decay_steps)
    result = []
    for row, advantage in zip(rows, base, strict=True):
        sign = (advantage > 0) - (advantage < 0)
        factors = [min(max(math.exp(sign * gap), 1 - clip), 1 + clip) for gap in row["gaps"]]
        result.append([advantage * ((1 - share) + share * factor) for factor in factors])
    return result
