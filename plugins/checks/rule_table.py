"""Every rule of the checks as a row: id, level, message, fix. Read from the calls in the source.

A message is ``problem: set key=value``; ``<`` and ``>`` enclose the values that a run fills in.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.checks import run
from verl_turnkey.plugins.checks.findings import IGNORE, Refusal, ignored
from verl_turnkey.plugins.checks.limits import COUNTS, MAY_BE_NULL
from verl_turnkey.plugins.checks.values import RANGES, value_at

LEVELS = {"refuse": "error", "Refusal": "fatal", "warn": "warning", "Change": "notice"}
"""``error`` and ``warning`` can be ignored. ``fatal`` cannot, since the checks cannot continue without the value;
nor can ``notice``, which reports a change of the configuration."""
SHARED = {
    function.name: (node, [argument.arg for argument in function.args.args])
    for function in ast.parse(Path(str(run.__file__)).read_text(encoding="utf-8")).body
    if isinstance(function, ast.FunctionDef)
    for node in ast.walk(function)
    if isinstance(node, ast.Call) and ast.unparse(node.func) in LEVELS
}
"""functions with a message that several rules share: the call with it, and the names of their arguments"""
LEVELS |= {name: LEVELS[ast.unparse(call.func)] for name, (call, _) in SHARED.items()}
RANGE = "range:"
"""prefix of the ids of rules about the values of a key; the key follows"""
MODULES = (*(f"checks.{path.stem}" for path in sorted(Path(__file__).parent.glob("*.py"))), "config.resolve")
CHOICES = ("closest", "_closest", "did_you_mean")
"""functions that end a message with the closest name, or all of them"""
_VERBS = "set|write|choose|give|drop|raise|lower|add|use|take|train|expected|pip install|either|to start over"
_FIX = re.compile(rf"(?:[:.;,]| or|\))\s((?:{_VERBS})\b.*)", re.IGNORECASE | re.DOTALL)

# Rules whose message is composed elsewhere: problem, fix.
COMPOSED = {
    "adapter-missing": ("<target_modules>: the model has no such modules", "write names that the message lists"),
    "adapter-missing-here": ("<target_modules>: the model lacks some of them", "write names that the message lists"),
    "agent-sandbox": (
        "the sandbox of turnkey.agent cannot start",
        "set turnkey.agent.sandbox=none, or install what is missing on every node",
    ),
    "columns-without-record": ("<method> needs columns that rows without a record do not provide", "use turnkey_env"),
    "combination": ("this layout, discount or history changes the meaning of <method>", "follow the message"),
    "examples-invalid": ("turnkey.rollout.examples cannot be read", "follow the message"),
    "groups-memory": ("<method> remembers only the groups that are trained", ""),
    "group-replaces-choice": ("+turnkey would replace the agent loop of your file", "write it on the launch line"),
    "group-replaces-override": ("+turnkey would replace the trainer of your file", "write it on the launch line"),
    "method-clash": ("a key of another framework, which verl does not read", "write the key that the message gives"),
    "path-missing": ("<key>=<path> does not exist, or cannot be written to", "give an existing, writable path"),
    "path-missing-here": ("<key>=<path> is not on this machine; the Ray cluster may have it", ""),
    "prm-vocabulary": ("turnkey.prm.path has another tokenizer than the actor", "take a model with the actor's"),
    "reward-column-clash": (
        "the environment and a component of turnkey.rewards give the same column",
        "give the component another column",
    ),
    "task-invalid": ("a task of the data is invalid", "follow the message"),
    "verl-version": ("verl <version> is outside the supported range", "run `turnkey doctor --verl`"),
    # of other errors, see findings.ID_BY_ERROR
    "environment-arguments": ("an argument that the environment does not take", "write one that the message lists"),
    "environment-package": ("the package of the environment is not installed", "run the command in the message"),
    "environment-unknown": ("there is no environment with that id", "write one that the message lists"),
    "module-import": (
        "a module of turnkey.modules, or of another key with code, cannot be imported",
        "follow the message",
    ),
    "prompt-too-long": ("the first prompt is longer than data.max_prompt_length", "raise it"),
    "task-format": ("a row of the data contains no task", "write the file with `turnkey tasks`"),
    "unknown-turnkey-key": ("an unknown key below turnkey", "write one that the message lists"),
}


@dataclass(frozen=True)
class Rule:
    """A rule of the checks; ``fix`` is empty if the message has none, ``verl`` if the rule holds for every version."""

    id: str
    level: str
    says: str
    fix: str = ""
    verl: str = ""


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule by its id, in alphabetical order, including the rules about values of verl's keys."""
    every = [*_written(), *_ranges()]
    every += [Rule(id, "fatal", *COMPOSED[id]) for id in COMPOSED if id not in {rule.id for rule in every}]
    return {rule.id: rule for rule in sorted(every, key=lambda rule: rule.id)}


def _written() -> Iterator[Rule]:
    """The rules whose id is a literal in the source."""
    for name in MODULES:
        module = importlib.import_module(f"verl_turnkey.plugins.{name}")
        tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            for node in ast.walk(function):
                level = LEVELS.get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
                if isinstance(node, ast.Call) and level and isinstance(node.args[0], ast.Constant):
                    yield _rule(node, level, {**vars(module), **_texts_before(node, function)})


def _texts_before(call: ast.AST, function: ast.FunctionDef) -> dict[str, ast.expr]:
    """The texts that a function assigns to variables before its call of a rule."""
    texts: dict[str, ast.expr] = {}
    assignments = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
    for node in sorted(assignments, key=lambda node: node.lineno):
        if node.lineno > getattr(call, "lineno", 0):
            break
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = [*zip(target.elts, value.elts, strict=True)]
        for name, text in pairs:
            is_text = isinstance(text, ast.JoinedStr) or isinstance(getattr(text, "value", None), str)
            if isinstance(name, ast.Name) and isinstance(text, ast.expr) and (is_text or _of_setting(text)):
                texts[name.id] = text
    return texts


def _rule(call: ast.Call, level: str, names: Mapping[str, Any]) -> Rule:
    id, message = ast.literal_eval(call.args[0]), call.args[1]
    if ast.unparse(call.func) in SHARED:
        shared, arguments = SHARED[ast.unparse(call.func)]
        message = shared.args[1]
        names = {**vars(run), **{name: _text(node, names) for name, node in zip(arguments, call.args, strict=True)}}
    verl = next((ast.literal_eval(word.value) for word in call.keywords if word.arg == "verl"), "")
    if id in COMPOSED:
        return Rule(id, level, *COMPOSED[id], verl)
    text = " ".join(_text(message, names).split())
    fix = _FIX.search(text)
    if fix:
        return Rule(id, level, text[: fix.start()], fix[1], verl)
    listed = any(isinstance(node, ast.Name) and node.id in CHOICES for node in ast.walk(message))
    says, sign, _ = text.partition("; choices")
    way_out = "write one that the message lists" if listed or sign else "drop it" if "has no effect" in text else ""
    return Rule(id, level, says, way_out, verl)


def _of_setting(node: ast.AST) -> bool:
    """Whether it is ``run.setting(key)``."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) == "run.setting"


def _text(node: ast.AST, names: Mapping[str, Any]) -> str:
    """A message, with ``<name>`` for values of a run; constants of the module are filled in here."""
    match node:
        case ast.Constant(value):
            return str(value)
        case ast.JoinedStr(values):
            return "".join(_text(value, names) for value in values)
        case ast.FormattedValue(value):
            return _text(value, names)
        case ast.BinOp(left, ast.Add(), right) if any(isinstance(side, ast.JoinedStr) for side in (left, right)):
            return _text(left, names) + _text(right, names)
        case ast.Name(id):
            known = names.get(id)
            if isinstance(known, ast.expr):
                return _text(known, {**names, id: None})  # it may refer to itself
            return known if isinstance(known, str) else f"<{id}>"
        case ast.Attribute(_, attribute):
            return f"<{attribute}>"
        case ast.Call(ast.Name(id)) if id in CHOICES:
            return ""
        case ast.Call(_, [key]) if _of_setting(node):
            text = _text(key, names)
            return f"{text}=<{'value' if '<' in text else text.rpartition('.')[2]}>"
        case _:
            return "<...>"


def _ranges() -> Iterator[Rule]:
    """The rules about the values of verl's keys."""
    expected = dict.fromkeys((*COUNTS, *MAY_BE_NULL), "a whole number, 1 or more")
    expected |= {row.key: row.expected for row in RANGES}
    for key, text in expected.items():
        yield Rule(f"{RANGE}{key}", "error", f"{key} is out of its range", f"expected {text}")


def check_ignored(config: DictConfig) -> None:
    """Refuse ids in ``turnkey.ignore`` that are unknown, or of rules that cannot be ignored."""
    for id in sorted(ignored(config)):
        rule, key = rules().get(id), id.removeprefix(RANGE)
        level = "fatal" if id.startswith(f"{RANGE}turnkey.") else rule.level if rule else ""
        if level in ("fatal", "notice"):
            raise Refusal("ignore-in-vain", f"{IGNORE}: the rule {id!r} cannot be ignored ({level})")
        if not (rule or level) and (key == id or value_at(config, key) is None):
            raise Refusal(
                "ignore-unknown",
                f"{IGNORE}: there is no rule {id!r}{did_you_mean(id, rules()) or '.'} "
                "`turnkey check --rules` lists them",
            )


def as_json() -> str:
    """All rules as a JSON list of objects with the fields of :class:`Rule`."""
    return json.dumps([asdict(rule) for rule in rules().values()], indent=1)


def as_text() -> str:
    """All rules in four columns, separated by tabs."""
    return "\n".join("\t".join((rule.id, rule.level, rule.says, rule.fix)) for rule in rules().values())
