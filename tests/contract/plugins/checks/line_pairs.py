"""Launch lines in pairs, one letter apart: one is refused or warned about, the other must not be.

As in ``launch_lines``: what follows ``BASE``, the words of the message between bars, and the line that is in order.
"""

from __future__ import annotations

LENGTH = "'turnkey.rewards=[{name: step},{name: length, weight: -0.01, unit: tokens}]'"

INVALID = "'turnkey.rewards=[{name: step},{name: invalid, weight: -0.1}]'"

REFUSED_OR_NOT: list[tuple[str, str, str]] = [
    (
        f"+turnkey=gigpo {INVALID}",
        "would count an invalid action twice",
        f"+turnkey=base algorithm.adv_estimator=grpo {INVALID}",
    ),
    (
        "+turnkey=maxrl algorithm.use_kl_in_reward=True",
        "algorithm.use_kl_in_reward=true | maxrl | use_kl_loss=true",
        "+turnkey=maxrl actor_rollout_ref.actor.use_kl_loss=True",
    ),
]

POTENTIAL = "'turnkey.rewards=[{{name: step}},{{name: potential, gamma: {}}}]' turnkey.env.probe=false"

WARNED_OR_NOT: list[tuple[str, str, str]] = [
    (f"+turnkey=maxrl {LENGTH}", "turnkey.rewards: length | maxrl | has a negative weight", "+turnkey=maxrl"),
    (
        f"+turnkey=mc_grpo {LENGTH}",
        "turnkey.rewards (length) | mc_grpo multiplies",
        f"+turnkey=grpo_steps {LENGTH}",
    ),
    (
        "+turnkey=mc_grpo algorithm.use_kl_in_reward=True",
        "algorithm.use_kl_in_reward=true | mc_grpo multiplies",
        "+turnkey=mc_grpo",
    ),
    (
        "+turnkey=base algorithm.adv_estimator=rloo",
        "algorithm.adv_estimator=rloo | +turnkey=rloo_steps | takes each row for a rollout",
        "+turnkey=base algorithm.adv_estimator=rloo data.train_files={tmp}/tool.parquet",
    ),
    (
        "+turnkey=base algorithm.adv_estimator=gpg",
        "+turnkey=grpo_steps | takes each row for a rollout",
        "+turnkey=base algorithm.adv_estimator=grpo",
    ),
    (
        f"+turnkey=gigpo {POTENTIAL.format(0.9)}",
        "potential with gamma=0.9 | set its gamma to 1.0 | changes which policy is best",
        f"+turnkey=gigpo {POTENTIAL.format(1.0)}",
    ),
    (
        f"+turnkey=base algorithm.adv_estimator=grpo {POTENTIAL.format(0.9)}",
        "potential with gamma=0.9 | since grpo compares outcomes without a discount",
        f"+turnkey=base algorithm.adv_estimator=grpo {POTENTIAL.format(1.0)}",
    ),
    (
        f"+turnkey=rebn turnkey.credit.gamma=0.95 {POTENTIAL.format(0.9)}",
        "turnkey.credit.gamma=0.95 | changes which policy is best",
        f"+turnkey=rebn turnkey.credit.gamma=0.9 {POTENTIAL.format(0.9)}",
    ),
    (
        "+turnkey=hgpo turnkey.rollout.history=4",
        "turnkey.credit.history=2 | turnkey.rollout.history=4 | give both the same number",
        "+turnkey=hgpo turnkey.rollout.history=4 turnkey.credit.history=4",
    ),
    (
        "+turnkey=tree +turnkey/loss=rebel turnkey.rollout.strategy=tree",
        "rebel | trains branches that share their beginning",
        "+turnkey=grpo_steps +turnkey/loss=rebel",
    ),
]
