"""``turnkey methods NAME``: this package's equivalent of a paper's or a framework's method, and its launch line."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.paper_names import PAPER_NAMES, PaperName, absent, paper_name, plain
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.cli.recipes import attribute_docs, own, scalar, shipped, shipped_losses, shipped_modifiers

WIDTH = 80


def explain(name: str) -> str:
    """Explain ``name``, ours or a paper's: its launch line, its summary and parameters, any difference, its page."""
    if (spec := own("estimators").get(name)) is not None:
        first = f"{name} is a method of the module {spec.fn.__module__}"
        lines = [first, "", f"    +turnkey=base algorithm.adv_estimator={name}"]
        return _text([*lines, *_part("method", spec, spec.params, "+turnkey.credit.")])
    ours = {plain(method): method for method in shipped()}.get(plain(name))
    entry = _of_ours(ours) if ours else paper_name(name)
    if entry is None and (missing := absent(name)):
        return "\n".join(_wrapped(f"{name} is not here: {missing.why}"))
    if entry is None:
        aliases = (alias for entry in PAPER_NAMES for alias in entry.names.split(" / "))
        known = [*shipped(), *own("estimators"), *aliases]
        raise ConfigError(f"no method, loss, strategy or modifier is called {name!r}{did_you_mean(name, known)}")
    others = ", ".join(other for other in entry.names.split(" / ") if plain(other) != plain(name))
    first = f"{ours} is a method of this package" if ours else entry.equivalent(name)
    lines = [f"{first} (also: {others})" if others else first, "", f"    {entry.line}"]
    lines += ["", f"{'note' if entry.exact else 'differs'}: {entry.note}"] if entry.note else []
    for part in _parts(entry.line):
        lines += _part(*part)
    return _text([*lines, "", f"page: docs/{entry.page}"])


def _part(kind: str, spec: Any, params: type, key: str) -> Iterator[str]:
    """An empty line, then a part of a launch line with its parameters."""
    source = spec.source if kind == "strategy" else spec.paper
    yield from ("", f"{kind} {spec.name}: {spec.summary}{f' ({source})' if source else ''}")
    if kind != "strategy" and spec.needs:
        yield f"  needs {', '.join(spec.needs)}"
    docs, default = attribute_docs(params), params()
    for entry in fields(params):
        yield f"  {key}{entry.name}={scalar(getattr(default, entry.name))}  {docs.get(entry.name, '')}"


def _text(lines: Iterable[str]) -> str:
    return "\n".join(wrapped for line in lines for wrapped in _wrapped(line))


def _of_ours(method: str) -> PaperName:
    """The entry of a method by our own name, with the names of its papers."""
    same = [entry for entry in PAPER_NAMES if entry.exact and entry.ours == method]
    names = " / ".join(entry.names for entry in same) or method
    note = "; ".join(entry.note for entry in same if entry.note)
    return PaperName(names, method, f"+turnkey={method}", f"methods/{method}.md", note)


def _parts(line: str) -> Iterator[tuple[str, Any, type, str]]:
    """The parts that a launch line selects: kind, spec, class of parameters, and the prefix of their keys."""
    import yaml

    words = dict(word.split("=", 1) for word in shlex.split(line))
    if (method := words["+turnkey"]) in shipped():
        yield "method", shipped()[method], shipped()[method].params, "turnkey.credit."
    if loss := words.get("+turnkey/loss"):
        yield "loss", shipped_losses()[loss], shipped_losses()[loss].params, "turnkey.loss."
    recipe = [words["+turnkey/modifier"]] if "+turnkey/modifier" in words else []
    for name in recipe or yaml.safe_load(words.get("turnkey.credit.modify", "[]")):
        yield "modifier", shipped_modifiers()[name], shipped_modifiers()[name].params, ""
    if strategy := words.get("turnkey.rollout.strategy"):
        from verl_turnkey.plugins.rollout.strategies import read_strategy

        if (chosen := read_strategy(yaml.safe_load(strategy))) is not None:
            yield "strategy", chosen[0], chosen[0].cls, ""


def _wrapped(line: str) -> list[str]:
    """``line`` wrapped to :data:`WIDTH` columns; a line to copy (four spaces) stays whole."""
    if line.startswith("    ") or not line:
        return [line]
    indent = "      " if line.startswith("  ") else "  "
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
