"""A page of MiniWoB++ in words: a line per element, and the numbers by which actions name them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from miniwob.dom import DOMElement

WHOLE = ("select", "button", "a")  # numbered even with elements inside
SHAPES = ("circle", "line", "path", "polygon", "rect", "canvas")
HANDLES = ("ui-resizable", "ui-helper")  # of jQuery UI, without meaning for the task


@dataclass(frozen=True)
class Page:
    """What a page shows: its lines, which element a number stands for, and the options of its drop-down lists."""

    lines: list[str]
    refs: dict[str, int]
    options: dict[int, list[str]]
    marks: list[tuple[Any, ...]]
    """everything that belongs to the page's state"""

    @classmethod
    def read(cls, seen: dict[str, Any]) -> Page:
        page = cls([], {}, {int(ref): choices["options"] for ref, choices in seen["lists"].items()}, [])
        root = DOMElement(seen["dom"])
        for element in root.subtree_elements:
            choices = seen["lists"].get(str(element.ref))
            state = (element.tag, element.text, element.value, element.classes, element.bg_color)
            page.marks.append((*state, element.tampered, element.focused, choices and choices["chosen"]))
            if element.tag == "t":
                page.lines.append(f'"{element.text}"')
            elif element.tag in WHOLE or (element.is_leaf and not _ornament(element)):
                number = str(len(page.refs) + 1)
                page.refs[number] = element.ref
                page.lines.append(f"[{number}] {_describe(element, choices)}")
        return page


def _ornament(element: DOMElement) -> bool:
    """Whether an element shows nothing: it is empty and has no name, or is one of jQuery UI's."""
    if element.text or element.value is not None or element.tag in SHAPES or _colour(element):
        return False
    return not _name(element) or element.id == "area" or any(word in element.classes for word in HANDLES)


def _describe(element: DOMElement, choices: dict[str, Any] | None) -> str:
    """Kind, text or name, what is in it, and marks: ``input text username = "ann" (focused)``."""
    parts = [element.tag.replace("_", " ")]
    inside = element.text or " ".join(child.text for child in element.subtree_elements if child.text)
    if inside and element.value is None and not choices:
        parts.append(f'"{inside}"')
    else:
        parts += [_name(element), _colour(element)]
    if isinstance(element.value, bool):
        parts.append("(checked)" if element.value else "(not checked)")
    elif element.value is not None:
        parts.append(f'= "{element.value}"')
    if choices:
        parts.append(f'= "{", ".join(choices["chosen"])}" of: {", ".join(choices["options"])}')
    parts += ["(focused)"] * bool(element.focused and element.tag != "body") + ["(clicked)"] * bool(element.tampered)
    return " ".join(part for part in parts if part)


def _name(element: DOMElement) -> str:
    return element.id or ("" if element.classes == "SVG_CLASS" else element.classes)


def _colour(element: DOMElement) -> str:
    """The background colour of an element without a value, which some tasks ask for; empty without one."""
    *colour, alpha = element.bg_color
    filled = alpha > 0 and element.value is None and element.tag not in WHOLE
    return f"rgb({', '.join(str(round(255 * part)) for part in colour)})" if filled else ""
