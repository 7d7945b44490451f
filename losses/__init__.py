"""Policy losses over turns (torch only).

The losses of verl itself (``vanilla``, ``gspo``, ...) are selected by verl's own key
``actor_rollout_ref.actor.policy_loss.loss_mode`` and combine with every estimator of this package.
"""
