"""What each recipe sets, key by key, is what tests/data/recipes.txt has on record.

Each switch is compared with the one that it builds on, in whole configurations that verl composes, so that together the
sections pin every key of every run. A change that is meant is recorded by
``python tests/contract/plugins/checks/test_golden.py``; the diff of the data file then says what it does to runs.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from verl_turnkey.plugins.config import presets
from verl_turnkey.plugins.config.command_line import groups

RECORD = Path(__file__).parents[3] / "data" / "recipes.txt"
HEADER = """\
# What the recipes set, in the whole configuration that verl composes, interpolations as text: base against verl's stock
# ppo_trainer, each method against base, each environment, policy loss and device against gigpo alone, each preset
# against the method, loss and environment that it is for.
# Written by: python tests/contract/plugins/checks/test_golden.py
"""


def switches() -> dict[str, str]:
    """The words of a launch line, each with those that it is compared with."""
    methods, *others = groups().items()
    bases = {"+turnkey=base": ""}
    bases |= {f"+turnkey={name}": "+turnkey=base" for name in methods[1] if name != "base"}
    for group, names in others:
        for name in names:
            words = presets.read(name).switches if group == "turnkey/preset" else ["+turnkey=gigpo", f"+{group}={name}"]
            bases[" ".join(words)] = " ".join(words[:-1])
    return bases


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """The leaves of a configuration, as dotted keys and JSON; an empty node is a leaf."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flat(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, json.dumps(tree, ensure_ascii=False)


@functools.cache
def composed(line: str) -> dict[str, str]:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return dict(flat(OmegaConf.to_container(compose("ppo_trainer", overrides=line.split()), resolve=False)))


def set_by(line: str) -> dict[str, str]:
    """Keys that ``line`` adds to what it builds on, changes or removes; to fill an empty node removes none."""
    before, now = composed(switches()[line]), composed(line)
    gone = {key: "(removed)" for key in before.keys() - now.keys() if not any(k.startswith(f"{key}.") for k in now)}
    return {key: value for key, value in sorted((now | gone).items()) if before.get(key) != value}


def recorded() -> dict[str, dict[str, str]]:
    """The data file: a line of switches in brackets, under it its keys."""
    sections: dict[str, dict[str, str]] = {}
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            keys = sections[line.strip("[]")] = {}
        elif line and not line.startswith("#"):
            key, _, value = line.partition(" = ")
            keys[key] = value
    return sections


@pytest.mark.parametrize("line", switches())
def test_a_recipe_sets_what_is_on_record(line: str):
    assert line in recorded(), f"{line} is not on record: python tests/contract/plugins/checks/test_golden.py"
    before, now = recorded()[line], set_by(line)
    changed = [
        f"{key}: {before.get(key, '(as before it)')} on record, now {now.get(key, '(as before it)')}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    assert not changed, "\n".join(["", line, *changed])


@pytest.mark.parametrize("method", groups()["turnkey"])
def test_every_key_of_a_recipe_is_overridden_without_a_plus_and_no_other(method: str):
    keys = [key for line in dict.fromkeys(("+turnkey=base", f"+turnkey={method}")) for key in recorded()[line]]
    keys = [key for key in keys if key not in ("turnkey.credit", "turnkey.loss", "turnkey.env.kwargs")]
    now = composed(" ".join([f"+turnkey={method}", *(f"{key}=null" for key in keys)]))
    assert {key: now[key] for key in keys} == dict.fromkeys(keys, "null")
    for key in ("turnkey.credit.gama", "turnkey.rollout.histori", "turnkey.enviroment"):
        with pytest.raises(ConfigCompositionException, match=f"'{key}'"):
            composed(f"+turnkey={method} {key}=null")


def test_nothing_is_on_record_that_is_not_shipped():
    assert list(recorded()) == list(switches())


if __name__ == "__main__":
    sections = ["\n".join([f"[{line}]", *(f"{k} = {v}" for k, v in set_by(line).items())]) for line in switches()]
    RECORD.write_text("\n\n".join([HEADER.rstrip(), *sections]) + "\n", encoding="utf-8")
