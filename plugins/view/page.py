"""One HTML file that shows runs: it holds its scripts, styles and data, and loads nothing.

Texts of a run are not trusted. Python writes none of them into HTML: they are in blocks of base64, which cannot close
an element, and the scripts show them as text only. A content security policy names the hash of each script and style,
so nothing else runs or loads even if a text came through.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from verl_turnkey.plugins.view.join import Run
from verl_turnkey.plugins.view.pack import Blocks, pack, squeeze

ASSETS = Path(__file__).with_name("assets")
VENDOR = ("vendor/uPlot.iife.min.js", "vendor/dagre.min.js")
STYLES = ("vendor/uPlot.min.css", "view.css")
ENTRY = "main"

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def blocks(runs: Sequence[Run], megabytes: float = math.inf) -> Blocks:
    """The data of a page of at most ``megabytes``: name -> compressed block; runs share the space equally."""
    space = megabytes * 1e6 - len(html({}, live=False))
    data = {"page": squeeze({"runs": len(runs)})}
    for number, run in enumerate(runs):
        data |= pack(run, number, space / len(runs))
    return data


def html(data: Blocks, *, live: bool) -> str:
    """The page. ``live``: it does not hold ``data``, its scripts request data from the server."""
    scripts = [*(_asset(name) for name in VENDOR), bundle()]
    styles = [_asset(name) for name in STYLES]
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": " ".join(map(_hash, styles)),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    if live:
        policy["connect-src"] = "'self'"
    security = "; ".join(f"{name} {value}" for name, value in policy.items())
    *vendor, own = scripts
    elements = {
        name: f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>'
        for name, block in ({} if live else data).items()
    }
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<title>turnkey view</title><link rel="icon" href="data:,">',
        *(f"<style>{style}</style>" for style in styles),
        '</head><body><p class="page loading" id="reading">Reading …</p>',
        # Scripts run while the browser still reads the rest: numbers and texts, nearly all of the file.
        *(element for name, element in elements.items() if name.startswith(("page", "run-"))),
        *(f"<script>{script}</script>" for script in vendor),
        f'<script type="module" async>{own}</script>',
        *(element for name, element in elements.items() if not name.startswith(("page", "run-"))),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


@cache
def bundle() -> str:
    """The package's modules as one script: imported modules come first, each in its own scope.

    Raises:
        ValueError: an import cycle.
    """
    placed: dict[str, str] = {}

    def place(name: str, within: tuple[str, ...] = ()) -> None:
        if name in within:
            raise ValueError(f"import cycle: {' -> '.join((*within, name))}")
        if name in placed:
            return
        source = _asset(f"{name}.js")
        for _, needed in IMPORT.findall(source):
            place(needed, (*within, name))
        body = EXPORT.sub("", IMPORT.sub(r"const \1 = $\2;", source))
        placed[name] = f"const ${name} = (() => {{\n{body}return {{ {', '.join(EXPORT.findall(source))} }};\n}})();\n"

    place(ENTRY)
    return "".join(placed.values())


@cache
def _asset(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError(f"assets/{name} would end its element in the page")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
