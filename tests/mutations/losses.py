"""Mutations of ``losses/``."""

TESTS: dict[str, str] = {}  # all of tests/unit/losses, which take seconds
SEEUPO = "tests/unit/losses/test_accumulated_ratio.py"
MUTATIONS = [
    ("losses/importance.py", "(weight <= high) & ", ""),
    ("losses/importance.py", "return weight.clamp(max=high), inside", "return weight, inside"),
    # --- these survived once
    (
        "losses/clipping.py",
        "torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)",
        "torch.minimum(loss, -dual_clip * advantages)",
    ),
    (
        "losses/clipping.py",
        "of_tokens = ratio[inputs.mask] if inputs.mask.any() else ratio.new_ones(1)",
        "of_tokens = ratio.flatten()",
    ),
    ("losses/clipping.py", "((advantages < 0) & (ratio < 1 - low))", "((advantages <= 0) & (ratio < 1 - low))"),
    # --- clipping
    (
        "losses/clipping.py",
        "ratio.clamp(1 - low, 1 + high) * advantages",
        "ratio.clamp(1 - high, 1 + low) * advantages",
    ),
    ("losses/clipping.py", "(inputs.advantages < 0) & (ratio > dual_clip)", "ratio > dual_clip"),
    ("losses/clipping.py", '"ppo_kl": -log_ratio.sum() / tokens', '"ppo_kl": log_ratio.sum() / tokens'),
    ("losses/clipping.py", "((advantages > 0) & (ratio > 1 + high))", "((advantages > 0) & (ratio > 1 + low))"),
    (
        "losses/clipping.py",
        "clipped(ratio, inputs.advantages, low, high) & inputs.mask\n    return",
        "ratio > 1\n    return",
    ),
    ("losses/clipping.py", "dual_clip), bias, ratio.detach(), outside)", "dual_clip), bias, ratio, outside)"),
    ("losses/clipping.py", "check(0 <= low < 1,", "check(0 <= low <= 1,"),
    # --- the losses
    ("losses/a3po.py", "proximal = a * log_ratio.detach()", "proximal = a * log_ratio"),
    ("losses/a3po.py", "(distance - 1) / distance.clamp(min=1)", "distance / (distance + 1)"),
    ("losses/a3po.py", "kept = weight <= (", "kept = ratio <= ("),
    ("losses/sdar.py", "params.beta * gap.detach()", "params.beta * gap"),
    ("losses/sdar.py", "params.coefficient * with_text * gate", "params.coefficient * gate"),
    ("losses/skill_sd.py", "divergence = with_text * log_ratio", "divergence = with_text * log_ratio.detach()"),
    ("losses/skill_sd.py", "divergence = with_text * ", "divergence = "),
    ("losses/sdpo_sampled.py", ".detach().clamp(max=params.is_clip)", ".clamp(max=params.is_clip)"),
    ("losses/sdpo_sampled.py", "inputs.weight * importance * pull", "importance * pull"),
    ("losses/dgpo.py", "params.n * (fixed - math.log(low))", "(fixed - math.log(low)) / params.n"),
    ("losses/dgpo.py", "(math.log(high) - fixed) / params.m", "(math.log(high) - fixed) * params.m"),
    ("losses/dgpo.py", "fixed = log_ratio.detach()", "fixed = log_ratio"),
    (
        "losses/dgpo.py",
        "torch.where(inputs.advantages < 0, below, above)",
        "torch.where(inputs.advantages > 0, below, above)",
    ),
    ("losses/hdpo.py", '(inputs.extra["tool_advantages"] != 0)', '(inputs.extra["tool_advantages"] > 0)'),
    ("losses/hdpo.py", "params.tool_w * inputs.weight * tool", "params.tool_w * tool"),
    ("losses/psft.py", "replace(inputs, advantages=torch.ones_like(inputs.advantages))", "replace(inputs)"),
    ("losses/rebel.py", "params.eta * (rewards - mean_reward)", "(params.eta * rewards - mean_reward)"),
    ("losses/rebel.py", "(gap[rows] ** 2).mean().item() if rows.any() else 0.0", "(gap**2).mean().item()"),
    ("losses/seeupo.py", "(ratio.double() * of_turn).clamp(low, high)", "(ratio.double() * of_turn)", SEEUPO),
    ("losses/seeupo.py", "mask.sum(1).clamp(min=1)", "mask.shape[1]", SEEUPO),
    ("losses/seeupo.py", ".exp().clamp(low, high)", ".exp()", SEEUPO),
    (
        "losses/segment_mask.py",
        "inputs.old_log_prob.exp() < params.threshold",
        "inputs.log_prob.exp() < params.threshold",
    ),
    ("losses/segment_mask.py", "seen = replace(inputs, mask=kept)", "seen = inputs"),
    ("losses/segment_mask.py", "if params.drop_zeros else unsure", "if not params.drop_zeros else unsure"),
    ("losses/st_ppo.py", 'if self.divide == "above_one" else norm', 'if self.divide == "always" else norm'),
    (
        "losses/st_ppo.py",
        "torch.where(where, ratio * inputs.advantages, 0.0)",
        "torch.where(where, inputs.advantages, 0.0)",
    ),
    (
        "losses/st_ppo.py",
        "return _with_bias(inputs, log_ratio.exp(), params)",
        "return _with_bias(inputs, log_ratio, params)",
    ),
    (
        "losses/st_ppo.py",
        "turns.mean(inputs.log_prob - inputs.old_log_prob)",
        "turns.sum(inputs.log_prob - inputs.old_log_prob)",
    ),
    ("losses/turn_ratio.py", "slope * (per_turn.abs() < MAX_LOG_RATIO)", "slope"),
    ("losses/turn_ratio.py", "turns.spread(1 / turns.tokens.to(", "turns.spread(turns.tokens.to("),
    (
        "losses/turn_ratio.py",
        'torch.ones_like(per_turn) if params.ratio == "geometric" else turns.tokens.to(per_turn.dtype)',
        "torch.ones_like(per_turn)",
    ),
    (
        "losses/turn_ratio.py",
        "loss = surrogate(ratio, inputs.advantages, *clip)",
        "loss = surrogate(ratio, inputs.advantages, *clip[:2])",
    ),
    # --- turns
    ("losses/turns.py", "flat & (~before | row_start)", "flat & ~before"),
    ("losses/turns.py", "(of_row.max() + 1 if len(flat) else 1)", "(of_row.max() if len(flat) else 1)"),
    ("losses/turns.py", "number[first] - starts[first].long()", "number[first]"),
    # --- what every loss goes through
    ("losses/registry.py", "if spec.per_row else mask\n", "if not spec.per_row else mask\n"),
    ("losses/registry.py", "torch.where(total > 0, mask.sum() / total, 0.0)", "mask.sum() / total"),
    ("losses/tensors.py", "clean(old_log_prob).detach()", "clean(old_log_prob)"),
    ("losses/tensors.py", "(shape[:1],) if spec.per_row else (shape, shape[:1])", "(shape, shape[:1])"),
    ("losses/tensors.py", "torch.where(mask, tensor.to(dtype), 0.0)", "tensor.to(dtype) * mask"),
    ("losses/tensors.py", "torch.float64 if log_prob.dtype == torch.float64 else torch.float32", "log_prob.dtype"),
    (
        "losses/registry.py",
        "inputs.extra[WEIGHT_SHARE] if WEIGHT_SHARE in inputs.extra else _share(inputs.mask, weight)",
        "_share(inputs.mask, weight)",
    ),
]
