"""What parts, levels and groups of credit mean: one sentence per name, for logs and pages that show them."""

from __future__ import annotations

import re

from verl_turnkey.advantage.modifying import modifiers

#: By name; ``<k>`` is any whole number, ``<method>/<name>`` the meaning in one method of a name that others have, too.
MEANINGS = {
    # parts; a group of the same name: the steps that it compared
    "penalty": "Subtracted from the step itself for an invalid action.",
    "method": "The credit of a method that does not name its parts.",
    "episode_level": "The outcome of the trajectory against the outcomes of its group.",
    "progress/episode_level": "What the step added to the policy's own expected return.",
    "information_gain/episode_level": "The outcome against those of the group, discounted back from the last turn.",
    "step_level": "The step against the steps that it is compared with, with the weight of this level.",
    "progress/step_level": "What the step added to the return that the prover expects, with its weight.",
    "information_gain/step_level": "This turn's and later gains of information, against the gains of the group.",
    "graph/step_level": "Where the step led on the graph of states, against the steps taken in the same state.",
    "loo_td/step_level": "What followed the step, minus what other episodes expect there with as many turns left.",
    "rtmc/step_level": "The mean outcome after the action in this state, against the value of the state.",
    "step_potential/step_level": "The rise of the potential, against the steps of the batch.",
    "level_<k>": "The step against steps with the same state and <k> states before it, with the weight of this level.",
    "role_level": "The return or outcome of the role that took the step, against its baseline.",
    "root_level": "The leaves below the step against all leaves of the group.",
    "parent_level": "The value of the step against that of the step before it, by the leaves or the children of each.",
    "tree_level": "The leaves below the step against the leaves of its tree.",
    "fork_level": "The leaves below the step against those below its siblings, with the weight of this level.",
    "sibling_level": "The score of the step against those of the other candidates for the same turn.",
    "trajectory_credit": "The outcome of the trajectory against its group, before sharing.",
    "edge_level": "The change from sharing credit among all trajectories that took the same step.",
    "graph/edge_level": "The rise of the state's value over the step, against those of all steps of the group.",
    "gae": "Generalized advantage estimate: this and later TD errors, discounted; whitened if configured.",
    "action_stream": "The advantage of the action, by the critic of actions.",
    "clipping": "The change from clipping the advantage to its bounds.",
    "whitening": "The shift that gives all tokens of the batch mean 0.",
    # levels
    "return": "Discounted sum of the rewards from this step on.",
    "role_return": "Discounted sum of the rewards of the step's role from this step on.",
    "weight_of_level_<k>": "Share of all weights that the level of <k> earlier states has in this step.",
    "weight_of_episode_level": "Share of all weights that the episode level has in this step.",
    "outcome_weight": "Factor of the episode level, by the success rate of the group.",
    "value": "What the critic expects from this turn on.",
    "td_error": "The change of the critic's expectation over the turn, including its reward.",
    "subgoal_stream": "The advantage of the subgoal that begins here, by the critic of subgoals.",
    "switch_stream": "The advantage of keeping or switching the subgoal, by its critic.",
    "role_advantage": "The outcome of the role's episode minus the role's baseline, before discounting.",
    "role_baseline": "The moving average of the role's outcomes that this outcome was compared with.",
    "child_mean": "Mean value of the next steps in the tree, or the outcome at a leaf.",
    "leaf_mean": "Mean outcome of the leaves of the tree below the step.",
    "state_value": "What is expected from the state before the step, by the graph of the group's states.",
    "loo_td/state_value": "What other episodes of the group expect from the state with as many turns left.",
    "rtmc/state_value": "Mean outcome after the state, over its actions and smoothed towards the group's mean outcome.",
    "action_value": "Mean discounted outcome of the trajectories that took the action in this state.",
    "distance": "Steps from the state before the step to success, on the shortest path of the group.",
    "tool": "Advantage of few tool calls, among the solved trajectories of the group.",
    "turn_value": "Expected return before the step, from the environment or the agent loop.",
    "prover_value": "Expected return of the prover before the step.",
    "turn_reward": "The turn's gain of information, or the outcome on the last turn.",
    "potential": "Estimate of success after the step.",
    "potential_gain": "The rise of the potential, scaled and centred over the batch, before its weight.",
    "saturation_factor": "Share of the outcome's advantage that remains after earlier steps of high potential.",
    # levels of modifiers
    "a_grae/group_factor": "Factor of the credit by the success rate of the group.",
    "agent_opsd/belief_change": "How far the teacher's gaps in this turn moved the belief in success.",
    "copo/method_weight": "Weight of the method's credit; the rest is the group's outcome against other groups.",
    "dynamo_modulation/calm": "Factor of the credit, smaller if the step would change the entropy strongly.",
    "dynamo_modulation/gain": "Factor of positive credit, larger if the policy was certain.",
    "empg/bonus": "Added if the policy is certain of the next step.",
    "empg/gain": "Factor of the credit, larger if the policy was certain.",
    "grsd/factor": "Factor of the credit by the teacher's mean gap, against the turns of the group.",
    "hcapo/hindsight_ratio": "How likely the turn is in hindsight, against the turns of its trajectory.",
    "hcapo/hindsight_value": "The discounted outcome, times the ratio in hindsight.",
    "rank_shaping/phi": "Shaping term of the hidden states' effective rank, before the bound by the advantage.",
    "trace/gain": "How much closer the turn brought the policy to the gold answer, as a log-ratio.",
    "trace/term": "The mean of this and the next gains, and near the end the discounted outcome, before its weight.",
    "unlikeliness/reward_factor": "Factor of the rewards, smaller if the trajectory is likely under the policy.",
}


def describe_part(name: str, method: str = "") -> str | None:
    """The meaning of a part, level or group ``name`` of credit by ``method``, in a sentence; None if unknown."""
    if name in modifiers():
        return f"What the modifier {name} changed: it {modifiers()[name].summary}."
    numbers = re.findall(r"\d+", name)
    pattern = re.sub(r"\d+", "<k>", name)
    meaning = MEANINGS.get(f"{method}/{name}") or MEANINGS.get(name) or MEANINGS.get(pattern)
    return meaning.replace("<k>", numbers[0]) if meaning and numbers else meaning
