"""The messages in the text of a prompt."""

from __future__ import annotations

import re

TEMPLATES = (
    (r"<\|im_start\|>([a-z_-]+)\n", r"<\|im_end\|>\s*"),
    (r"(?:<\|begin_of_text\|>)?<\|start_header_id\|>([a-z_-]+)<\|end_header_id\|>\n\n", r"<\|eot_id\|>"),
    (r"(?:<bos>)?<start_of_turn>([a-z_-]+)\n", r"<end_of_turn>\s*"),
)
"""how chat templates begin a message, with its role, and end it: regular expressions that JavaScript has, too"""
MODEL_ROLES = ("assistant", "model")


def chat(prompt: str) -> list[dict[str, str]] | None:
    """The messages in a prompt by its chat template's markup; None where that does not account for every character.

    What begins the model's turn at the end is left out.
    """
    for begin, end in TEMPLATES:
        messages, at = [], 0
        while (start := re.compile(begin).match(prompt, at)) and (close := re.compile(end).search(prompt, start.end())):
            messages.append({"role": start[1], "content": prompt[start.end() : close.start()]})
            at = close.end()
        last = re.compile(begin).match(prompt, at)
        if messages and (at == len(prompt) or (last and last[1] in MODEL_ROLES)):
            return messages
    return None
