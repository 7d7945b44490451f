"""In place of the language model, the rest is real: what tests of the agent loop share and is no fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl.workers.rollout.replica import TokenOutput


class Script:
    """The language model server's client: answers with the next text, or with what ``turns(prompt)`` returns.

    A turn of ids has no token that ends it, unless it is among them.
    """

    def __init__(self, tokenizer: Any, turns: list[str | list[int]] | Callable[[str], str]) -> None:
        self.tokenizer = tokenizer
        self.turns = turns
        self.prompts: list[list[int]] = []
        self.params: list[dict[str, Any]] = []
        self.answers: list[list[int]] = []
        self.cached: int | None = None  # what the server says of its cache
        self.seen: list[dict[str, Any]] = []

    def text(self, t: int) -> str:
        return self.tokenizer.decode(self.prompts[t])

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **seen: Any
    ) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        self.params.append(sampling_params)
        self.seen.append(seen)
        turn = self.turns(self.text(-1)) if callable(self.turns) else self.turns[len(self.prompts) - 1]
        ids = turn
        if isinstance(turn, str):
            ids = [*self.tokenizer.encode(turn, add_special_tokens=False), self.tokenizer.eos_token_id]
        self.answers.append(ids)
        fields = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7, "num_cached_tokens": self.cached}
        return TokenOutput(token_ids=ids, log_probs=[-0.01 * i for i in range(len(ids))], extra_fields=fields)


class Served:
    """A script in place of the server that ``turnkey eval`` asks."""

    def __init__(self, script: Script) -> None:
        self.script = script

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], seed: int) -> list[int]:
        return (await self.script.generate("", prompt_ids=prompt_ids, sampling_params=sampling)).token_ids
