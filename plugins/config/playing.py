"""What the results of a panel depend on besides tasks and model: prompt, limits and rewards of a configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from verl_turnkey.envs.panels import PLACES, Panel
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.plugins.config.examples import load_examples
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.schema import reward_entries, turnkey_config

PROMPT = (
    "prompt",
    "observation_role",
    "thinking",
    "when_full",
    "history",
    "history_line",
    "keep_thinking",
    "summary",
    "max_turns",
    "max_tokens_per_turn",
    "action_format",
    "template",
    "system",
    "skill",
    "stop",
    "stop_token_ids",
)
"""keys of ``turnkey.rollout`` that decide what the model is shown and when an episode ends"""
TOKENS = ("max_prompt_length", "max_response_length")


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt, limits and rewards of a whole configuration; template and examples by the hash of their text too."""
    turnkey = turnkey_config(config)
    options = asdict(turnkey.rollout)
    examples = load_examples(options["examples"])
    return {
        "rollout": {name: options[name] for name in PROMPT},
        "template_sha256": _sha256(load_template(turnkey.rollout.template)),
        "examples_sha256": _sha256(str(examples)) if examples else None,
        "tokens": {name: config["data"][name] for name in TOKENS},
        "rewards": reward_entries(config, turnkey),
    }


def words(panel: Panel) -> list[str]:
    """Overrides that give a launch line the panel's arguments of the environment and its :func:`settings`."""
    of = panel.content["settings"]
    keys = {f"turnkey.env.kwargs.{name}": value for name, value in panel.content["environment"]["kwargs"].items()}
    keys |= {f"turnkey.rollout.{name}": value for name, value in of["rollout"].items()}
    keys |= {f"data.{name}": value for name, value in of["tokens"].items()}
    keys |= {} if of["examples_sha256"] else {"turnkey.rollout.examples": []}
    return [override(f"++{key}", value) for key, value in {**keys, "turnkey.rewards": of["rewards"]}.items()]


def places(config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the environment that say where it is on this machine."""
    return {name: value for name, value in turnkey_config(config).env.kwargs.items() if name in PLACES}


def differing(panel: Panel, config: Mapping[str, Any], *, arguments: bool = True) -> list[str]:
    """``key: value, not the panel's value`` for each setting of ``config`` that the panel has otherwise.

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
