from naive.common import leave_one_out, less_penalties


def rloo_steps(rows, scope="outcomes", singleton="zero"):
    return less_penalties(leave_one_out(rows, scope, singleton), rows, scope)
