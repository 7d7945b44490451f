"""Launch lines in pairs, one letter apart: one is refused or warned about, the other must not be.

As in ``launch_lines``: what follows ``BASE``, the words of the message between bars, and the line that is in order.
"""

from __future__ import annotations

LENGTH = "'turnkey.rewards=[{name: step},{name: length, weight: -0.01, unit: tokens}]'"

REFUSED_OR_NOT: list[tuple[str, str, str]] = [
    (
        "+turnkey=maxrl algorithm.use_kl_in_reward=True",
        "algorithm.use_kl_in_reward=true | maxrl | use_kl_loss=true",
        "+turnkey=maxrl actor_rollout_ref.actor.use_kl_loss=True",
    ),
]

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
]
