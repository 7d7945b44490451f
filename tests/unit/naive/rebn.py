from naive.common import own_returns, standardise


def rebn(rows, gamma=0.9, std="sample", epsilon=1e-9):
    returns = own_returns(rows, gamma)
    return [standardise(value, returns, "mean_std", epsilon, std) for value in returns]
