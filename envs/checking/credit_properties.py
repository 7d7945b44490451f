"""Properties of ``turnkey env-check`` that credit assignment reads: keys of states, rewards, actions."""

from __future__ import annotations

import math
from itertools import pairwise

from verl_turnkey.envs.checking.observations import Limits, Probe, Record, Verdict
from verl_turnkey.envs.checking.play import PROBE
from verl_turnkey.envs.checking.traces import shorten, world

# --- the key of the state --------------------------------------------------------------------------------------------


def state_key(record: Record, limits: Limits) -> Verdict:
    """``info["state_key"]`` is an int or a str, in every answer."""
    answers = record.answers()
    without = sum(answer.state_key is None for answer in answers)
    if without == len(answers):
        drawn = any(answer.images_key for answer in answers)
        seen = "text and images of observations are" if drawn else "text of observations is"
        return "warn", (
            f"there is none: the {seen} compared instead; states that look alike count as one, and "
            "a state that is worded or drawn differently counts as two"
        )
    if without:
        return "fail", f"absent from {without} of {len(answers)} answers"
    return "pass", f"{len({answer.state_key for answer in answers})} keys in {len(answers)} answers"


def key_stable(record: Record, limits: Limits) -> Verdict:
    """The same state gives the same key, on every instance and in every process."""
    places = {"another instance": record.fresh, "an instance that had played before": record.reused, **record.elsewhere}
    first = {trace.seed: trace for trace in record.first}
    for place, traces in (*places.items(), ("a clone", record.clones[1])):
        for other in traces:
            trace = first[other.seed]
            for t, (a, b) in enumerate(zip(trace.answers, other.answers, strict=False)):
                if a.state_key != b.state_key and world(a) == world(b):
                    return "fail", (
                        f"{place}, seed {trace.seed}, step {t}: {a.state_key!r}, then {b.state_key!r}; no hash(), no "
                        "addresses, no counters: verl_turnkey.envs.base.digest makes keys"
                    )
    return "pass", "the same in all replays"


def key_coarse(record: Record, limits: Limits) -> Verdict:
    """One key, one state: what can be done in it, and what an action leads to, is always the same."""
    offered: dict[tuple[int, object], object] = {}
    leads: dict[tuple[int, object, str], tuple[object, bool]] = {}
    for trace in record.played():
        for here, there, action in zip(trace.answers, trace.answers[1:], trace.actions, strict=False):
            if here.state_key is None:
                return "skip", "no state_key"
            choice = None if here.admissible is None else frozenset(here.admissible)
            if offered.setdefault((trace.seed, here.state_key), choice) != choice:
                return "warn", f"seed {trace.seed}: key {here.state_key!r} stands for two sets of admissible actions"
            result = (there.state_key, there.terminated)
            if leads.setdefault((trace.seed, here.state_key, action), result) != result:
                return "warn", (
                    f"seed {trace.seed}: {shorten(action)} in {here.state_key!r} does not always lead to the same "
                    "state: the key leaves something out, or the environment draws at random"
                )
    return "pass", f"{len(leads)} pairs of state and action"


def key_repeats(record: Record, limits: Limits) -> Verdict:
    """A state that comes back has the key it had: no step number, no wording in it."""
    if any(trace.answers[0].state_key is None for trace in record.first):
        return "skip", "no state_key"
    nothing_done = [
        (a.state_key, b.state_key) for trace in record.texts for a, b in pairwise(trace.answers) if b.invalid
    ]
    if len(nothing_done) > 2 and all(a != b for a, b in nothing_done):
        return "warn", f"it changed in each of {len(nothing_done)} steps whose action was invalid: a counter in it?"
    rate = record.anchor_rate(lambda answer: answer.state_key, start=False)
    if rate == 0.0:
        return "warn", "no state after the start was seen twice in the rollouts: gigpo finds nothing to compare"
    views_return = record.comes_back(lambda answer: answer.observation_key)
    if views_return and not record.comes_back(lambda answer: answer.state_key):
        return "warn", "observations come back at other steps, keys never do: a step number in it?"
    return "pass", f"shared by two or more rollouts: {rate:.2f} of the steps after the first"


def roles(record: Record, limits: Limits) -> Verdict:
    """The states of an episode name one role: prompts with a memory show each role what the others saw."""
    for trace in record.traces():
        named = {
            str(answer.role): None for answer in trace.answers if answer.role is not None and not answer.terminated
        }
        if len(named) > 1:
            return "warn", (
                f"seed {trace.seed}: an episode of the roles {', '.join(named)}: prompts with a memory would show each "
                "what the others saw and did. Training refuses them: set turnkey.rollout.prompt=template and "
                "turnkey.rollout.history=0"
            )
    return "pass", "no episode names more than one in info['extra']['role']"


# --- rewards and actions ---------------------------------------------------------------------------------------------


def reward(record: Record, limits: Limits) -> Verdict:
    """Rewards are finite numbers."""
    rewards = [answer.reward for trace in record.traces() for answer in trace.answers[1:]]
    return "pass", f"{min(rewards):g} to {max(rewards):g}" if rewards else "no step"


def reward_per_step(record: Record, limits: Limits) -> Verdict:
    """A reward is that of its step, not the sum so far.

    A meaningless action right after a reward must not earn that reward again. Where none can be tried, rewards that
    rise in more than one step and never fall are suspicious.
    """
    probes = [probe for probe in record.probes if probe.usable]
    if len(probes) > 1 and probes[0].last == 0.0:
        return _earned_again(probes[0], probes[1:])
    for trace in record.played():
        rewards = [answer.reward for answer in trace.answers[1:-1]]  # the last may rightly be higher than all others
        if _looks_summed(rewards):
            return "warn", f"seed {trace.seed}: rewards {rewards[-8:]} never fall: a running sum?"
    return "pass", "no sign of a running sum"


def _earned_again(at_start: Probe, after_rewards: list[Probe]) -> Verdict:
    """Does a meaningless action earn what the step before it earned?"""
    idle = at_start.reward
    telling = [probe for probe in after_rewards if probe.last != idle]
    if not telling or not all(math.isclose(probe.reward, probe.last) for probe in telling):
        return "pass", f"{PROBE!r} earns {idle:g} at the start and {after_rewards[-1].reward:g} after a reward"
    levels = sorted({probe.last for probe in telling})
    evidence = f"{PROBE!r} right after a reward of {levels} earned the same again: a running sum?"
    return ("fail" if len(levels) > 1 else "warn"), evidence


def _looks_summed(rewards: list[float]) -> bool:
    """Rewards that rise above one another, stay where they are at least once, and never fall."""
    levels = {reward for reward in rewards if reward}
    steps = list(pairwise(rewards))
    stayed = any(a == b != 0 for a, b in steps)
    return len(levels) > 1 and min(levels) > 0 and stayed and all(a <= b for a, b in steps)


def admissible(record: Record, limits: Limits) -> Verdict:
    """What ``admissible`` lists is accepted, and it lists something."""
    taken = 0
    for trace in record.played():
        for here, there, action in zip(trace.answers, trace.answers[1:], trace.actions, strict=False):
            if here.admissible is not None and action in here.admissible:
                taken += 1
                if there.invalid:
                    return "fail", f"seed {trace.seed}: {shorten(action)} is in admissible and came back as invalid"
        if trace.answers[-1].admissible == [] and not trace.ended:
            return "fail", f"seed {trace.seed}, step {len(trace.actions)}: admissible is empty, the episode goes on"
    if taken:
        return "pass", f"{taken} actions taken"
    answers = [answer for trace in record.played() for answer in trace.answers[1:]]
    refused = sum(answer.invalid for answer in answers)
    if answers and refused == len(answers):
        return "warn", (
            f"none of the {refused} words and numbers drawn was a valid action, so that little was seen of the "
            "environment: list the actions in info['admissible'], or add oracle()"
        )
    return "skip", f"no list of admissible actions; {refused} of {len(answers)} words and numbers drawn were invalid"


def invalid_text(record: Record, limits: Limits) -> Verdict:
    """A text outside of ``admissible`` is flagged as invalid, or changes and earns nothing."""
    flagged = harmless = 0
    for trace in record.texts:
        for here, there, action in zip(trace.answers, trace.answers[1:], trace.actions, strict=False):
            if here.admissible is None:
                return "skip", "no list of admissible actions: any text may be one"
            if there.invalid:
                flagged += 1
            elif there.state_key == here.state_key and there.reward <= 0:
                harmless += 1
            else:
                what = f"earned {there.reward:g}" if there.reward > 0 else "changed the state"
                return "fail", f"seed {trace.seed}: {shorten(action)} is not in admissible, was not flagged and {what}"
    return "pass", f"{flagged} flagged, {harmless} without effect"


def oracle(record: Record, limits: Limits) -> Verdict:
    """The actions of ``oracle()`` solve the task from the start."""
    if not record.oracle:
        return "skip", "no oracle() that knows"
    for trace in record.oracle:
        end = trace.answers[-1]
        if not (end.success if end.success is not None else end.terminated and end.reward > 0):
            return "fail", f"seed {trace.seed}: not solved after its {len(trace.actions)} actions"
    lengths = [len(trace.actions) for trace in record.oracle]
    return "pass", f"solved {len(lengths)} of {len(lengths)} episodes in {min(lengths)} to {max(lengths)} steps"
