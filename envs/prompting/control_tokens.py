"""Control tokens in texts that a chat template puts between its own."""

from __future__ import annotations

import re
from typing import Any


class ControlTokens:
    """Makes the control tokens in a text of the environment plain text.

    A chat template writes control tokens and texts into one string, so a page that holds ``<|im_end|>`` would otherwise
    end its own message.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        found = {
            str(token) for token in added if token.special or re.match(r"[<\[{].*[|｜]|[|｜].*[>\]}]$", str(token))
        }
        found |= {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
        found = {token for token in found if len(token) > 1 and token.strip()}
        self._pattern = re.compile("|".join(re.escape(token) for token in sorted(found, key=len, reverse=True)))
        self._any = bool(found)

    def plain(self, text: str) -> str:
        """``text`` with a space after the first character of each control token in it."""
        return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) if self._any else text
