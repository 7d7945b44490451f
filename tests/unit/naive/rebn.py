from naive.common import less_penalties, standardise, step_returns


def rebn(rows, gamma=0.9, std="sample", epsilon=1e-9):
    returns = step_returns(rows, gamma)
    return less_penalties([standardise(value, returns, "mean_std", epsilon, std) for value in returns], rows)
