"""How answers are read before they are compared."""

from __future__ import annotations

import pytest

from verl_turnkey.envs.squad import normalize


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (" The  Red-Car, an   'A'! ", "redcar"),  # punctuation goes first: what is left of 'A' is an article
        ("The  Cat's, an A-team!", "cats ateam"),
        ("anthem of a theatre", "anthem of theatre"),
        ("the", ""),
    ],
)
def test_lower_case_without_punctuation_and_articles(text, read):
    assert normalize(text) == read
