"""``turnkey new``: the files of a new estimator, loss or environment, which work before the author changes a line.

In a clone of the repository these are all files that the completeness test asks for; elsewhere one file of the user's
own, with the launch line that uses it. The texts are in ``templates``.
"""

from __future__ import annotations

import ast
import keyword
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

from verl_turnkey.envs.user_modules import import_installed
from verl_turnkey.plugins.config.foreign_keys import VERLS_ESTIMATORS
from verl_turnkey.plugins.config.overrides import override


@dataclass(frozen=True)
class Kind:
    """What ``turnkey new`` writes for a kind, and what it prints."""

    files: dict[str, str]
    """in a clone: where each template goes"""
    recipe: str
    """in a clone: the recipe, which `turnkey tables` makes unless there is a template"""
    by_hand: tuple[str, ...]
    """in a clone: what the author edits afterwards"""
    tests: str
    """in a clone: what tests it, beside the completeness test and the pages"""
    summary: str
    """default of --summary: what the templates compute"""
    use: tuple[str, ...]
    """commands for a file of the user's own"""


KINDS = {
    "estimator": Kind(
        files={
            "module": "advantage/methods/{name}.py",
            "twin": "tests/unit/naive/{name}.py",
            "test": "tests/unit/advantage/methods/test_{name}.py",
            "page": "docs/methods/{name}.md",
        },
        recipe="recipe/config/turnkey/{name}.yaml",
        by_hand=(
            "advantage/methods/{name}.py: parameters, formula, source, summary",
            "tests/unit/naive/{name}.py: the formula as a plain loop",
            "tests/unit/advantage/methods/test_{name}.py: the parameters it is compared with, an example by hand",
            "docs/methods/{name}.md: the page, with the numbers that its snippet prints",
        ),
        tests="tests/unit/advantage/methods/test_{name}.py tests/unit/advantage/test_all_estimators.py",
        summary="each step's discounted return against the mean of its group",
        use=(
            "python {file}",
            "python -m verl.trainer.main_ppo +turnkey=base {modules} algorithm.adv_estimator={name} ...",
        ),
    ),
    "loss": Kind(
        files={
            "module": "losses/{name}.py",
            "test": "tests/unit/losses/test_{name}.py",
        },
        recipe="recipe/config/turnkey/loss/{name}.yaml",
        by_hand=(
            "losses/{name}.py: parameters, formula, source, summary",
            "tests/unit/losses/test_{name}.py: the formula as a plain loop, an example by hand",
            "docs/losses.md: the section {name}",
        ),
        tests="tests/unit/losses",
        summary="PPO's clipped loss with one importance ratio per token",
        use=(
            "python {file}",
            "python -m verl.trainer.main_ppo +turnkey=gigpo {modules} "
            "actor_rollout_ref.actor.policy_loss.loss_mode={name} ...",
        ),
    ),
    "env": Kind(
        files={
            "module": "envs/adapters/{name}.py",
            "test": "tests/unit/envs/adapters/test_{name}.py",
            "page": "docs/envs/{name}.md",
            "recipe": "recipe/config/turnkey/env/{name}.yaml",
        },
        recipe="recipe/config/turnkey/env/{name}.yaml",
        by_hand=(
            "envs/adapters/{name}.py: the environment",
            "tests/unit/envs/adapters/test_{name}.py: what holds for it",
            "docs/envs/{name}.md: the page",
            "recipe/config/turnkey/env/{name}.yaml: its arguments, prompt, length of an episode",
            "envs/catalog.py, where it wraps a package or needs something: its entry",
        ),
        tests="tests/unit/envs/adapters/test_{name}.py",
        summary="find a number by guesses",
        use=(
            "turnkey env-check my/{camel}-v0 --module {file}",
            "turnkey train {file} --model MODEL turnkey.rollout.prompt=conversation "
            "turnkey.rollout.max_tokens_per_turn=32 turnkey.rollout.max_turns=6",
        ),
    ),
}


def own_file(kind: str, name: str, path: Path, summary: str | None = None) -> list[str]:
    """Write one file of the user's own to ``path``; returns what to say of it."""
    check_name(kind, name)
    if path.suffix != ".py":
        raise ValueError(f"--out: expected the path of a .py file, got {path}")
    if path.stem.isidentifier() and not path.exists() and _installed(path.stem):
        raise ValueError(
            f"{path} would hide the installed module {path.stem!r}: choose another name, or a file by --out"
        )
    file = shlex.quote(str(path))
    text = render(kind, "own", name, summary, file)
    _refuse_existing([path])
    _write({path: text})
    words = {"file": file, "modules": shlex.quote(override("turnkey.modules", [path]))}
    commands = [command.format(**words, name=name, camel=camel(name)) for command in KINDS[kind].use]
    return [f"Written: {path}. It works as it is; make it yours. Then:", *(f"    {command}" for command in commands)]


def _installed(name: str) -> bool:
    """Whether there is a module ``name``, other than in the current folder."""
    origin = getattr(find_spec(name), "origin", None)
    return bool(origin) and Path.cwd() not in [*Path(str(origin)).parents][:2]


def in_clone(kind: str, name: str, root: Path, summary: str | None = None) -> list[str]:
    """Write all files of ``name`` into the clone at ``root`` and register it there; returns what to say of it."""
    if kind == "loss" and find_spec("torch") is None:
        raise ValueError("a loss is written with torch, which is not installed here: pip install torch")
    check_name(kind, name)
    new = {root / path.format(name=name): render(kind, text, name, summary) for text, path in KINDS[kind].files.items()}
    changes = {root / path: change for path, change in _changes(kind, name, summary)}
    _refuse_existing([*new, root / KINDS[kind].recipe.format(name=name)])
    _write(new | {path: change(path.read_text(encoding="utf-8")) for path, change in changes.items()})
    # In another interpreter: its registries contain the new one.
    code = "from verl_turnkey.plugins.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "tables"], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"the files are written, but `turnkey tables` failed: {done.stderr.strip() or done.stdout}")
    tables = [root / line for line in done.stdout.splitlines()]
    written = sorted({str(path.relative_to(root)) for path in (*new, *changes, *tables)})
    return [
        "Written or changed:",
        *(f"    {path}" for path in written),
        "It works as it is. To make it yours, edit:",
        *(f"    {line.format(name=name)}" for line in KINDS[kind].by_hand),
        "Then:",
        "    turnkey tables    # recipe and tables, after a change of parameters or summary",
        "    ruff format . && ruff check .",
        f"    pytest tests/unit/test_completeness.py tests/unit/docs {KINDS[kind].tests.format(name=name)} "
        f'-k "{name} or whole or table"',
        "    python tests/contract/plugins/checks/test_golden.py    # with verl: puts on record what the recipe sets",
    ]


def check_name(kind: str, name: str) -> None:
    """Raise ``ValueError`` unless ``name`` can be the name of a new one."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ValueError(f"NAME: expected a Python identifier in snake case such as my_{kind}, got {name!r}")
    if holder := _holder(kind, name):
        raise ValueError(f"NAME: expected a new name, but {name!r} is {holder}")


def _holder(kind: str, name: str) -> str | None:
    """What uses the name already; None: nothing."""
    import_installed([f"{kind}s"])
    if kind == "estimator" and name in VERLS_ESTIMATORS:
        return "an estimator of verl's"
    if {name, camel(name)} & _used(kind):
        return "a name that the file of a new one uses itself"
    if kind == "env":
        from verl_turnkey.envs.catalog import ADAPTERS

        return next((entry.id for entry in ADAPTERS if name == entry.module or camel(name) == entry.name), None)
    if kind == "loss":
        from verl_turnkey.losses import losses as registered
    else:
        from verl_turnkey.advantage import estimators as registered
    return f"the {kind} of {registered()[name].fn.__module__}" if name in registered() else None


def _used(kind: str) -> set[str]:
    """Names of the templates' code."""
    names: set[str] = set()
    for text in ("module", "own"):
        for node in ast.walk(ast.parse(render(kind, text, "the_new_one", file="the_new_one.py"))):
            names |= {getattr(node, name) for name in ("id", "arg") if isinstance(getattr(node, name, None), str)}
            if isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return names - {"the_new_one", "TheNewOne"}


def camel(name: str) -> str:
    """MyMethod for my_method."""
    return "".join(word.capitalize() for word in name.split("_"))


def render(kind: str, text: str, name: str, summary: str | None = None, file: str = "") -> str:
    """The template ``text`` of ``kind`` for ``name``."""
    summary = KINDS[kind].summary if summary is None else summary
    if not 0 < len(summary.strip()) <= 100 or not summary.isprintable() or set(summary) & set('"|\\'):
        raise ValueError(
            f"--summary: expected a line of 1 to 100 characters without quotation marks, bars and backslashes, "
            f"got {summary!r}"
        )
    template = files("verl_turnkey.plugins.cli") / "templates" / kind / f"{text}.txt"
    values = {"name": name, "camel": camel(name), "summary": summary, "file": file}
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def _changes(kind: str, name: str, summary: str | None) -> Iterator[tuple[str, Callable[[str], str]]]:
    """The files of a clone that get a few lines more."""
    if kind == "estimator":
        yield "advantage/methods/__init__.py", lambda text: _with_import(text, name)
    elif kind == "loss":
        yield "losses/__init__.py", lambda text: _with_import(text, name)
        section = render(kind, "section", name, summary)
        yield "docs/losses.md", lambda text: _before(text, "## In your own training loop\n", section)
    else:
        yield "envs/catalog.py", lambda text: text.removesuffix(")\n") + render(kind, "entry", name, summary) + ")\n"


def _with_import(text: str, name: str) -> str:
    """With ``name`` in the list of the import that registers its neighbours."""
    imported = re.search(r"import \(  # noqa: F401.*\n((?:    \w+,\n)+)\)", text)
    if not imported:
        raise ValueError("expected `import (  # noqa: F401 ...` with one module in each line")
    lines = sorted([*imported[1].splitlines(keepends=True), f"    {name},\n"])
    return text[: imported.start(1)] + "".join(lines) + text[imported.end(1) :]


def _before(text: str, heading: str, section: str) -> str:
    if heading not in text:
        raise ValueError(f"expected the heading {heading.strip()!r} in the page")
    return text.replace(heading, section + heading, 1)


def _refuse_existing(paths: Iterable[Path]) -> None:
    if there := [str(path) for path in paths if path.exists()]:
        raise FileExistsError(f"already there, and nothing was written: {', '.join(there)}")


def _write(texts: dict[Path, str]) -> None:
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
