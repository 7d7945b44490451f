"""The switches on a launch line, read before Hydra composes anything.

Hydra silently accepts some mistakes (``+turnky=gigpo`` becomes a root key, a second estimator overrides the method's)
and refuses others with a misleading message. This module refuses them in terms of the line that the user wrote.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError, estimators
from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.advantage.params import did_you_mean, raise_all
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.plugins.config.foreign_keys import (
    BARE,
    VERLS_ESTIMATORS,
    VERLS_LOSSES,
    WITHOUT_INPUT,
    foreign,
    refusal,
)
from verl_turnkey.plugins.config.overrides import read
from verl_turnkey.plugins.config.recipe_files import config_dir

_OVERRIDE = re.compile(r"(?P<plus>\+{0,2})(?P<key>[A-Za-z_][\w./@-]*)=(?P<value>.*)", re.DOTALL)
_SEARCHED = re.compile(r"(?:pkg|file)://[^\s\]'\",]+")
# Main programs of verl with trainers of their own, by the beginnings of their names.
OTHER_PROGRAMS = ("verl.experimental.", "recipe.dapo.")
_ESTIMATOR_KEY = "algorithm.adv_estimator"
_LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
KWARGS = "turnkey.env.kwargs"
IN_LINE = " in this launch line"
# Group -> the groups that must follow it. Devices share no keys with others.
_ORDER = {
    "turnkey": ("turnkey/env", "turnkey/loss", "turnkey/modifier", "turnkey/preset"),
    **{f"turnkey/{group}": ("turnkey/preset",) for group in ("env", "loss", "modifier")},
}


@dataclass(frozen=True)
class _Override:
    """One Hydra override: ``+key=value``."""

    text: str
    plus: str
    key: str
    value: str


class CommandLine:
    """The overrides of a launch line in their order; other arguments (``--config-name``, a path) are skipped."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.arguments = arguments
        matches = [(text, _OVERRIDE.fullmatch(text)) for text in arguments]
        self.overrides = [_Override(text, *match.group("plus", "key", "value")) for text, match in matches if match]

    def of(self, key: str) -> list[_Override]:
        """The overrides of ``key``."""
        return [override for override in self.overrides if override.key == key]

    @property
    def ours(self) -> list[_Override]:
        """The switches and keys of this package."""
        return [override for override in self.overrides if override.key.startswith("turnkey")]

    @cached_property
    def own_files(self) -> bool:
        """Whether the user's own configuration files are used, with groups and keys that are unknown here."""
        flags = ("--config", "-cn", "-cp", "-cd")
        return any(a.startswith(flags) or "hydra.searchpath" in a for a in self.arguments)

    def has_own(self, group: str, choice: str) -> bool:
        """Whether the user's configuration folders contain ``choice``, or may: their search paths are not followed."""
        flags, pairs = ("--config-path", "-cp", "--config-dir", "-cd"), pairwise([*self.arguments, ""])
        folders = [Path(word.partition("=")[2] or after) for word, after in pairs if word.partition("=")[0] in flags]
        files = [file for folder in folders if folder.is_dir() for file in folder.glob("*.yaml")]
        texts = [*self.arguments, *(read_text(file, only_utf8=True) for file in files)]
        paths = [path for text in texts if "searchpath" in text for path in _SEARCHED.findall(text)]
        if any(not re.fullmatch(r"pkg://verl\b.*", path) for path in paths):
            return True
        return any((folder / group / f"{choice}.yaml").is_file() or not folder.is_dir() for folder in folders)


def refuse(arguments: Sequence[str]) -> None:
    """:func:`check`, ending the program with the message alone, as Hydra does on its own errors.

    Raises:
        SystemExit: the line is refused; with ``HYDRA_FULL_ERROR=1`` the ConfigError itself.
    """
    try:
        check(arguments, program())
    except ConfigError as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        end(error)


def refuse_split() -> None:
    """Refuse a line on which Hydra's parser, which runs first, would print its usage.

    Raises:
        SystemExit: an option stands between overrides, some of which are ours.
    """
    starts = [place for place, word in enumerate(sys.orig_argv) if re.search(r"\bverl[./]trainer[./]main_ppo", word)]
    line = CommandLine(sys.orig_argv[starts[0] + 1 :] if starts else [])
    if line.ours:
        try:
            check_together(line.arguments, [override.text for override in line.overrides])
        except ConfigError as error:
            end(error)


def end(error: ConfigError) -> NoReturn:
    """End the program with the message alone."""
    print(f"verl-turnkey: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1) from None


def program() -> str:
    """The dotted name of the main program's module if it is one of verl's, else ''."""
    main = sys.modules.get("__main__")
    if (spec := getattr(main, "__spec__", None)) is not None:
        return str(spec.name)
    _, folder, rest = str(getattr(main, "__file__", None) or "").removesuffix(".py").rpartition("/verl/")
    return f"verl.{rest.replace('/', '.')}" if folder else ""


def check(arguments: Sequence[str], main: str = "") -> None:
    """Refuse a line that would not do what it seems to; ignore a line without any of our switches and keys.

    ``main``: the main program that reads the line, as :func:`program` names it.

    Raises:
        ConfigError: names the argument and what to write instead.
    """
    line = CommandLine(arguments)
    for override in line.overrides:
        root = re.split(r"[./@]", override.key)[0]
        if near_miss(root):
            rest = override.key[len(root) :]
            key = f"{'' if rest.startswith('.') else '+'}turnkey{rest}"
            raise ConfigError(f"{override.text}: there is no {root!r}; did you mean {key}={override.value}?")
    if not line.ours:
        return
    if main.startswith(OTHER_PROGRAMS):
        raise ConfigError(
            f"{line.ours[0].text}: {main} has a trainer of its own, which does not use this package: start "
            "verl.trainer.main_ppo; trainer.v1.trainer_mode=turnkey_separate_async gives servers GPUs of their own"
        )
    check_together(arguments, [override.text for override in line.overrides])
    _check_groups(line)
    _check_order(line)
    _check_estimator(line)
    _check_loss(line)
    check_modifiers([(override.text, override.key) for override in line.overrides])
    _check_foreign(line)
    from verl_turnkey.plugins.config.schema import TurnkeyConfig

    default = TurnkeyConfig()
    nodes = [entry.name for entry in fields(default) if is_dataclass(getattr(default, entry.name))]
    errors: list[Exception] = []
    for override in line.ours:
        try:
            _check_own(override, line, default, nodes)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors, IN_LINE)


def _check_own(override: _Override, line: CommandLine, default: Any, nodes: Sequence[str]) -> None:
    """Check a key below ``turnkey``; ``default``: the whole node, ``nodes``: its keys that have keys of their own."""
    if not line.own_files:
        check_node(override.text, override.key, override.value, groups(), nodes)
    elif not override.key.startswith(("turnkey.credit.", "turnkey.loss.")):
        return
    if f"{override.key}.".startswith(f"{KWARGS}.") and not override.plus:
        chosen = [(other.key, other.value) for other in line.ours]
        check_argument(override.text, override.key, chosen, [other.key for other in line.overrides if other.plus])
    elif override.key.startswith("turnkey."):
        _check_key(override, line, default)


def near_miss(root: str) -> bool:
    """Whether ``root``, the first part of a key, is a misspelling of ``turnkey``."""
    plain = re.sub(r"[^a-z]", "", root.lower())
    return root != "turnkey" and ("turnkey" in plain or difflib.SequenceMatcher(None, plain, "turnkey").ratio() >= 0.8)


def groups() -> dict[str, list[str]]:
    """Our config groups, each with its choices."""
    root = config_dir() / "turnkey"
    folders = {"turnkey": root, **{f"turnkey/{path.name}": path for path in sorted(root.iterdir()) if path.is_dir()}}
    return {name: sorted(path.stem for path in folder.glob("*.yaml")) for name, folder in folders.items()}


def _check_groups(line: CommandLine) -> None:
    choices = groups()
    for override in line.overrides:
        key, value = override.key, override.value
        if not key.startswith(("turnkey/", "turnkey@")) and key != "turnkey":
            continue
        if key not in choices and not line.own_files:
            raise ConfigError(f"there is no config group {key!r}{did_you_mean(key, choices)}\n{_listed(choices)}")
        if value.startswith("["):
            raise ConfigError(f"{override.text}: one choice at a time; write {override.plus}{key}=<one of them>")
        if line.own_files and (key not in choices or line.has_own(key, value)):
            continue
        if override.plus != "+" and not line.own_files:
            raise ConfigError(f"{override.text}: write +{key}={value}, with one plus: stock verl has no such group")
        if value not in choices[key]:
            raise ConfigError(_no_choice(key, value, choices[key]))
    for group in dict.fromkeys(override.key for override in line.overrides if override.key in choices):
        if len(texts := [override.text for override in line.of(group)]) > 1:
            raise ConfigError(f"{' and '.join(texts)}: one {_noun(group)} at a time, keep one of them")


def _no_choice(group: str, value: str, choices: Sequence[str]) -> str:
    hint = known_as(value, {"turnkey": "+", "turnkey/loss": "loss"}.get(group, "?")) or did_you_mean(value, choices)
    way_out = ""
    if group == "turnkey" and value in VERLS_ESTIMATORS and value not in WITHOUT_INPUT:
        way_out = f" (verl's own {value} on the rows of this package: +turnkey=base {_ESTIMATOR_KEY}={value})"
    elif group == "turnkey/loss" and value in VERLS_LOSSES:
        hint, way_out = "", f" (verl has it: {_LOSS_KEY}={value})"
    elif group == "turnkey/env":
        way_out = " (any other environment: turnkey.env.id=<gymnasium id>)"
    return f"+{group}={value}: there is no {_noun(group)} {value!r}{hint}{way_out}\n{_listed(choices)}"


def _noun(group: str) -> str:
    return {"turnkey": "method", "turnkey/env": "environment"}.get(group, group.removeprefix("turnkey/"))


def _listed(choices: Iterable[str]) -> str:
    return f"choices: {', '.join(choices)}"


def _check_order(line: CommandLine) -> None:
    """Later groups override earlier ones: a method after its environment would restore the defaults."""
    for first, followers in _ORDER.items():
        place = next((i for i, override in enumerate(line.overrides) if override.key == first), 0)
        if early := [o.text for o in line.overrides[:place] if o.key in followers]:
            text = line.overrides[place].text
            raise ConfigError(f"write {text} before {', '.join(early)}: later groups override earlier ones")


def _check_estimator(line: CommandLine) -> None:
    """verl's key overrides the method's estimator at any position, so the method would have no effect."""
    methods, keys = line.of("turnkey"), line.of(_ESTIMATOR_KEY)
    if not (methods and keys) or methods[0].value == "base":
        return
    method, key = methods[0], keys[-1]
    name = key.value.strip("'\"")
    if name.removeprefix("turnkey/") != method.value and method.value in estimators():
        instead = f"+turnkey={name}" if name in estimators() else f"+turnkey=base {key.text}"
        way_out = "" if name in WITHOUT_INPUT else f", or write {instead} to train {name}"
        raise ConfigError(
            f"{method.text} and {key.text} choose two estimators, and the second would train alone: drop "
            f"{key.text} to train {method.value}{way_out}"
        )


def _check_loss(line: CommandLine) -> None:
    """As with the estimator, verl's key overrides the switch at any position."""
    switches, keys = line.of("turnkey/loss"), line.of(_LOSS_KEY)
    if not (switches and keys):
        return
    switch, key = switches[-1], keys[-1]
    name = key.value.strip("'\"")
    if name.removeprefix("turnkey/") != switch.value:
        raise ConfigError(
            f"{switch.text} and {key.text} choose two policy losses, and the second would train alone: drop "
            f"{key.text} to train with {switch.value}, or {switch.text} to train with {name}"
        )


def _check_foreign(line: CommandLine) -> None:
    settings = [(override.text, our_name) for override in line.overrides if (our_name := foreign(override.key))]
    # Other environment keys of verl-agent; with a plus the root key may be the user's own.
    rest = "turnkey.env.kwargs, or the tasks' own arguments (`turnkey tasks --kwargs`)"
    if not line.own_files:
        bare = [override for override in line.overrides if not (override.plus or foreign(override.key))]
        settings += [(override.text, BARE[override.key]) for override in bare if override.key in BARE]
        settings += [(override.text, rest) for override in bare if override.key.startswith("env.")]
    if settings:
        raise ConfigError(refusal(settings))


def _check_key(override: _Override, line: CommandLine, node: Any) -> None:
    """Check a key below ``node``: for a misspelt one without a plus, Hydra would recommend adding one."""
    where = "turnkey"
    for part in override.key.split(".")[1:]:
        if where in ("turnkey.credit", "turnkey.loss"):
            _check_parameter(override, part, line, "turnkey" if where == "turnkey.credit" else "turnkey/loss")
            return
        if not is_dataclass(node):
            return  # free arguments, or a key too deep: Hydra's own message fits
        names = [entry.name for entry in fields(node)]
        if part not in names:
            raise ConfigError(
                f"{where}.{part}: unknown key{did_you_mean(part, names) or '.'} Known keys: {', '.join(sorted(names))}"
            )
        node, where = getattr(node, part), f"{where}.{part}"


def _check_parameter(override: _Override, name: str, line: CommandLine, group: str) -> None:
    """Check a parameter of the method or the loss on the line; name the owner of another method's parameter."""
    from verl_turnkey.plugins.config.schema import MODIFY, not_a_parameter, params_by_name

    if group == "turnkey" and name == MODIFY:
        return
    switches = line.of(group)
    if not switches:
        return
    chosen, names = switches[0].value, params_by_name("credit" if group == "turnkey" else "loss")
    if chosen in names and name not in names[chosen]:
        raise ConfigError(not_a_parameter(override.key, chosen, names))


def check_together(arguments: Sequence[str], overrides: Iterable[str]) -> None:
    """Refuse an option between overrides: Hydra takes the overrides after it for unknown options.

    Raises:
        ConfigError: names the option.
    """
    texts = {*overrides}
    places = [place for place, word in enumerate(arguments) if word in texts]
    between = [word for word in arguments[places[0] : places[-1]] if word.startswith("-")] if places else []
    if between:
        raise ConfigError(
            f"{between[0]} stands between overrides, and Hydra reads those after it as unknown options: write "
            f"{', '.join(between)} before {arguments[places[0]]} or after {arguments[places[-1]]}"
        )


def check_node(text: str, key: str, value: str, groups: Mapping[str, Sequence[str]], nodes: Iterable[str]) -> None:
    """Refuse null or a recipe's name as a node's value: ``turnkey.env=frozenlake`` for ``+turnkey/env=frozenlake``.

    ``nodes``: the keys below ``turnkey`` that have keys of their own.

    Raises:
        ConfigError: names the group, or what to set instead.
    """
    node, group = key.removeprefix("turnkey."), key.replace(".", "/")
    if key.startswith("turnkey.") and node in {*nodes} and value.lower() == "null":
        raise ConfigError(
            f"{text} drops what the recipes set there: leave it out, or set keys below it ({key}.<key>=...)"
        )
    if key.count(".") == 1 and value in groups.get(group, ()):
        raise ConfigError(f"{text}: a recipe is chosen with a slash and one plus: write +{group}={value}")


def check_modifiers(overrides: Iterable[tuple[str, str]]) -> None:
    """Refuse a list of modifiers beside a recipe of one, which it would replace; ``overrides``: text and key of each.

    Raises:
        ConfigError: names both.
    """
    texts = {key: text for text, key in overrides}
    recipe, modifiers = texts.get("turnkey/modifier"), texts.get("turnkey.credit.modify")
    if recipe and modifiers:
        raise ConfigError(
            f"{modifiers} replaces the modifier of {recipe}: list them all in turnkey.credit.modify, and drop {recipe}"
        )


def check_argument(text: str, key: str, recipes: Sequence[tuple[str, str]], added: Iterable[str]) -> None:
    """Refuse an environment argument without a plus that no recipe of the line sets.

    ``recipes``: group and choice of those on the line; ``added``: the keys that the line adds.

    Raises:
        ConfigError: the override with its plus, and the closest argument.
    """
    arguments = OmegaConf.merge(*({}, *(_arguments(*recipe) for recipe in recipes)))
    for name in _names(text, key):
        if name in arguments or {KWARGS, f"{KWARGS}.{name}"} & {*added}:
            continue
        hint = did_you_mean(name, arguments) or "."
        set_there = f" They set {', '.join(map(str, arguments))}." if arguments else ""
        raise ConfigError(
            f"{text}: no recipe of this line sets the argument {name!r}{hint}{set_there} An argument that none sets "
            f"needs a plus: +{f'{KWARGS}.{name}=...' if key == KWARGS else text}"
        )


def _names(text: str, key: str) -> list[str]:
    """The arguments that an override of ``turnkey.env.kwargs``, or of a key below it, sets."""
    if key != KWARGS:
        return [key.removeprefix(f"{KWARGS}.").split(".")[0]]
    value = read(text)[1]
    return list(value) if isinstance(value, dict) else []


def _arguments(group: str, choice: str) -> Any:
    """``turnkey.env.kwargs`` of a recipe, including those of the recipe that it builds on."""
    file: Path = config_dir() / group / f"{choice}.yaml"
    if not file.is_file():
        return {}
    node: Any = OmegaConf.load(file)
    bases = [base for base in node.get("defaults") or [] if base != "_self_"]
    kwargs = OmegaConf.select(node, KWARGS) or OmegaConf.select(node, "env.kwargs") or {}  # by the file's package
    return OmegaConf.merge(*({}, *(_arguments(group, base) for base in bases), kwargs))
