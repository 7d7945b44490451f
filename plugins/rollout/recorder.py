"""Rows and trajectory log of an agent loop of your own, as the loop ``turnkey_env`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import make_step
from verl_turnkey.envs.answers import images_key
from verl_turnkey.plugins.rollout import worker
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt, RowBuilder


class EpisodeRecorder:
    """Collects the turns of one episode, builds verl's rows with their records, and logs the episode.

    All rows have the same fields, those of failed episodes included. ``reward_score`` is the sum of the rewards.
    Consecutive turns become one row wherever a prompt extends the turn before (:func:`.merging.merge_rows`).

    Args:
        config: verl's whole configuration; ``self.config`` in an agent loop.
        tokenizer: the policy's.
        row: the keyword arguments of ``run``: the fields of the data row, ``uid``, ``session_id`` and ``global_steps``.
        merge: False: a row for each turn.
    """

    def __init__(self, config: DictConfig, tokenizer: Any, row: Mapping[str, Any], *, merge: bool = True) -> None:
        self._row, self._tokenizer, self._episode = row, tokenizer, Episode()
        self._shared = shared = worker.shared(config)
        eos = tokenizer.eos_token_id or 0
        self._rows = RowBuilder(eos, shared.log_probs, merged=merge, max_response_length=shared.response_length)

    def __len__(self) -> int:
        """Number of turns so far."""
        return len(self._episode.steps)

    def add(
        self,
        prompt_ids: Sequence[int],
        output: TokenOutput,
        *,
        observation: str | None = None,
        answer: str = "",
        note: str | None = None,
        images: list[Any] | None = None,
        seconds_model: float = 0.0,
        seconds_env: float = 0.0,
        **step: Any,
    ) -> None:
        """Add a turn, once the environment has answered it.

        Args:
            prompt_ids: what the model read.
            output: what the server returned for it.
            observation: the state before the turn as text; the record has it if the method compares texts.
            answer: what the environment answered, for the log.
            note: why the action is invalid, for the log.
            images: all images of the prompt, as verl's processor takes them.
            seconds_model, seconds_env: how long the server and the environment took.
            **step: the other arguments of :func:`~verl_turnkey.advantage.make_step`, ``reward`` at least; not ``step``,
                ``success`` and ``version``, which the recorder sets.

        Raises:
            RecordError: a value of the wrong type or range.
        """
        turn = Generated.of(output, self._tokenizer, seconds_model, since=seconds_env)
        text = {} if observation is None or not worker.keep_texts else {"text": observation}
        pictures = [image for image in images or () if hasattr(image, "convert")]  # not what a processor made of them
        text |= {"images": images_key(pictures)} if text and pictures else {}
        record = make_step(
            **{
                "composed_reward": step.get("reward"),
                **step,
                "step": len(self),
                "version": turn.version,
                "extra": {**text, **(step.get("extra") or {})},
            }
        )
        self._episode.steps.append(
            PlayedStep(
                prompt=Prompt(list(prompt_ids), images),
                turn=turn,
                record=record,
                observation=observation or "",
                images=pictures,
                answer=answer,
                invalid=note,
                unparsed=record["action"] is None and not record["valid"],
                seconds=seconds_env,
                extra={},
                next_extra={},
            )
        )

    def rows(self, success: bool | None = None) -> list[AgentLoopOutput]:
        """End the episode: log it, and return what ``run`` returns.

        ``success``: whether it solved the task; None: whether it terminated with a positive reward.

        Raises:
            ValueError: the episode has no turn.
        """
        if not self._episode.steps:
            raise ValueError("EpisodeRecorder: an episode without a turn has no rows; call failed(reason)")
        self._episode.end(success)
        return self._ended(self._rows.played(self._episode))

    def failed(self, reason: str) -> list[AgentLoopOutput]:
        """End an episode that failed: the one masked row that ``run`` returns; the log has its turns so far."""
        self._shared.failures.add(reason)
        return self._ended(self._rows.failed(reason, self._row["global_steps"]), reason)

    def _ended(self, outputs: list[AgentLoopOutput], reason: str | None = None) -> list[AgentLoopOutput]:
        self._shared.times.append(self._episode.seconds)
        self._shared.log.write(self._row, None, self._episode, outputs, reason, self._tokenizer.decode)
        return outputs


def drain_log(seconds: float = worker.FINISH_SECONDS) -> bool:
    """Wait until the episodes that this process logged are on the disk; False: it took longer than ``seconds``.

    Only for managers without ``agent_loop_workers``: the trainer cannot ask their processes for it when training ends.
    """
    return worker.drain(seconds)
