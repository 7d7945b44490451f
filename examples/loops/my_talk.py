"""An episode as one conversation, for verl's agent loops: find a number (docs/record.md)."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from verl_turnkey.loops import EpisodeRecorder


class GuessTalk(AgentLoopBase):
    """Each prompt is the one before, the model's turn and the answer to it, token by token."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        episode = EpisodeRecorder(self.config, self.tokenizer, kwargs)
        target = 1 + kwargs["extra_info"]["index"] % 20
        sampling = {**sampling_params, "max_tokens": self.rollout_config.response_length // 12}
        request, won = uuid4().hex, False
        messages = [{"role": "user", "content": "Find a number between 1 and 20. Answer with a number."}]
        prompt_ids = await self.ct_build_initial_tokens(messages)
        while len(episode) < 6 and not won:
            output = await self.server_manager.generate(
                request_id=request, prompt_ids=prompt_ids, sampling_params=dict(sampling)
            )
            ids = list(output.token_ids)
            text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
            valid = text.isdecimal()
            won = valid and int(text) == target
            answer = ("Higher." if int(text) < target else "Lower.") if valid else "A number, please."
            episode.add(
                prompt_ids,
                output,
                reward=float(won),
                action=text if valid else None,
                valid=valid,
                terminated=won,
                truncated=len(episode) == 5 and not won,
                answer=answer,
            )
            history = [*messages, {"role": "assistant", "content": text}]
            messages = [*history, {"role": "user", "content": answer}]
            prompt_ids = self.continuous_token_builder.merge_context_tokens(
                history, messages, prompt_ids + ids
            ).token_ids
        return episode.rows(success=won)
