"""Who plays the roles of an episode that the policy does not: a random player, or a fixed model behind a URL.

To the policy their turns belong to the environment: its state after a turn is the next one in which it moves. They are
in none of its rows, and so neither trained nor compared; the log has them beside the turn that they followed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.errors import JudgeError
from verl_turnkey.envs.http import Endpoint, chat_endpoint
from verl_turnkey.envs.prompting.prompts import (
    Memory,
    PromptHistory,
    PromptTurn,
    build_messages,
    history_text,
    later_template,
)
from verl_turnkey.plugins.config.agent import SELF, OpponentConfig
from verl_turnkey.plugins.rollout.action_reader import ActionReader
from verl_turnkey.plugins.rollout.prompts import PromptSettings

MOST_INVALID = 5
"""turns in a row without a valid action, after which an opponent has failed"""
PRIVATE = ("note", "results")
"""keys of ``info`` that only the role sees whose turn they are about"""


@dataclass(frozen=True)
class OtherTurn:
    """A turn of another role."""

    role: str
    by: str
    """random, or the name of the model"""
    observation: str
    response: str
    action: str | None
    invalid: str | None
    """why the action is invalid; None if it is valid"""

    @property
    def logged(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def seat_of(roles: Sequence[str], seed: int) -> str:
    """The role of the policy: all rollouts of a task have one, and consecutive seeds take turns."""
    return roles[seed % len(roles)]


def endpoint_of(opponent: str | OpponentConfig) -> str | Endpoint[str]:
    """The opponent of the configuration, ready to be asked."""
    return opponent if isinstance(opponent, str) else chat_endpoint(opponent, "the opponent")


class ChatPrompts:
    """What one role is shown by a model that takes messages: its own observations, turns, task and system text.

    With ``turnkey.rollout.prompt=template`` a message from the template and the last turns, else the conversation.
    """

    def __init__(self, settings: PromptSettings, task: str) -> None:
        self._settings, self._task = settings, task
        self._memory = Memory(settings.options.history, settings.summarize)
        self._messages: list[dict[str, Any]] = []
        self._seen = ""

    def next(self, seen: Answer) -> list[dict[str, Any]]:
        """The messages with the current observation ``seen``."""
        settings, conversation = self._settings, self._settings.options.prompt == "conversation"
        step, self._seen = len(self._memory.turns) + 1, seen.text
        if not conversation or step == 1:
            past = PromptHistory() if conversation else self._memory.history()
            self._messages = settings.messages(self._task, seen, past, step, ())
        else:
            self._messages += build_messages(
                system=None,
                template=later_template(settings.template),
                task="",
                history=(),
                observation=seen.text,
                admissible=seen.admissible,
                step=step,
            )
        return [*self._messages]

    def answered(self, text: str, remembered: str) -> None:
        """Take the answer to the last messages, and what a template shows of it later."""
        self._memory.add(PromptTurn(self._seen, remembered))
        self._messages = [*self._messages, {"role": "assistant", "content": text}]

    def fork(self) -> ChatPrompts:
        other = copy.copy(self)
        other._memory, other._messages = self._memory.copy(), [*self._messages]
        return other


class Opponents:
    """Plays all roles of one episode but that of the policy.

    Args:
        opponent: ``random``, or the endpoint of a model.
        seat: the policy's role.
        settings: of the policy's prompts, from which those of a model are made.
        task: the episode's in words, for a role to which the environment gives none of its own.
        max_tokens: that a model may write per turn.
        max_turns: turns of others in a row after which the episode is truncated.
    """

    def __init__(
        self,
        opponent: str | Endpoint[str],
        seat: str,
        settings: PromptSettings,
        reader: ActionReader,
        tokenizer: Any,
        rng: random.Random,
        *,
        task: str,
        max_tokens: int,
        max_turns: int,
    ) -> None:
        self.seat = seat
        self._opponent, self._settings, self._reader, self._tokenizer = opponent, settings, reader, tokenizer
        self._rng, self._task, self._max_tokens, self._max_turns = rng, task, max_tokens, max_turns
        self._prompts: dict[str, ChatPrompts] = {}

    def fork(self) -> Opponents:
        """Those of a branch; the random state is shared, so that branches do not meet the same moves."""
        other = copy.copy(self)
        other._prompts = {role: prompts.fork() for role, prompts in self._prompts.items()}
        return other

    async def play(self, environment: Any, first: Answer) -> tuple[Answer, list[OtherTurn]]:
        """Play on from ``first`` until the policy moves or the episode is over.

        Returns:
            The state then, with the reward, flags of validity, notes and results of ``first`` and all that was paid by
            role; ``first`` itself if nobody else moves. And the turns.

        Raises:
            EnvironmentFailure: of kind ``opponent``: it does not answer, has no legal action, or finds no valid one.
        """
        seen, turns, invalid = first, list[OtherTurn](), 0
        info = {name: seen.info[name] for name in ("tools", *PRIVATE) if name in seen.info}
        paid: dict[str, dict[str, float]] = {}
        while not (seen.terminated or seen.truncated) and seen.role not in (None, self.seat):
            if len(turns) == self._max_turns:
                seen.truncated = True
                break
            before = Answer(seen.observation, {k: v for k, v in seen.info.items() if k not in PRIVATE})
            response, action, reason = await self._turn(before)
            if action is not None:
                _collect(paid, seen)
                seen = await environment.step(action)
                reason = reason or ("the environment refused the action" if seen.invalid else None)
                info |= {"tools": seen.info["tools"]} if "tools" in seen.info else {}
            by = self._opponent if isinstance(self._opponent, str) else self._opponent.config.model
            turns.append(OtherTurn(str(before.role), by, before.observation, response, action, reason))
            invalid = invalid + 1 if reason else 0
            if invalid == MOST_INVALID and not (seen.terminated or seen.truncated):
                found = f"no valid action in {invalid} turns ({reason}); the last: {response[-200:]!r}"
                raise EnvironmentFailure("opponent", f"{by} as {before.role!r} found {found}")
        if not turns:
            return first, []
        _collect(paid, seen)
        if results := info.get("results"):  # the last one answers the policy's call with what it sees now
            content = f"{results[-1]['content']}\n{seen.observation}".strip()
            info["results"] = [*results[:-1], {**results[-1], "content": content}]
        return replace(seen, reward=first.reward, info={**seen.info, **paid, **info, "invalid": first.invalid}), turns

    async def _turn(self, seen: Answer) -> tuple[str, str | None, str | None]:
        """Response, action and why that is invalid, of the role that moves in the state ``seen``."""
        if isinstance(self._opponent, str):
            if not seen.admissible:
                raise EnvironmentFailure("opponent", f"the environment names no legal action of {seen.role!r}")
            action = self._rng.choice(seen.admissible)
            return action, action, None
        if seen.info.get("images"):
            raise EnvironmentFailure("opponent", "a model behind a URL gets text, and this state has images")
        if seen.role not in self._prompts:
            settings = replace(self._settings, role=seen.role)
            self._prompts[seen.role] = ChatPrompts(settings, seen.info["task"] or self._task)
        prompts, params = self._prompts[seen.role], self._opponent.config.params
        # The seed makes each question another one: equal ones would share an answer.
        question = {"messages": prompts.next(seen), "seed": self._rng.getrandbits(31)}
        if not {"max_tokens", "max_completion_tokens"} & {*params}:
            question["max_tokens"] = self._max_tokens
        try:
            text = await self._opponent.ask(question)
        except JudgeError as error:
            raise EnvironmentFailure("opponent", str(error)) from None
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        parsed = await self._reader.read(ids, text, seen.admissible, ())
        prompts.answered(text, history_text(parsed, text, self._settings.options.keep_thinking))
        return text, parsed.action, parsed.reason


def opponents_of(
    opponent: str | Endpoint[str], roles: Sequence[str], seed: int, rollout: str, **rest: Any
) -> Opponents | None:
    """The opponents of an episode; None: the policy plays all roles.

    Args:
        roles: those that the environment declares.
        seed: of the task; decides which role the policy has.
        rollout: decides, with the seed, on random moves.
        rest: the other arguments of :class:`Opponents`.

    Raises:
        EnvironmentFailure: there are no roles to play.
    """
    if opponent == SELF:
        return None
    if len(roles) < 2:
        raise EnvironmentFailure("opponent", "turnkey.opponent needs an environment whose metadata declares its roles")
    seat, rng = seat_of(roles, seed), random.Random(f"{rollout}/{seed}")
    return Opponents(opponent, seat, rng=rng, **rest)


def _collect(paid: dict[str, dict[str, float]], answer: Answer) -> None:
    """Add to ``paid`` what ``answer`` pays by role."""
    for name in ("outcome", "rewards"):
        for role, number in answer.info.get(name, {}).items():
            paid.setdefault(name, {})[role] = paid.get(name, {}).get(role, 0.0) + number
