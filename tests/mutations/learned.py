"""Mutations of learned/; what the fields are, says run.py."""

TESTS: dict[str, str] = {}

MUTATIONS = [
    ("learned/preference.py", "(of.group[:, None] == of.group) & of.positive", "of.positive"),
    ("learned/preference.py", 'if params.weigh == "group"', 'if params.weigh != "group"'),
    ("learned/preference.py", "return -(weight * logsigmoid(gap))", "return (weight * logsigmoid(gap))"),
    ("learned/preference.py", "of.value[good] - of.value[bad]", "of.value[bad] - of.value[good]"),
    ("learned/sum_to_outcome.py", "ObjectiveParams(beta=1.0)", "params"),
    ("learned/outcome_ce.py", "(of.value > 0) == of.positive", "of.value > 0"),
    ("learned/trajectories.py", 'if params.over == "mean"', 'if params.over == "sum"'),
    ("learned/trajectories.py", 'if "success" not in table.given', 'if "success" in table.given'),
    ("learned/trajectories.py", "params.beta * q.new_zeros", "q.new_zeros"),
    ("learned/registry.py", "if not len(numbers):\n        return None\n", ""),
    ("learned/registry.py", "dtype=torch.float64).detach().clone()", "dtype=torch.float32).detach().clone()"),
]
