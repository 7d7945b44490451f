"""The properties that ``turnkey env-check`` judges: one function each, from what was seen to a verdict."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from verl_turnkey.envs.checking.play import PROBE, THREADS
from verl_turnkey.envs.checking.traces import (
    Limits,
    Probe,
    Record,
    Status,
    Trace,
    Verdict,
    difference,
    seconds,
    shorten,
    start,
    world,
)

UNREACHED = "the check did not get that far"
SEEDED = "the seed alone must decide: draw from self.np_random, and use no clock and no global state"
NO_ACTIONS = "list the actions in info['admissible'], name some with --action, or add oracle()"
MORE_ACTIONS = "list the actions in info['admissible'], name others with --action, or use more in oracle()"
LEFT_OUT = "the key leaves something out, or the environment draws at random"
NEW_START = "reset must restore everything, even what instances share"
OF_A_PROCESS = "something depends on hash(), the order of a set, or other state of the process"
RUNNING_SUM = "if this is a running sum, return what the step alone earned"
GYMNASIUMS_FORM = (
    "reset(self, *, seed=None, options=None) must begin with super().reset(seed=seed), draw from self.np_random and "
    "return (observation, info); step(self, action) must return (observation, reward, terminated, truncated, info)"
)


@dataclass(frozen=True)
class Finding:
    """The verdict on one property. ``skip``: it does not apply, or could not be judged."""

    property: str
    status: Status
    evidence: str


def makes(record: Record, limits: Limits) -> Verdict:
    """The environment can be made, several times in one process."""
    return "pass", f"made {len(record.making)} instances"


def runs(record: Record, limits: Limits) -> Verdict:
    """``reset``, ``step`` and ``close`` do not raise, answer in gymnasium's form and leave the process alive."""
    traces = record.traces()
    return "pass", f"{len(traces)} episodes, {sum(len(trace.actions) for trace in traces)} steps"


def any_text(record: Record, limits: Limits) -> Verdict:
    """No text makes ``step`` raise: empty, control characters, 100 kB."""
    return "pass", f"{sum(len(trace.actions) for trace in record.texts)} odd texts"


def deadline(record: Record, limits: Limits) -> Verdict:
    """The slowest step stays below ``turnkey.env.step_timeout``, making and resetting below ``reset_timeout``."""
    resets, steps = seconds(record.traces())
    slowest = (
        ("reset", max(resets) + max(record.making), limits.reset),
        ("step", max(steps, default=0.0), limits.step),
    )
    evidence = ", ".join(f"slowest {kind} {duration:.2g} s of {limit:g} s" for kind, duration, limit in slowest)
    if any(duration > limit for _, duration, limit in slowest):
        return "fail", f"{evidence}: raise turnkey.env.reset_timeout or step_timeout, or make it faster"
    if any(duration > limit / 2 for _, duration, limit in slowest):
        return "warn", f"{evidence}: little room on a busy machine"
    return "pass", evidence


def gymnasium(record: Record, limits: Limits) -> Verdict:
    """gymnasium's own ``check_env`` passes."""
    assert record.gymnasium is not None
    fault, spaces = record.gymnasium
    if fault:
        return "fail", f"{fault}; {GYMNASIUMS_FORM}"
    if spaces:
        return "warn", f"only with the spaces verl_turnkey.envs.base.AnyText; with its own: {spaces}"
    return "pass", "check_env found nothing"


# --- what it answers -------------------------------------------------------------------------------------------------


def observation(record: Record, limits: Limits) -> Verdict:
    """Observations are text."""
    lengths = [len(answer.observation) for answer in record.answers()]
    return "pass", f"{min(lengths)} to {max(lengths)} characters"


def info(record: Record, limits: Limits) -> Verdict:
    """``info`` is a dict with values of the right types, and no key of it looks misspelt."""
    if misspelt := record.misspelt():
        return "warn", misspelt
    trace = record.first[0]
    names = ("admissible", "success")
    absent = [name for name in names if all(getattr(answer, name) is None for answer in trace.answers)]
    absent += ["task"] * (not trace.task)
    return "pass", f"without {', '.join(absent)}" if absent else "with admissible, success and task"


def flags(record: Record, limits: Limits) -> Verdict:
    """An episode ends terminated or truncated, never both."""
    ends: Counter[str] = Counter()
    for trace in record.traces():
        for t, answer in enumerate(trace.answers):
            if answer.terminated and answer.truncated:
                both = f"seed {trace.seed}, step {t - 1}: terminated and truncated are both set"
                return "fail", f"{both}; set truncated only where the step limit ends the episode"
        if trace.ended:
            ends["terminated" if trace.answers[-1].terminated else "truncated"] += 1
    return "pass", ", ".join(f"{n} {kind}" for kind, n in sorted(ends.items())) or "none ended"


def after_end(record: Record, limits: Limits) -> Verdict:
    """A step after the end raises, so that a loop that misses the end is noticed."""
    if record.after_end is None:
        if any(trace.ended for trace in record.traces()):
            return "skip", "the episode that ended did not end when it was played again"
        return "skip", "none ended; more --steps may help"
    if record.after_end:
        return "warn", f"a step after the end gave {record.after_end}; raise an exception instead"
    return "pass", "it raises"


# --- repetition: one seed and the same actions give one episode, anywhere ---------------------------------------------


def group(record: Record, limits: Limits) -> Verdict:
    """Instances that are reset with one seed show one task and one first observation."""
    for first, other in zip(*record.new_instances(), strict=True):
        if unlike := start(first, other):
            return "fail", f"two new instances, {unlike}; {SEEDED}"
    return "pass", f"{len(record.first)} seeds, same task and first observation each time"


def seed(record: Record, limits: Limits) -> Verdict:
    """The same seed and actions give the same episode on another new instance."""
    return _same(*record.new_instances(), "two new instances", SEEDED)


def reuse(record: Record, limits: Limits) -> Verdict:
    """The same on an instance, and in a process, that has played other episodes before: they leave nothing behind."""
    first = {trace.seed: trace for trace in record.first}
    for trace in (*record.group, *record.oracle, *record.texts):
        if unlike := start(first[trace.seed], trace):
            return "fail", f"an instance that had played before, {unlike}; {NEW_START}"
    verdict = _same(record.first, record.reused, "an instance that had played before", NEW_START)
    if verdict[0] == "fail" or not record.in_new_process:
        return verdict
    return _same(record.in_new_process, record.first, "a process that had played before", NEW_START)


def processes(record: Record, limits: Limits) -> Verdict:
    """The same in other processes, whose ``PYTHONHASHSEED`` differs."""
    verdict: Verdict = "skip", "one process only"
    for place, traces in record.elsewhere.items():
        verdict = _same(record.first, traces, place, OF_A_PROCESS)
        if verdict[0] == "fail":
            return verdict
    return ("pass", f"{len(record.elsewhere)} processes") if verdict[0] == "pass" else verdict


def seeds_differ(record: Record, limits: Limits) -> Verdict:
    """Different seeds give different starts."""
    if len(record.first) < 2:
        return "skip", "one seed only"
    starts = {(trace.task, trace.answers[0].observation_key, trace.answers[0].state_key) for trace in record.first}
    if len(starts) > 1:
        return "pass", f"{len(starts)} starts of {len(record.first)} seeds"
    after: dict[tuple[str, ...], object] = {}
    for trace in record.played():
        for t, answer in enumerate(trace.answers):
            if after.setdefault(tuple(trace.actions[:t]), world(answer)) != world(answer):
                return "pass", f"{len(record.first)} seeds start alike, but the same actions lead to different states"
    return "warn", (
        f"{len(record.first)} seeds, one start, and no difference was seen with these actions: either the seed changes "
        "nothing (right for a single fixed task; otherwise reset(seed) must draw the task from self.np_random), or "
        "these actions do not show what it changes"
    )


def clone(record: Record, limits: Limits) -> Verdict:
    """A clone made in the middle goes on as the original does, and neither disturbs the other."""
    how, clones = record.clones
    if not clones:
        return "skip", "one process only"
    first = {trace.seed: trace for trace in record.first}
    advice = f"it was made by {how}, which must take everything along and share nothing"
    for number, who in enumerate(("a clone made half-way", "what was cloned half-way")):
        verdict = _same([first[trace.seed] for trace in clones[number::2]], clones[number::2], who, advice)
        if verdict[0] != "pass":
            return verdict
    return "pass", f"by {how}: {len(clones) // 2} made, {verdict[1]}"


def threads(record: Record, limits: Limits) -> Verdict:
    """With ``metadata["thread_safe"]``: several instances in threads of one process play as they do one by one."""
    if record.threads is None:
        return "skip", "metadata['thread_safe'] is not True: every instance gets a process of its own"
    first = {trace.seed: trace for trace in record.first}
    verdict = _same([first[trace.seed] for trace in record.threads], record.threads, f"{THREADS} threads", "")
    if verdict[0] == "fail":
        return "fail", verdict[1] + "metadata['thread_safe'] must be False"
    return ("pass", f"{THREADS} threads, {len(record.threads)} episodes") if verdict[0] == "pass" else verdict


def _same(originals: Iterable[Trace], others: Iterable[Trace], where: str, advice: str) -> Verdict:
    steps, valid = 0, set[str]()
    for first, other in zip(originals, others, strict=True):
        steps += len(first.actions)
        valid |= first.valid_actions()
        if unlike := start(first, other) or difference(first.answers, other.answers, first):
            return "fail", f"{where}, {unlike}; {advice}"
        if len(first.answers) != len(other.answers):
            lengths = f"{len(first.answers) - 1} steps, then {len(other.answers) - 1}"
            return "fail", f"{where}, seed {first.seed}: {lengths}; {advice}"
    if not valid:
        return "skip", f"none of the {steps} actions was valid, so only the starts were compared: {NO_ACTIONS}"
    return "pass", f"{steps} steps alike; distinct valid actions: {len(valid)}"


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
        return "fail", f"absent from {without} of {len(answers)} answers: return it after every reset and step"
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
    """One key, one state: what can be done in it, and what an action leads to, is always the same.

    Rewards may depend on the step number, which no key has: they are compared at equal steps. Observations may show
    what matters no longer, such as the moves so far; where it matters, one of the others differs.
    """
    if any(trace.answers[0].state_key is None for trace in record.first):
        return "skip", "no state_key"
    if apart_under_one_key := record.apart_under_one_key():
        step, left, right = apart_under_one_key
        return "warn", (
            f"the key never changes in an episode, though rollouts differ (seed {step.seed}, step {step.number}: "
            f"{left} in one, {right} in another), so gigpo sees one state per task: include in the key whatever "
            "actions change and the agent learns"
        )
    offered: dict[tuple[int, object], object] = {}
    leads: dict[tuple[int, object, str], tuple[object, bool]] = {}
    rewards: dict[tuple[int, int, object, str], str] = {}
    for step, here, action, there in record.steps():
        state = (step.seed, here.state_key)
        choice = None if here.admissible is None else frozenset(here.admissible)
        if offered.setdefault(state, choice) != choice:
            return "warn", (
                f"seed {step.seed}: key {here.state_key!r} stands for two sets of admissible actions: add to the key "
                "what they depend on"
            )
        result = (there.state_key, there.terminated)
        if leads.setdefault((*state, action), result) != result:
            return "warn", (
                f"seed {step.seed}: {shorten(action)} in {here.state_key!r} does not always lead to the same state: "
                f"{LEFT_OUT}"
            )
        now = repr(there.reward)  # NaN is equal to itself
        before = rewards.setdefault((step.seed, step.number, here.state_key, action), now)
        if before != now:
            return "warn", (
                f"seed {step.seed}, step {step.number}: {shorten(action)} in {here.state_key!r} gives reward {before} "
                f"in one episode, {now} in another: {LEFT_OUT}"
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
    if math.isnan(rate):
        return "skip", "no episode had a second action"
    if rate == 0.0:
        return "warn", "no state after the start was seen twice in the rollouts: gigpo finds nothing to compare"
    views_return = record.comes_back(lambda answer: answer.observation_key)
    if views_return and not record.comes_back(lambda answer: answer.state_key):
        return "warn", "observations come back at other steps, keys never do: a step number in it?"
    return "pass", f"shared by two or more rollouts: {rate:.2f} of the steps after the first"


def images(record: Record, limits: Limits) -> Verdict:
    """Equal states are drawn alike: what the picture shows and the key lacks belongs to the state, or is noise."""
    answers = record.answers()
    shapes = Counter(shape for answer in answers for shape in answer.info["images"])
    if not shapes:
        return "pass", "none"
    drawn: dict[tuple[int, object], str] = {}
    for trace in record.traces():
        for answer in trace.answers:
            if answer.state_key is None:
                continue
            if drawn.setdefault((trace.seed, answer.state_key), answer.images_key) != answer.images_key:
                return "warn", f"seed {trace.seed}: the state {answer.state_key!r} is drawn in two ways"
    sizes = ", ".join(f"{number} of {shape} pixels" for shape, number in shapes.most_common(3))
    keys = "equal states are drawn alike" if drawn else "no state_key says whether equal states are drawn alike"
    return "pass", f"{sizes}, {len({answer.images_key for answer in answers})} different; {keys}"


def roles(record: Record, limits: Limits) -> Verdict:
    """Whose move it is, and who is paid, is one of the declared roles."""
    for trace in record.traces():
        named = {str(answer.role): None for answer in trace.answers if answer.role is not None}
        if len(named) > 1 and not trace.roles:
            return "warn", (
                f"seed {trace.seed}: an episode of the roles {', '.join(named)}: declare them in metadata['roles'], so "
                "that each can be paid, and a method that mixes them is known before a run"
            )
    declared = next((trace.roles for trace in record.traces() if trace.roles), ())
    return "pass", f"{', '.join(declared)}, each with a memory of its own" if declared else "one player"


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
            return "warn", f"seed {trace.seed}: rewards {rewards[-8:]} never fall: {RUNNING_SUM}"
    return "pass", "no sign of a running sum"


def _earned_again(at_start: Probe, after_rewards: list[Probe]) -> Verdict:
    """Does a meaningless action earn what the step before it earned?"""
    idle = at_start.reward
    telling = [probe for probe in after_rewards if probe.last != idle]
    if not telling or not all(math.isclose(probe.reward, probe.last) for probe in telling):
        after = f"{after_rewards[-1].reward:g} right after a reward"
        return "pass", f"an invalid action earns {idle:g} at the start and {after}, so rewards are not cumulative"
    levels = sorted({probe.last for probe in telling})
    evidence = f"{PROBE!r} right after a reward of {levels} earned the same again: {RUNNING_SUM}"
    return ("fail" if len(levels) > 1 else "warn"), evidence


def _looks_summed(rewards: list[float]) -> bool:
    """Rewards that rise above one another, stay where they are at least once, and never fall."""
    levels = {reward for reward in rewards if reward}
    steps = list(pairwise(rewards))
    stayed = any(a == b != 0 for a, b in steps)
    return len(levels) > 1 and min(levels) > 0 and stayed and all(a <= b for a, b in steps)


def admissible(record: Record, limits: Limits) -> Verdict:
    """What ``admissible`` lists is accepted, and something is; without a list, enough valid actions were played."""
    taken: list[str] = []
    for step, here, action, there in record.steps():
        if here.admissible is not None and action in here.admissible:
            taken.append(action)
            if there.invalid:
                listed = f"seed {step.seed}: {shorten(action)} is in admissible and came back as invalid"
                return "fail", f"{listed}: accept it, or do not list it"
    for trace in record.played():
        if trace.answers[-1].admissible == [] and not trace.ended:
            empty = f"seed {trace.seed}, step {len(trace.actions)}: admissible is empty, the episode goes on"
            return "fail", f"{empty}: end the episode, or list what can be done"
    if taken:
        evidence = f"{len(taken)} actions taken, {len({*taken})} distinct"
        if record.named_actions and all(here.admissible is not None for _, here, *_ in record.steps()):
            evidence += "; --action had no effect, as all actions are drawn from the list"
        return "pass", evidence
    steps = [(action, there) for _, _, action, there in record.steps()]
    valid = {action: there for action, there in steps if not there.invalid}
    refused = sum(there.invalid for _, there in steps)
    if steps and not valid:
        return "warn", (
            f"none of the {refused} words and numbers drawn was a valid action, so little of the environment was "
            f"seen: {NO_ACTIONS}"
        )
    if valid and (little := _little_seen(record, {*valid})):
        examples = ", ".join(map(shorten, [*valid][:3])) + ", ..." * (len(valid) > 3)
        return "warn", (
            f"no list of admissible actions, and {little} ({examples}), so little of the environment was seen: "
            f"{MORE_ACTIONS}"
        )
    return "skip", (
        f"no list of admissible actions; distinct valid ones played: {len(valid)}; {refused} of {len(steps)} words "
        "and numbers drawn were invalid"
    )


def _little_seen(record: Record, valid: set[str]) -> str:
    """Why the episodes say little about an environment that lists no actions; empty: they say enough."""
    if record.oracle and all(trace.ended and len(trace.actions) == 1 for trace in record.played()):
        return ""  # there is no second step to see, and an answer in the right form can hardly be drawn
    of_oracle = [trace.valid_actions() for trace in record.oracle]
    if valid <= set().union(*of_oracle) - {*record.named_actions} and all(len(actions) == 1 for actions in of_oracle):
        return "the only valid actions played were those of oracle(), one per task"
    if any(len(trace.valid_actions()) > 1 for trace in record.played()):
        return ""
    one_step = all(there.terminated or there.truncated or there.invalid for *_, there in record.steps())
    return "" if one_step and len(valid) > 1 else "no episode had two distinct valid actions"


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
                return "fail", (
                    f"seed {trace.seed}: {shorten(action)} is not in admissible, was not flagged and {what}: change "
                    "nothing, and set info['invalid']=True"
                )
    if not flagged + harmless:
        return "skip", "no text got an answer"
    return "pass", f"{flagged} flagged, {harmless} without effect"


def oracle(record: Record, limits: Limits) -> Verdict:
    """The actions of ``oracle()`` solve the task from the start."""
    if not record.oracle:
        return "skip", "no oracle(), or it returned None"
    for trace in record.oracle:
        end = trace.answers[-1]
        if not (end.success if end.success is not None else end.terminated and end.reward > 0):
            return "fail", (
                f"seed {trace.seed}: not solved after its {len(trace.actions)} actions, the last of which gave success="
                f"{end.success}, terminated={end.terminated}, reward {end.reward:g}; correct oracle(), or let the step "
                "that solves the task set success=True and terminated=True"
            )
    lengths = [len(trace.actions) for trace in record.oracle]
    return "pass", f"solved {len(lengths)} of {len(lengths)} episodes in {min(lengths)} to {max(lengths)} steps"


# --- neighbours ------------------------------------------------------------------------------------------------------


def global_rng(record: Record, limits: Limits) -> Verdict:
    """The process-wide generators of ``random`` and ``numpy`` are neither seeded nor used."""
    if not record.global_rng:
        return "pass", "left alone"
    where = ", ".join(f"{name} in {what}" for name, what in record.global_rng.items())
    if record.thread_safe:
        return "fail", f"{where}: episodes in one process disturb each other, thread_safe must be False"
    return "warn", f"{where}: it needs a process of its own, keep metadata['thread_safe'] False"


def stdout(record: Record, limits: Limits) -> Verdict:
    """Nothing is printed."""
    if record.printed:
        return "warn", f"prints {shorten(record.printed, 60)}: it drowns the training log"
    return "pass", "prints nothing"


def memory(record: Record, limits: Limits) -> Verdict:
    """``metadata["memory_mb"]`` is what an instance takes: added to a process, or as a process when not thread-safe."""
    declared = record.declared_memory_mb
    measured = record.memory_of_one()
    if declared is None or math.isnan(measured) or not record.elsewhere:
        return "skip", "not declared, or not measured in a process of its own"
    evidence = f"{measured:.1f} MB of {declared:g} MB declared"
    return ("warn", f"{evidence}: raise metadata['memory_mb']") if measured > declared else ("pass", evidence)


# --- all of them -----------------------------------------------------------------------------------------------------

PROPERTIES: dict[str, Callable[[Record, Limits], Verdict]] = {
    judge.__name__: judge
    for judge in (
        makes,
        runs,
        any_text,
        deadline,
        gymnasium,
        observation,
        info,
        flags,
        after_end,
        group,
        seed,
        reuse,
        processes,
        seeds_differ,
        state_key,
        key_stable,
        key_coarse,
        key_repeats,
        images,
        roles,
        reward,
        reward_per_step,
        admissible,
        invalid_text,
        oracle,
        global_rng,
        stdout,
        threads,
        clone,
        memory,
    )
}
# A violation of the second makes judging the first pointless: other processes and threads use instances again, too.
_AFTER = {
    "any_text": ("runs",),
    "gymnasium": ("runs",),
    "oracle": ("runs",),
    "group": ("runs",),
    "seed": ("runs", "group"),
    "reuse": ("runs", "group", "seed"),
    "processes": ("runs", "group", "seed", "reuse"),
    "threads": ("runs", "group", "seed", "reuse"),
    "clone": ("runs", "group", "seed", "reuse", "threads"),
    "key_stable": ("state_key", "group", "seed", "reuse"),
    "key_coarse": ("state_key", "key_stable", "group", "seed", "reuse"),
    "key_repeats": ("state_key", "key_stable"),
    "images": ("state_key", "key_stable", "group", "seed", "reuse"),
}


def judge(record: Record, limits: Limits, stopped: Sequence[tuple[str, str]] = ()) -> tuple[Finding, ...]:
    """All properties in order. ``stopped``: properties that the parent process found violated, with evidence."""
    faults: dict[str, list[str]] = defaultdict(list)
    for name, evidence in (*stopped, *record.faults, *(fault for trace in record.traces() for fault in trace.faults)):
        faults[name].append(evidence)
    # Whatever happens only in other places is a fault of being there.
    faults["threads"] += [f"{THREADS} threads: {evidence}" for t in record.threads or () for _, evidence in t.faults]
    for place, traces in record.elsewhere.items():
        faults["processes"] += [f"{place}: {evidence}" for trace in traces for _, evidence in trace.faults]
    findings: dict[str, Finding] = {}
    for name, ask in PROPERTIES.items():
        if blocking := next((other for other in _AFTER.get(name, ()) if findings[other].status == "fail"), None):
            status, evidence = "skip", f"not judged while `{blocking}` fails"
        elif faults[name]:
            more = len(set(faults[name])) - 1
            status, evidence = "fail", faults[name][0] + (f" (and {more} more)" if more else "")
        elif not (record.complete or (name == "makes" and record.making)):
            status, evidence = "skip", UNREACHED
        else:
            status, evidence = ask(record, limits)
        findings[name] = Finding(name, status, evidence)
    return tuple(findings.values())
