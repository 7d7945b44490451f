"""What ``teacher_quality.py`` compares, and the tables of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from hinted_policy import KINDS, MAKERS
from page_tables import cell

from verl_turnkey.plugins.cli.tables import table

READERS = {"attentive": 0.8, "distracted": 0.2}
"""trust in a text: its weight in what the policy was taught to do with it"""
GAP, EXACT, SKILL_GRPO = "gap alone", "exact advantages", "Skill-GRPO"
MODIFIERS = {
    "rlsd": "skill",
    "agent_opsd": "skill",
    "grsd": "episode",
    "opid": "skill",
    "hcapo": "outcome",
    "trial": "next observation",
}
"""each with the text that its recipe takes, the nearest of the texts here"""
CONTROLS = ("right hint", "wrong hint", "placebo")
CURVES = {
    "grpo_steps": ("grpo_steps", None),
    "gigpo": ("gigpo", None),
    **{f"{name}, {kind}": (name, kind) for name, kind in MODIFIERS.items() if name != "opid"},
    "rlsd, right hint": ("rlsd", "right hint"),
    f"{GAP}, episode": (GAP, "episode"),
    SKILL_GRPO: ("grpo_steps", None),
    EXACT: (EXACT, None),
}


def _label(name: str) -> str:
    method, _, kind = name.partition(", ")
    code = f"`{method}`" if method in (*MODIFIERS, "gigpo", "grpo_steps") else method
    return f"{code}, {kind}" if kind else code


def _columns(measured: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """By task and reader, the results of each seed."""
    places = [(task, reader) for task in MAKERS for reader in READERS if reader in measured.get(task, {})]
    return {f"{task}, {reader}": list(measured[task][reader].values()) for task, reader in places}


def by_reader(results: Mapping[str, Any]) -> str:
    """Markdown: exact success without a text and with one in the policy's own prompt."""
    columns = _columns(results["success"])
    texts = list(next(iter(columns.values()))[0])
    rows = [
        [text, *(f"{np.mean([success[text] for success in runs]):.2f}" for runs in columns.values())] for text in texts
    ]
    return table(["text in the policy's own prompt", *columns], rows)


def by_text(results: Mapping[str, Any]) -> str:
    """Markdown: correlation with the exact advantages, and signs, of the gap by itself."""
    columns = _columns(results["credit"])
    names = ["grpo_steps", "gigpo", SKILL_GRPO, *(f"{GAP}, {kind}" for kind in KINDS)]
    rows = [[_label(name), *(_agreement(runs, name) for runs in columns.values())] for name in names]
    return table(["credit", *columns], rows)


def _agreement(runs: Sequence[Mapping[str, Any]], name: str) -> str:
    share = np.mean([measured[name]["sign"] for measured in runs])
    return f"{cell([measured[name]['pearson'] for measured in runs])}; {share:.0%}"


def by_method(results: Mapping[str, Any]) -> str:
    """Markdown: how much nearer to the exact gradient than ``grpo_steps`` on the same batches, by the method's text."""
    columns = _columns(results["credit"])
    plain = [cell([measured["grpo_steps"]["cosine"] for measured in runs]) for runs in columns.values()]
    names = ["gigpo", EXACT]
    for method, text in MODIFIERS.items():
        names += [f"{method}, {kind}" for kind in (text, *CONTROLS)]
    rows = [
        [
            _label(name),
            *(
                cell([measured[name]["cosine"] - measured["grpo_steps"]["cosine"] for measured in runs], 3, "+")
                for runs in columns.values()
            ),
        ]
        for name in names
    ]
    return table(["cosine", *columns], [["`grpo_steps`", *plain], *rows])


def by_curve(results: Mapping[str, Any]) -> str:
    """Markdown: exact success while each method trains, over seeds, and how much more than with ``gigpo``."""
    learning = results["learning"]
    places = [(task, reader) for task in MAKERS for reader in READERS if reader in learning.get(task, {})]
    rows = []
    for name in CURVES:
        for part in ("success", "without text") if name == SKILL_GRPO else ("success",):
            cells = [cell for task, reader in places for cell in _measures(learning[task][reader], name, part)]
            more = f", validated {'with' if part == 'success' else 'without'} the skill" if name == SKILL_GRPO else ""
            rows.append([_label(name) + more, *cells])
    heads = [f"{task}, {reader}: {what}" for task, reader in places for what in ("end", "area", "more than `gigpo`")]
    return table(["trained with", *heads], rows)


def _measures(learning: Mapping[str, Mapping[str, Mapping[str, Sequence[float]]]], name: str, part: str) -> list[str]:
    """Success after the last update, its mean over all updates, and that mean over the one of ``gigpo``, by seeds."""
    if not (runs := learning.get(name)):
        return ["-"] * 3
    area = {seed: float(np.mean(run[part][1:])) for seed, run in runs.items()}
    usual = {seed: float(np.mean(run["success"][1:])) for seed, run in learning["gigpo"].items()}
    more = cell([area[seed] - usual[seed] for seed in area], 3, "+")
    ends = np.mean([run[part][-1] for run in runs.values()])
    return [f"{ends:.2f}", f"{np.mean(list(area.values())):.2f}", "" if name == "gigpo" else more]


WHOLE = (by_reader, by_text, by_method, by_curve)
