"""A hook of mkdocs: a method's page ends with its formula, source and differences, from the docstring of its function.

So they are written once, beside the code. A page of several methods gets them at the end of each method's section.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from verl_turnkey.advantage import estimators
from verl_turnkey.plugins.cli.tables import ROLE

SECTION = re.compile(r"^## `?(\w+)`?$", re.MULTILINE)
BLOCK = re.compile(r"^(.*)::\n\n((?:    .*\n|\n)+)", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """mkdocs calls this for each page, with its text."""
    folder, _, name = page.file.src_uri.removesuffix(".md").rpartition("/")
    if folder != "methods":
        return markdown
    if name in estimators():
        return f"{markdown.rstrip()}\n\n## Formula\n\n{formula(name)}"
    first, *sections = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    return first + "".join(map(_with_formula, sections))


def _with_formula(section: str) -> str:
    heading = SECTION.match(section)
    if heading is None or heading[1] not in estimators():
        return section
    return f"{section.rstrip()}\n\n### Formula of {heading[1]}\n\n{formula(heading[1])}\n"


def formula(name: str) -> str:
    """The docstring of a method in Markdown, without its errors."""
    doc = (inspect.getdoc(estimators()[name].fn) or "").partition("\nRaises:\n")[0] + "\n"
    return ROLE.sub(r"``\1``", BLOCK.sub(_fenced, doc))


def _fenced(match: re.Match[str]) -> str:
    words, block = match.groups()
    return f"{words}:\n\n".removeprefix(":\n\n") + f"```text\n{inspect.cleandoc(block)}\n```\n\n"
