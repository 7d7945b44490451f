"""Keeps the recipe files up to date: their parameters, defaults and comments come from the dataclasses.

``turnkey tables`` rewrites these parts of the files, and a test compares them.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec, estimators, modifiers
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.verl_api.ledger import loss_names

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec

Spec = TypeVar("Spec", bound="EstimatorSpec | ModifierSpec | LossSpec")

# New files, before title and parameters are filled in.
METHOD = """\
# @package _global_
#
defaults: [base, _self_]
algorithm:
  adv_estimator: {name}
turnkey:
  credit: {{}}
"""
LOSS = """\
# @package _global_
#
actor_rollout_ref:
  actor:
    policy_loss:
      loss_mode: {name}
turnkey:
  loss: {{}}
"""
MODIFIER = """\
# @package _global_
#
turnkey:
  credit:
    modify:
      - name: {name}
"""


#: Recipes of the group ``turnkey`` that combine a method with other parts; written by hand.
COMBINED = ("istar",)


def shipped() -> dict[str, EstimatorSpec]:
    """The estimators of this package, without those that a user's module registered."""
    return _of_package(estimators())


def shipped_modifiers() -> dict[str, ModifierSpec]:
    """The modifiers of this package."""
    return _of_package(modifiers())


def shipped_losses() -> dict[str, LossSpec]:
    """The policy losses of this package that can be chosen under verl."""
    return _of_package(_losses())


def own(kind: Literal["estimators", "modifiers", "losses"]) -> dict[str, Any]:
    """The estimators, modifiers or losses that modules of the user registered: spec by name."""
    return _of_package({"estimators": estimators, "modifiers": modifiers, "losses": _losses}[kind](), False)


def _losses() -> dict[str, LossSpec]:
    if not (names := loss_names()):
        return {}
    from verl_turnkey.losses import losses

    return {name: losses()[name] for name in names}


def _of_package(specs: Mapping[str, Spec], this: bool = True) -> dict[str, Spec]:
    """Those of this package, or with ``this=False`` those of others."""
    return {name: spec for name, spec in specs.items() if spec.fn.__module__.startswith("verl_turnkey.") == this}


def names() -> list[str]:
    """Recipes of the group ``turnkey``: one per estimator, and ``base`` for an estimator of your own."""
    return sorted(["base", *shipped()])


def loss_recipes() -> list[str]:
    """Recipes of the group ``turnkey/loss``, one per policy loss of this package."""
    return [f"loss/{name}" for name in shipped_losses()]


def modifier_recipes() -> list[str]:
    """Recipes of the group ``turnkey/modifier``, one per modifier of this package."""
    return [f"modifier/{name}" for name in shipped_modifiers()]


def render(recipe: str) -> str:
    """The text of a new file for a method, a policy loss (``loss/<name>``) or a modifier (``modifier/<name>``)."""
    group, _, name = recipe.rpartition("/")
    return updated(recipe, {"": METHOD, "loss": LOSS, "modifier": MODIFIER}[group].format(name=name))


def updated(recipe: str, text: str) -> str:
    """The ``text`` of a recipe's file, with title and parameters taken from the code.

    ``base`` holds the whole node ``turnkey:``, a method ``turnkey.credit``, ``loss/<name>`` ``turnkey.loss``, and
    ``modifier/<name>`` the entry of ``turnkey.credit.modify``.
    """
    if recipe == "base":
        return _with(text, "turnkey:", TurnkeyConfig(), recipe)
    group, _, name = recipe.rpartition("/")
    specs: dict[str, Any] = {"": estimators, "loss": shipped_losses, "modifier": shipped_modifiers}[group]()
    key = {"": "  credit:", "loss": "  loss:", "modifier": f"      - name: {name}"}[group]
    package, _, rest = text.split("\n", 2)
    titled = f"{package}\n# {specs[name].summary} ({specs[name].paper})\n{rest}"
    return _with(titled, key, specs[name].params(), recipe)


def _with(text: str, key: str, params: Any, recipe: str) -> str:
    indent = len(key) - len(key.lstrip()) + 2
    block = re.compile(rf"^{key}.*\n(?:{' ' * indent}.*\n)*", re.MULTILINE)
    if not block.search(text):
        raise ValueError(f"{recipe}.yaml: expected a line {key!r}, for the parameters under it")
    return block.sub(lambda _: "".join(f"{line}\n" for line in _node(key, params, indent)), text, count=1)


def write(root: Path) -> list[Path]:
    """Update every recipe file under ``root`` and make missing ones; returns the changed files."""
    changed = []
    for recipe in [*names(), *loss_recipes(), *modifier_recipes()]:
        file = root / "recipe" / "config" / "turnkey" / f"{recipe}.yaml"
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if text != (new := updated(recipe, text) if text else render(recipe)):
            file.parent.mkdir(exist_ok=True)
            file.write_text(new, encoding="utf-8")
            changed.append(file)
    return changed


def _node(key: str, node: Any, indent: int) -> Iterator[str]:
    yield key if fields(node) else f"{key} {{}}"
    docs = attribute_docs(type(node))
    for entry in fields(node):
        value, name = getattr(node, entry.name), f"{' ' * indent}{entry.name}:"
        if is_dataclass(value):
            yield from _node(name, value, indent + 2)
        else:
            yield from (f"{' ' * indent}# {line}" for line in textwrap.wrap(docs.get(entry.name, ""), 118 - indent))
            yield f"{name} {scalar(value)}"


def scalar(value: Any) -> str:
    """A value as YAML: JSON, but words without quotes, and floats always with a decimal point."""
    if isinstance(value, float) and "e" in repr(value) and "." not in repr(value):
        return repr(value).replace("e", ".0e")
    if isinstance(value, str) and value.isidentifier() and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


# YAML reads these as other values than strings.
_YAML_WORDS = ("null", "true", "false", "yes", "no", "on", "off", "y", "n")


def attribute_docs(cls: type) -> dict[str, str]:
    """The documentation of a dataclass's fields: the string below a field, or the comment behind it."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: token.string.lstrip("# ") for token in _tokens(source) if token.type == tokenize.COMMENT
    }
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for before, after in zip(body.body, [*body.body[1:], None], strict=True):
        if not (isinstance(before, ast.AnnAssign) and isinstance(before.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr):
            docs[before.target.id] = " ".join(str(ast.literal_eval(after.value)).split())
        elif before.lineno in comments:
            docs[before.target.id] = comments[before.lineno]
    return docs


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    return tokenize.generate_tokens(io.StringIO(source).readline)
