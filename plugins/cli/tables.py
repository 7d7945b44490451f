"""The tables of the documentation, from the code: ``turnkey methods`` and ``turnkey keys`` print them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.plugins.cli.recipes import attribute_docs, scalar, shipped, shipped_losses
from verl_turnkey.plugins.config.schema import TurnkeyConfig

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec

# The two nodes whose keys depend on what is chosen; everything else documents itself.
CHOSEN = {
    "credit": "parameters of the method, see its page",
    "loss": "parameters of the policy loss; verl's own losses take none here",
}


def methods() -> str:
    """Markdown: one row per estimator."""
    rows = ["| switch | what it does | parameters (default) | needs | source |", "|---|---|---|---|---|"]
    for name, spec in sorted(shipped().items()):
        needs = ", ".join(spec.needs) or "-"
        rows.append(f"| `+turnkey={name}` | {spec.summary} | {_parameters(spec)} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def overview() -> str:
    """Markdown: one short row per estimator."""
    rows = ["| switch | what it does | needs | source |", "|---|---|---|---|"]
    for name, spec in sorted(shipped().items()):
        needs = ", ".join(spec.needs) or "-"
        rows.append(f"| [`+turnkey={name}`](docs/methods/{name}.md) | {spec.summary} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def losses() -> str:
    """Markdown: one row per policy loss."""
    rows = ["| switch | what it does | parameters (default) | source |", "|---|---|---|---|"]
    for name, spec in shipped_losses().items():
        rows.append(f"| `+turnkey/loss={name}` | {spec.summary} | {_parameters(spec)} | {spec.paper} |")
    return "\n".join(rows) + "\n"


def _parameters(spec: EstimatorSpec | LossSpec) -> str:
    default = spec.params()
    return ", ".join(f"`{entry.name}={scalar(getattr(default, entry.name))}`" for entry in fields(default))


def keys() -> str:
    """Markdown: one row per key of the ``turnkey`` node, with its default."""
    rows = [f"| `{key}` | `{scalar(default)}` | {doc} |" for key, default, doc in _rows("turnkey", TurnkeyConfig())]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _rows(where: str, node: Any) -> Iterator[tuple[str, Any, str]]:
    docs = CHOSEN | attribute_docs(type(node))
    for entry in fields(node):
        key, value = f"{where}.{entry.name}", getattr(node, entry.name)
        if is_dataclass(value):
            yield from _rows(key, value)
        else:
            yield key, value, docs[entry.name]
