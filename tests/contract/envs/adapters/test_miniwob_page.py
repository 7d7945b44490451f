"""A page of MiniWoB++ in words, from trees of elements as its script reports them: no browser."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from verl_turnkey.envs.adapters.miniwob.page import Page

BOX = {"left": 0, "top": 0, "width": 10, "height": 10}


def lines(*children: dict[str, Any]) -> list[str]:
    """What a page says whose body has these elements."""
    number = itertools.count(2)
    elements = [{"tag": "DIV", "ref": next(number), "text": "", "children": [], **BOX, **child} for child in children]
    return Page.read({"dom": {"tag": "BODY", "ref": 1, "children": elements, **BOX}, "lists": {}}).lines


@pytest.mark.parametrize(
    ("background", "of", "line"),
    [
        ("rgb(255, 0, 0)", {"classes": "cell"}, "[1] div cell rgb(255, 0, 0)"),
        ("rgba(255, 0, 0, 1)", {"classes": "cell"}, "[1] div cell rgb(255, 0, 0)"),
        ("rgba(0, 0, 0, 0)", {"classes": "cell"}, "[1] div cell"),
        ("rgb(255, 0, 0)", {"tag": "INPUT_text", "id": "name", "value": "ann"}, '[1] input text name = "ann"'),
        ("rgba(0, 0, 0, 0)", {"tag": "INPUT_text", "id": "name", "value": ""}, '[1] input text name = ""'),
        ("rgb(255, 0, 0)", {"tag": "BUTTON", "id": "go"}, "[1] button go"),
        ("rgba(0, 0, 0, 0)", {"tag": "BUTTON", "id": "go"}, "[1] button go"),
    ],
)
def test_a_colour_is_told_where_it_is_seen_and_means_something(background, of, line) -> None:
    assert lines({"bgColor": background, **of}) == [line]


def test_an_empty_element_is_an_ornament_unless_it_is_filled() -> None:
    assert lines({"bgColor": "rgba(0, 0, 0, 0)"}) == []
    assert lines({"bgColor": "rgb(0, 0, 255)"}) == ["[1] div rgb(0, 0, 255)"]
