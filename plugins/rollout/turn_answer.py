"""What a turn of the model leads to: a step of the environment, and the results of the turn's calls."""

from __future__ import annotations

from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import ParsedAction
from verl_turnkey.envs.tools import calls_text
from verl_turnkey.plugins.rollout.trajectories import Trajectory
from verl_turnkey.plugins.rollout.worker_tools import WorkerTools

Result = dict[str, Any]


async def answer_turn(trajectory: Trajectory, parsed: ParsedAction, tools: WorkerTools | None = None) -> Answer:
    """The environment's answer. Without an action for it the environment is not called, and its state stays.

    ``info["results"]`` has one result per call of the turn, in order, and ``info["note"]`` what the observation does
    not say of them.

    Args:
        tools: those of the episode that are not the environment's.

    Raises:
        EnvironmentFailure: the environment broke down, or its results are not those of the calls.
    """
    seen = trajectory.seen
    run = [call for call in parsed.calls if call.error is None]
    elsewhere = [call for call in run if tools is not None and tools.has(call)]
    own = [call for call in run if call not in elsewhere]
    if parsed.action is None and not parsed.calls and not parsed.feedback:
        past = {"note", "results"} & seen.info.keys()
        return Answer(seen.observation, {k: v for k, v in seen.info.items() if k not in past} if past else seen.info)
    results = [] if tools is None else [await tools.result(call) for call in elsewhere]
    if parsed.action is None or (elsewhere and not own):
        seen.info.setdefault("extra", {})  # one object for both: the action was not applied
        answer = Answer(seen.observation, {**seen.info, "invalid": False})  # results and note: see below
    else:
        action = calls_text([(call.name, call.arguments) for call in own]) if elsewhere else parsed.action
        answer = await trajectory.step(action)
    if tools is not None:
        tools.add_state(answer)
    returned = answer.info.pop("results", None)
    notes = [f"{call.name}: {result['content']}" for call, result in zip(elsewhere, results, strict=True)]
    if parsed.calls:
        of_own = iter(_results(len(own), answer, returned))
        of_others = iter(results)
        answer.info["results"] = [
            _error(f"Error: {call.error}")
            if call.error is not None
            else next(of_others if call in elsewhere else of_own)
            for call in parsed.calls
        ]
        notes += [f"Error: {call.error}" for call in parsed.calls if call.error is not None]
        if parsed.feedback:
            last = answer.info["results"][-1]
            answer.info["results"][-1] = {**last, "content": f"{last['content']}\n{parsed.feedback}"}
    elif parsed.feedback and tools is not None:
        answer.info["results"] = [_error(parsed.feedback)]
    if parsed.feedback:
        notes.append(parsed.feedback)
    if notes:
        answer.info["note"] = "\n".join(notes)
    return answer


def _results(calls: int, answer: Answer, returned: list[Result] | None) -> list[Result]:
    """The environment's results, one per call that it got."""
    if returned is None and calls == 1:
        returned = [{"content": answer.observation, "is_error": answer.invalid}]
    returned = (returned or []) if calls else []
    if len(returned) != calls:
        raise EnvironmentFailure(
            "step", f"a step with {calls} calls must give info['results'] with one result per call, not {len(returned)}"
        )
    return returned


def _error(text: str) -> Result:
    return {"content": text, "is_error": True}
