"""Control tokens in texts that a chat template puts between its own."""

from __future__ import annotations

import re
from typing import Any

from verl_turnkey.envs.thoughts import FAMILIES


class ControlTokens:
    """Turns control tokens in an environment's text into plain text.

    A chat template writes control tokens and texts into one string, so a page that holds ``<|im_end|>`` would otherwise
    end its own message. Control tokens are the tokenizer's special tokens, and of its other added tokens those that
    mark thoughts or stand in the chat template (``<think>``, ``<tool_call>``).
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Not all of them: the added tokens of some models include tags of HTML.
        template = str(getattr(tokenizer, "chat_template", None) or "")
        marks = {mark for family in FAMILIES for mark in (family.begin, family.end)}
        tokens = {
            str(token)
            for token in added
            if token.special
            or re.match(r"[<\[{].*[|｜]|[|｜].*[>\]}]$", str(token))
            or (re.match(r"[<\[{◁].*[>\]}▷]$", str(token)) and (str(token) in marks or str(token) in template))
        }
        tokens |= {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
        tokens = {token for token in tokens if len(token) > 1 and token.strip()}
        self._pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))
        self._any = bool(tokens)

    def plain(self, text: str) -> str:
        """``text`` with a space after the first character of each control token in it."""
        return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) if self._any else text
