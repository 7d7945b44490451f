"""The table of the ``turnkey:`` node in docs/configuration.md: ``python -m verl_turnkey.plugins.keys`` prints it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from verl_turnkey.plugins.config import TurnkeyConfig
from verl_turnkey.plugins.recipes import _attribute_docs, _scalar

# The two nodes whose keys depend on what is chosen; everything else documents itself.
CHOSEN = {
    "credit": "parameters of the method, see its page",
    "loss": "parameters of the policy loss; verl's own losses take none here",
}


def table() -> str:
    """Markdown: one row per key, with its default."""
    rows = [f"| `{key}` | `{_scalar(default)}` | {doc} |" for key, default, doc in _rows("turnkey", TurnkeyConfig())]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any, str]]:
    docs = CHOSEN | _attribute_docs(type(node))
    for entry in fields(node):
        key, value = f"{where}.{entry.name}", getattr(node, entry.name)
        if is_dataclass(value):
            yield from _rows(key, value)
        else:
            yield key, value, docs[entry.name]


if __name__ == "__main__":
    print(table(), end="")
