"""``turnkey new``: a file of the user's own with a part of a run that works as it is.

The texts are in ``templates``. ``tools/new_part.py`` writes all files of a part of this package.
"""

from __future__ import annotations

import keyword
import re
import shlex
import symtable
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Any

from verl_turnkey.advantage import estimators, modifiers
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.envs.rewards import rewards
from verl_turnkey.envs.user_modules import import_installed
from verl_turnkey.plugins.config.foreign_keys import VERLS_ESTIMATORS
from verl_turnkey.plugins.config.overrides import override


@dataclass(frozen=True)
class Kind:
    """What is printed of a new file."""

    summary: str
    """default of --summary: what the templates compute"""
    use: tuple[str, ...]
    """commands that try and use the file"""


KINDS = {
    "estimator": Kind(
        summary="each step's discounted return against the mean of its group",
        use=(
            "python {file}",
            "python -m verl.trainer.main_ppo +turnkey=base {modules} algorithm.adv_estimator={name} ...",
        ),
    ),
    "loss": Kind(
        summary="PPO's clipped loss with one importance ratio per token",
        use=(
            "python {file}",
            "python -m verl.trainer.main_ppo +turnkey=gigpo {modules} "
            "actor_rollout_ref.actor.policy_loss.loss_mode={name} ...",
        ),
    ),
    "modifier": Kind(
        summary="less negative credit",
        use=(
            "python {file}",
            "python -m verl.trainer.main_ppo +turnkey=gigpo {modules} 'turnkey.credit.modify=[{name}]' ...",
        ),
    ),
    "reward": Kind(
        summary="1 for a turn of few tokens",
        use=("python {file}", "python -m verl.trainer.main_ppo +turnkey=gigpo {reward} ..."),
    ),
    "env": Kind(
        summary="find a number by guesses",
        use=(
            "turnkey env-check {file}",
            "turnkey train {file} --model MODEL turnkey.rollout.prompt=conversation "
            "turnkey.rollout.max_tokens_per_turn=32 turnkey.rollout.max_turns=6",
        ),
    ),
}


def own_file(kind: str, name: str, path: Path, summary: str | None = None) -> list[str]:
    """Write one file of the user's own to ``path``; returns what to say of it."""
    template = own_template(kind)
    check_name(kind, name, [template])
    if path.suffix != ".py":
        raise ValueError(f"--out: expected the path of a .py file, got {path}")
    if path.stem.isidentifier() and not path.exists() and _installed(path.stem):
        raise ValueError(
            f"{path} would hide the installed module {path.stem!r}: choose another name, or a file by --out"
        )
    file = shlex.quote(str(path))
    write({path: render(template, name, KINDS[kind].summary if summary is None else summary, file)})
    words = {"file": file, "modules": shlex.quote(override("turnkey.modules", [path]))}
    rewards = [{"name": "step"}, {"name": f"{path}:{name}", "weight": 0.1}]
    words["reward"] = shlex.quote(override("turnkey.rewards", rewards))
    commands = [command.format(**words, name=name) for command in KINDS[kind].use]
    return [f"Written: {path}. It works as it is; make it yours. Then:", *(f"    {command}" for command in commands)]


def own_template(kind: str) -> str:
    """The template of a file of the user's own."""
    return (files("verl_turnkey.plugins.cli") / "templates" / f"{kind}.txt").read_text(encoding="utf-8")


def _installed(name: str) -> bool:
    """Whether there is a module ``name``, other than in the current folder."""
    origin = getattr(find_spec(name), "origin", None)
    return bool(origin) and Path.cwd() not in [*Path(str(origin)).parents][:2]


def check_name(kind: str, name: str, templates: Iterable[str]) -> None:
    """Raise ``ValueError`` unless ``name`` can be the name of a new part, in code made from ``templates``."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        snake_case = re.sub(r"[^a-z0-9]+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()).strip("_")
        natural = snake_case if re.match("[a-z]", snake_case) and not keyword.iskeyword(snake_case) else f"my_{kind}"
        raise ValueError(f"NAME: expected a Python identifier in snake case such as {natural}, got {name!r}")
    if holder := _holder(kind, name, templates):
        raise ValueError(f"NAME: expected a new name, but {name!r} is {holder}: choose another, such as my_{name}")


def _holder(kind: str, name: str, templates: Iterable[str]) -> str | None:
    """What uses the name already; None: nothing."""
    import_installed(["estimators", f"{kind}s"])
    if kind == "estimator" and name in VERLS_ESTIMATORS:
        return "an estimator of verl's"
    if _clashes(kind, name, templates):
        return "a name that the new file itself uses"
    if kind == "env":
        return next((entry.id for entry in ADAPTERS if name == entry.module or camel(name) == entry.name), None)
    registered: Callable[[], Mapping[str, Any]] = {"modifier": modifiers, "reward": rewards}.get(kind, estimators)
    if kind == "loss":
        from verl_turnkey.losses import losses as registered
    spec = registered().get(name)
    return f"the {kind} of {getattr(spec, 'cls' if kind == 'reward' else 'fn').__module__}" if spec else None


def _clashes(kind: str, name: str, templates: Iterable[str]) -> bool:
    """Whether the new name would shadow a name in the templates' code, or be shadowed by one."""
    new_names = {"the_new_one": name, "TheNewOne": camel(name)}
    for template in templates:
        code = render(template, "the_new_one", KINDS[kind].summary, "the_new_one.py")
        scopes, names, new = [symtable.symtable(code, "the_new_one.py", "exec")], set[str](), set[str]()
        while scopes:
            scope = scopes.pop()
            scopes += scope.get_children()
            here = {symbol.get_name(): symbol.is_global() for symbol in scope.get_symbols()}
            new |= (new_here := new_names.keys() & here)
            everything = new_here or scope.get_type() == "module"  # otherwise a local name clashes with nothing
            names |= {name for name, is_global in here.items() if everything or is_global}
        if names & {new_names[which] for which in new}:
            return True
    return False


def camel(name: str) -> str:
    """MyMethod for my_method."""
    return "".join(word.capitalize() for word in name.split("_"))


def render(template: str, name: str, summary: str, file: str = "") -> str:
    """The text of ``template`` for ``name``."""
    if not 0 < len(summary.strip()) <= 100 or not summary.isprintable() or set(summary) & set('"|\\'):
        raise ValueError(
            f"--summary: expected a line of 1 to 100 characters without quotation marks, bars and backslashes, "
            f"got {summary!r}"
        )
    return Template(template).substitute(name=name, camel=camel(name), summary=summary, file=file)


def write(texts: Mapping[Path, str], absent: Iterable[Path] = ()) -> None:
    """Write new files, unless one of them, or of ``absent``, exists."""
    if there := [str(path) for path in (*texts, *absent) if path.exists()]:
        raise FileExistsError(f"already there, and nothing was written: {', '.join(there)}")
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
