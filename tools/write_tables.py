"""Write the tables of the documentation and the parameters in the recipes, which are made from the code.

    python tools/write_tables.py

It prints the files that it changed. Tables stand between markers in the pages; a recipe's title, parameters, defaults
and comments come from the dataclasses. Tests compare them.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import verl_turnkey.advantage
from verl_turnkey.advantage import estimators
from verl_turnkey.advantage.registry import TIERS
from verl_turnkey.plugins.cli.tables import (
    PARAMETERS,
    attribute_docs,
    by_tier,
    defaults,
    environments,
    excerpt,
    losses,
    modifiers,
    needs,
    scalar,
    shipped,
    shipped_losses,
    shipped_modifiers,
    table,
    write_between,
)
from verl_turnkey.plugins.config.schema import TurnkeyConfig

ROOT = Path(__file__).resolve().parents[1]

# New files, before title and parameters are filled in, by group of recipes.
NEW = {
    "": """\
# @package _global_
#
defaults: [base, _self_]
algorithm:
  adv_estimator: {name}
turnkey:
  credit: {{}}
""",
    "loss": """\
# @package _global_
#
actor_rollout_ref:
  actor:
    policy_loss:
      loss_mode: {name}
turnkey:
  loss: {{}}
""",
    "modifier": """\
# @package _global_
#
turnkey:
  credit:
    modify:
      - name: {name}
""",
}

#: Recipes of the group ``turnkey`` that combine a method with other parts; written by hand.
COMBINED = ("istar",)


# --- recipes ----------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """Recipes of the group ``turnkey``: one per estimator, and ``base`` for an estimator of your own."""
    return sorted(["base", *shipped()])


def recipes() -> list[str]:
    """All that are written here: also ``loss/<name>`` per policy loss, ``modifier/<name>`` per modifier."""
    loss, modifier = (f"loss/{name}" for name in shipped_losses()), (f"modifier/{name}" for name in shipped_modifiers())
    return [*names(), *loss, *modifier]


def render(recipe: str) -> str:
    """The text of a new file for a method, a policy loss (``loss/<name>``) or a modifier (``modifier/<name>``)."""
    group, _, name = recipe.rpartition("/")
    return updated(recipe, NEW[group].format(name=name))


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


def write_recipes(root: Path) -> list[Path]:
    """Update every recipe file under ``root`` and make missing ones; returns the changed files."""
    changed = []
    for recipe in recipes():
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


# --- tables -----------------------------------------------------------------------------------------------------------


def core_methods() -> str:
    """One short row per core estimator, and how many others there are."""
    core = {name: spec for name, spec in by_tier() if spec.tier == "core"}
    rows = [(f"[`+turnkey={name}`](docs/methods/{name}.md)", spec.summary, *needs(spec)) for name, spec in core.items()]
    others = f"and [{len(shipped()) - len(core)} more](docs/methods.md)."
    return f"{table(('switch', 'what it does', 'needs', 'source'), rows)}\n{others}\n"


def tiers() -> str:
    """What each tier of methods means, how many are in it, and those that the page names nowhere else."""
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8").split("<!-- tiers: ")[0]
    links = {name: f"[`{name}`](methods/{name}.md)" for name in shipped()}
    further = [f"- {link}: {shipped()[name].summary}" for name, link in links.items() if link not in page]
    numbers = Counter(spec.tier for spec in shipped().values())
    rows = ((tier, numbers[tier], meaning) for tier, meaning in TIERS.items())
    return table(("tier", "methods", "meaning"), rows) + ("\n" + "\n".join(further) + "\n" if further else "")


def strategies() -> str:
    """One row per strategy of rollouts."""
    from verl_turnkey.plugins.rollout.strategies import strategies as registered

    rows = []
    for name, spec in registered().items():
        if spec.cls.__module__.startswith("verl_turnkey."):
            gives = ", ".join(f"`extra.{column}`" for column in spec.gives) or "-"
            rows.append((f"[`{name}`](#{name})", spec.summary, defaults(spec.cls()), gives, spec.source))
    return table(("strategy", "what it does", PARAMETERS, "gives", "source"), rows)


def environment_pages() -> str:
    """The environments by name, each a link to its page."""
    from verl_turnkey.envs.catalog import ADAPTERS

    links = ", ".join(f"[{adapter.name}](docs/{adapter.page})" for adapter in ADAPTERS)
    return textwrap.fill(links, 120, break_on_hyphens=False) + "\n"


def doors() -> str:
    """The capabilities, and what is refused where, from the table that the tests read."""
    import yaml

    file = ROOT / "tests" / "data" / "doors.yaml"
    cells = yaml.safe_load(file.read_text(encoding="utf-8"))["cells"]
    refused = [
        f"- {name}: refused by {', '.join(door for door, cell in row.items() if cell.startswith('refused'))}"
        for name, row in cells.items()
        if any(cell.startswith("refused") for cell in row.values())
    ]
    names = textwrap.fill(f"{', '.join(name for name in cells if name != 'plain')}.", 120)
    return "\n".join([names, "", *refused]) + "\n"


#: Page, marker, and what stands between ``<!-- marker: ... -->`` and ``<!-- /marker -->``.
PLACES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "methods", core_methods),
    ("README.md", "envs", environment_pages),
    ("docs/methods.md", "tiers", tiers),
    ("docs/modifiers.md", "modifiers", lambda: excerpt(modifiers(), ("modifier", "what it does", "source"))),
    ("docs/losses.md", "losses", lambda: excerpt(losses(), ("switch", "what it does", "source"))),
    ("docs/branching.md", "strategies", lambda: excerpt(strategies(), ("strategy", "what it does", "source"))),
    ("docs/environments.md", "envs", lambda: excerpt(environments(), ("environment", "what it is", "switch"))),
    ("docs/capabilities.md", "doors", doors),
)


def write(root: Path) -> list[Path]:
    """Write every table into its page under ``root``, and the parameters into the recipes; returns changed files."""
    changed = dict.fromkeys(write_recipes(root))
    for name, marker, content in PLACES:
        if write_between(root / name, marker, content()):
            changed[root / name] = None
    return list(changed)


def main() -> None:
    code = Path(verl_turnkey.advantage.__file__ or "").resolve().parents[1]
    if code != ROOT:
        sys.exit(
            f"the package that Python imports is in {code}, and this clone is {ROOT}: its tables and files can only be "
            f"made by its own code. Install it first: pip install --no-deps -e {ROOT}"
        )
    for page in write(ROOT):
        print(page.relative_to(ROOT))


if __name__ == "__main__":
    main()
