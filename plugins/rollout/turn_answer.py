"""What a turn of the model leads to: a step of the environment, and the results of the turn's calls."""

from __future__ import annotations

from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import ParsedAction
from verl_turnkey.plugins.rollout.trajectories import Trajectory


async def answer_turn(trajectory: Trajectory, parsed: ParsedAction) -> Answer:
    """The environment's answer. Without an action it is not called, and its state stays.

    ``info["results"]`` has one result per call of the turn, in order, and no other key of the environment's.

    Raises:
        EnvironmentFailure: the environment broke down, or its results are not those of the calls.
    """
    seen = trajectory.seen
    if parsed.action is not None:
        answer = await trajectory.step(parsed.action)
    elif parsed.calls or parsed.feedback or "note" in seen.info or "results" in seen.info:
        seen.info.setdefault("extra", {})  # one object for both: the action was not applied
        answer = Answer(seen.observation, {k: v for k, v in seen.info.items() if k not in ("note", "results")})
    else:
        return Answer(seen.observation, seen.info)
    returned = answer.info.pop("results", None)
    if parsed.calls:
        answer.info["results"] = _results(parsed, answer, returned)
    if parsed.feedback:
        answer.info["results"] = [_error(parsed.feedback)]
    if refused := [f"Error: {call.error}" for call in parsed.calls if call.error is not None]:
        answer.info["note"] = "\n".join(refused)
    elif parsed.feedback:
        answer.info["note"] = parsed.feedback
    return answer


def _results(parsed: ParsedAction, answer: Answer, returned: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """One per call: those ``returned``, and the errors of the calls that did not run."""
    run = sum(call.error is None for call in parsed.calls)
    if returned is None and run == 1:
        returned = [{"content": answer.observation, "is_error": answer.invalid}]
    returned = returned or []
    if len(returned) != run:
        raise EnvironmentFailure(
            "step", f"a step with {run} calls must give info['results'] with one result per call, not {len(returned)}"
        )
    rest = iter(returned)
    return [next(rest) if call.error is None else _error(f"Error: {call.error}") for call in parsed.calls]


def _error(text: str) -> dict[str, Any]:
    return {"content": text, "is_error": True}
