"""The table of methods, from the registry."""

from __future__ import annotations

from dataclasses import fields

from verl_turnkey.plugins.recipes import shipped


def table() -> str:
    """Markdown: one row per estimator."""
    rows = ["| switch | what it does | parameters (default) | needs | source |", "|---|---|---|---|---|"]
    for name, spec in sorted(shipped().items()):
        default = spec.params()
        parameters = ", ".join(f"`{entry.name}={getattr(default, entry.name)}`" for entry in fields(default))
        needs = ", ".join(spec.needs) or "-"
        rows.append(f"| `+turnkey={name}` | {spec.summary} | {parameters} | {needs} | {spec.paper} |")
    return "\n".join(rows) + "\n"
