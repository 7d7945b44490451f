"""What the results of a panel depend on besides tasks and model: prompt, limits and rewards of a configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.tasks import PLACES, Panel
from verl_turnkey.plugins.config.leaves import every, uses, value_of
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.config.schema import load_examples, reward_entries, turnkey_config

ROLLOUT = "turnkey.rollout."
TOKENS = ("max_prompt_length", "max_response_length")
ELSEWHERE = ("turnkey.env.", "turnkey.agent.", ROLLOUT, "turnkey.rewards", "turnkey.modules", "data.")
"""where fields lie that are in other parts of a panel, or of no panel, such as those of agents"""
NEWER = ("summary_request",)
"""fields of ``turnkey.rollout`` that the first panels did not know: recorded where they are not the default"""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, limits and rewards of a whole configuration, and what else is played where it is not the default.

    Files, such as template, examples and tools, are there by a hash of their text.
    """
    turnkey = turnkey_config(config)
    options = asdict(turnkey.rollout)
    examples = load_examples(options.pop("examples"))
    further = {leaf: value_of(config, leaf) for leaf in uses(Use.PLAYED) if not leaf.key.startswith(ELSEWHERE)}
    return {
        "rollout": {name: value for name, value in options.items() if _is_recorded(name, value)},
        "template_sha256": _sha256(load_template(turnkey.rollout.template)),
        "examples_sha256": _sha256(str(examples)) if examples else None,
        "tokens": {name: config["data"][name] for name in TOKENS},
        "rewards": reward_entries(config, turnkey),
        **{leaf.key: leaf.content(value) for leaf, value in further.items() if value != leaf.default},
    }


def _is_recorded(name: str, value: Any) -> bool:
    leaf = every()[f"{ROLLOUT}{name}"]
    return leaf.use is Use.PLAYED and (name not in NEWER or value != leaf.default)


def words(panel: Panel) -> list[str]:
    """Overrides that give a launch line the panel's arguments of the environment and its :func:`settings`.

    Files are not in a panel: whoever plays it names them.
    """
    of = panel.content["settings"]
    keys = {f"turnkey.env.kwargs.{name}": value for name, value in panel.content["environment"]["kwargs"].items()}
    keys |= {f"{ROLLOUT}{name}": value for name, value in of["rollout"].items()}
    keys |= {f"data.{name}": value for name, value in of["tokens"].items()}
    keys |= {} if of["examples_sha256"] else {"turnkey.rollout.examples": []}
    keys |= {key: value for key, value in of.items() if key in every() and every()[key].files is None}
    return [override(f"++{key}", value) for key, value in {**keys, "turnkey.rewards": of["rewards"]}.items()]


def places(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the environment that say where it is on this machine."""
    return {name: value for name, value in turnkey_config(config).env.kwargs.items() if name in PLACES}


def differing(panel: Panel, config: Mapping[str, Any], *, arguments: bool = True) -> list[str]:
    """``key: value, not the panel's value`` for each setting of ``config`` that differs from the panel's.

    ``arguments``: compare those of the environment, too; else the tasks bring them.
    """
    here, there = settings(config), panel.content["settings"]
    if arguments:
        kwargs = turnkey_config(config).env.kwargs
        here = {**here, "kwargs": {name: value for name, value in kwargs.items() if name not in PLACES}}
        there = {**there, "kwargs": panel.content["environment"]["kwargs"]}
    return list(_differing(here, there, ""))


KEYS = {"rollout": "turnkey.rollout", "tokens": "data", "rewards": "turnkey.rewards", "kwargs": "turnkey.env.kwargs"}
"""node of :func:`settings` -> key of a launch line"""


def _differing(here: Any, there: Any, key: str) -> Iterator[str]:
    if isinstance(here, Mapping) and isinstance(there, Mapping) and (not key or key in KEYS.values()):
        for name in dict.fromkeys([*there, *here]):
            of_name = f"{key}.{name}" if key else KEYS.get(name, f"{name}")
            yield from _differing(here.get(name), there.get(name), of_name)
    elif here != there:
        yield f"{key}: {here!r}, not {there!r}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
