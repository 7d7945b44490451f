"""Mutations of ``advantage/``."""

T = "tests/unit/advantage"
TESTS = {
    "advantage/hdpo.py": f"{T}/test_hdpo.py {T}/test_all_estimators.py",
    "advantage/proxmo.py": f"{T}/test_proxmo.py {T}/test_all_estimators.py",
    "advantage/record.py": f"{T}/test_record.py",
    "advantage/salt.py": f"{T}/test_salt.py {T}/test_all_estimators.py",
    "advantage/texts.py": f"{T}/test_gigpo.py {T}/test_all_estimators.py",
    "advantage/turn_gae.py": f"{T}/test_turn_gae.py {T}/test_vc_gae.py",
    "advantage/vc_gae.py": f"{T}/test_vc_gae.py",
}
MUTATIONS = [
    # --- these survived once
    (
        "advantage/texts.py",
        "matched = (common + (q - 1) * (total[possible] + 1)) / (2 * q - 1)",
        "matched = (common + (q - 1) * total[possible]) / (2 * q - 1)",
    ),
    ("advantage/columns.py", "(np.abs(array) >= 2**53).any()", "(np.abs(array) > 2**53).any()"),
    (
        "advantage/registry.py",
        "if set(credit.extra) != set(spec.gives):",
        "if not set(credit.extra) <= set(spec.gives):",
        f"{T}/test_compute_credit.py",
    ),
    # --- the table
    ("advantage/batch.py", 'nan_allowed=name == "value"', "nan_allowed=False", f"{T}/test_step_batch.py"),
    (
        "advantage/batch.py",
        "(trajectory[1:] == trajectory[:-1]) & (step[1:] == step[:-1])",
        "step[1:] == step[:-1]",
        f"{T}/test_step_batch.py",
    ),
    (
        "advantage/columns.py",
        "codes[nothing] = len(index) + np.arange(len(nothing))",
        "codes[nothing] = len(index)",
        f"{T}/test_step_batch.py",
    ),
    (
        "advantage/columns.py",
        "(array != np.floor(array)) | (array < 0)",
        "(array != np.floor(array))",
        f"{T}/test_step_batch.py",
    ),
    (
        "advantage/columns.py",
        'array.dtype.kind not in "biuf" or array.ndim != 1 or not np.isin(array, (0, 1)).all()',
        'array.dtype.kind not in "biuf" or array.ndim != 1',
        f"{T}/test_step_batch.py",
    ),
    (
        "advantage/columns.py",
        "return Set, frozenset(map(canonical, value))",
        "return tuple(map(canonical, value))",
        f"{T}/test_step_batch.py",
    ),
    # --- arithmetic
    (
        "advantage/segments.py",
        "for back in range(1, len(alive) - 1):",
        "for back in range(1, len(alive) - 2):",
        f"{T}/test_segments.py",
    ),
    (
        "advantage/segments.py",
        "first[1:] |= ends[runs.order[:-1]]",
        "first[1:] |= ends[runs.order[1:]]",
        f"{T}/test_turn_gae.py",
    ),
    (
        "advantage/segments.py",
        "result[final] = np.broadcast_to(last, values.shape)[final]",
        "result[final] = np.broadcast_to(last, values.shape)[runs.starts]",
        f"{T}/test_turn_gae.py",
    ),
    (
        "advantage/segments.py",
        "first * (second.max(initial=0) + 1) + second",
        "first * second.max(initial=0) + second",
        f"{T}/test_segments.py",
    ),
    (
        "advantage/segments.py",
        'np.maximum(count - (1 if std == "sample" else 0), 1)',
        'np.maximum(count - (1 if std == "population" else 0), 1)',
        f"{T}/test_segments.py {T}/test_rebn.py",
    ),
    ("advantage/segments.py", "constant = equal(low, high)", "constant = low == high", f"{T}/test_gigpo.py"),
    (
        "advantage/segments.py",
        "return np.where(spread > 0, centred / (spread + epsilon), 0.0)",
        "return centred / (spread + epsilon)",
        f"{T}/test_gigpo.py",
    ),
    (
        "advantage/segments.py",
        "ROUNDING * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))",
        "ROUNDING",
        f"{T}/test_segments.py",
    ),
    # --- estimators
    (
        "advantage/gigpo.py",
        "params.gamma) - batch.penalty",
        "params.gamma)",
        f"{T}/test_gigpo.py",
    ),
    (
        "advantage/gigpo.py",
        "episode + params.step_advantage_w * step",
        "params.step_advantage_w * (episode + step)",
        f"{T}/test_gigpo.py",
    ),
    (
        "advantage/hgpo.py",
        "(k + first_weight) ** params.alpha",
        "(k + first_weight) * params.alpha",
        f"{T}/test_hgpo.py",
    ),
    (
        "advantage/hgpo.py",
        'first_weight = 1 if params.weights == "paper" else 2',
        "first_weight = 1",
        f"{T}/test_hgpo.py",
    ),
    (
        "advantage/hgpo.py",
        "batch.runs, first=0).astype(bool)",
        "batch.runs, first=1).astype(bool)",
        f"{T}/test_hgpo.py",
    ),
    ("advantage/hgpo.py", "add(episode, 1.0)", "add(episode, first_weight)", f"{T}/test_hgpo.py"),
    ("advantage/proxmo.py", "-(rate**alpha)", "-((1 - rate) ** alpha)"),
    ("advantage/proxmo.py", "np.where(alone, 0.0, np.clip(stats.mean, 0.0, 1.0))", "np.clip(stats.mean, 0.0, 1.0)"),
    ("advantage/proxmo.py", "vectors.T) / temperature", "vectors.T) * temperature"),
    ("advantage/proxmo.py", "joint_codes(batch.group, batch.step)", "joint_codes(batch.step, batch.step)"),
    ("advantage/salt.py", "credit * n / np.maximum(n - 1, 1)", "credit * n / np.maximum(n, 1)"),
    ("advantage/salt.py", "takers[path] >= 2", "takers[path] > 2"),
    ("advantage/salt.py", "np.where(codes < len(ids), codes, TERMINAL)", "codes"),
    ("advantage/salt.py", "path, n = joint_codes(batch.group, edge)", "path, n = joint_codes(edge, edge)"),
    (
        "advantage/seeupo.py",
        ".clip(-params.clamp, params.clamp)",
        ".clip(None, params.clamp)",
        f"{T}/test_seeupo.py",
    ),
    ("advantage/seeupo.py", "stats.std[0] > SMALLEST_STD", "stats.std[0] > 0", f"{T}/test_seeupo.py"),
    (
        "advantage/turn_gae.py",
        "discounted_returns(delta, episodes, gamma * lam)",
        "discounted_returns(delta, episodes, lam)",
    ),
    ("advantage/turn_gae.py", "np.where(batch.terminated, 0.0, bootstrap)", "bootstrap"),
    ("advantage/turn_gae.py", "advantage[batch.tokens > 0]", "advantage[batch.tokens >= 0]"),
    ("advantage/turn_gae.py", "counted.var(ddof=1)", "counted.var()"),
    ("advantage/turn_gae.py", "advantage + batch.value - batch.penalty", "advantage + batch.value"),
    (
        "advantage/vc_gae.py",
        "gae(batch, params.gamma, params.lam_critic)",
        "gae(batch, params.gamma, params.lam_actor)",
    ),
    ("advantage/vc_gae.py", "params.lam_actor) - batch.penalty", "params.lam_actor)"),
    ("advantage/hdpo.py", "1.0 / (calls + 1.0)", "1.0 / np.maximum(calls, 1.0)"),
    (
        "advantage/hdpo.py",
        "group_stats(efficiency[solved], group[solved], batch.n_groups)",
        "group_stats(efficiency, group, batch.n_groups)",
    ),
    ("advantage/rebn.py", "everything, 1, params.std)", "everything, 1)", f"{T}/test_rebn.py"),
    # --- texts
    (
        "advantage/texts.py",
        "if match is None else possible[possible < likely]",
        "if match is None else possible[possible > likely]",
    ),
    ("advantage/texts.py", "(runs.get(j - 1, 0) if i == before + 1 else 0) + 1", "runs.get(j - 1, 0) + 1"),
    ("advantage/texts.py", "while 2.0 * matched / total < threshold:", "while 2.0 * matched / total <= threshold:"),
    # --- records and parameters
    ("advantage/record.py", 'if not 0 <= entry["penalty"] < math.inf:', 'if not entry["penalty"] < math.inf:'),
    ("advantage/record.py", "    elif steps:\n", "    elif len(steps) > 1:\n"),
    ("advantage/record.py", "if len(steps) > 1 and len(numbers", "if len(steps) > 2 and len(numbers"),
    (
        "advantage/params.py",
        "hint is float and isinstance(value, Real) and not isinstance(value, bool)",
        "hint is float and isinstance(value, Real)",
        f"{T}/test_params.py",
    ),
    (
        "advantage/params.py",
        "if value == choice and isinstance(value, bool) == isinstance(choice, bool):",
        "if value == choice:",
        f"{T}/test_params.py",
    ),
    (
        "advantage/registry.py",
        "np.shape(array) != (len(batch),) or not np.isfinite(array).all()",
        "np.shape(array) != (len(batch),)",
        f"{T}/test_compute_credit.py",
    ),
    ("advantage/metrics.py", "np.mean(size[codes] >= 2)", "np.mean(size[codes] > 2)", f"{T}/test_gigpo.py"),
]
