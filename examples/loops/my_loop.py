"""A loop of your own, one row per step; see docs/record.md."""

from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from verl_turnkey.loops import EpisodeRecorder


class GuessLoop(AgentLoopBase):
    """Find a number between 1 and 20 in six guesses."""

    async def run(self, sampling_params, **kwargs):
        episode = EpisodeRecorder(self.config, self.tokenizer, kwargs)
        target = 1 + kwargs["extra_info"]["index"] % 20
        sampling = {**sampling_params, "max_tokens": self.rollout_config.response_length}
        request, won, hint = uuid4().hex, False, "Guess."
        low, high = 1, 20
        try:
            while len(episode) < 6 and not won:
                question = f"Find the number between {low} and {high}. {hint} Answer with a number."
                prompt_ids = await self.ct_build_initial_tokens([{"role": "user", "content": question}])
                output = await self.server_manager.generate(
                    request_id=request, prompt_ids=prompt_ids, sampling_params=dict(sampling)
                )
                text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True).strip()
                state, valid = f"{target} {low} {high}", text.isdecimal()  # before the action changes it
                won = valid and int(text) == target
                if valid and int(text) < target:
                    low, hint = max(low, int(text) + 1), "Higher."
                elif valid:
                    high, hint = min(high, int(text) - 1), "Lower."
                episode.add(
                    prompt_ids,
                    output,
                    reward=float(won),
                    anchor=state,
                    action=text if valid else None,
                    valid=valid,
                    penalty=0.0 if valid else 0.1,
                    terminated=won,
                    truncated=len(episode) == 5 and not won,
                    observation=question,
                    answer=hint,
                )
        except (OSError, TimeoutError) as error:  # whatever your environment may raise
            return episode.failed(repr(error))
        return episode.rows(success=won)
