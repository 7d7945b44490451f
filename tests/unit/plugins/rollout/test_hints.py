"""What of a hint, and of a skill, stands behind the task."""

from __future__ import annotations

import pytest

from verl_turnkey.plugins.rollout.columns import hint_line, skill_line

TEXT = "Open the  red box\nthen leave"


@pytest.mark.parametrize(
    ("share", "words"),
    [(0.01, "Open"), (0.5, "Open the red"), (0.51, "Open the red box"), (1.0, "Open the red box then leave")],
)
def test_the_first_words_up_to_a_share(share, words):
    assert hint_line({"turnkey_hint": TEXT, "turnkey_hint_share": share}) == f"\nHint: {words}"


@pytest.mark.parametrize(
    "row",
    [{}, {"turnkey_hint": TEXT}, {"turnkey_hint": TEXT, "turnkey_hint_share": 0.0}]
    + [{"turnkey_hint": text, "turnkey_hint_share": 1.0} for text in (None, "", " ")],
)
def test_nothing_without_a_hint_or_a_share(row):
    assert hint_line(row) == ""


@pytest.mark.parametrize("row", [{"skill": TEXT}, {"extra_info": {"skill": TEXT}}, {"skill": TEXT, "extra_info": None}])
def test_a_skill_is_shown_whole_from_a_column_or_from_extra_info(row):
    assert skill_line(row, "skill") == f"\n{TEXT}"
    assert skill_line(row, None) == skill_line(row, "other") == ""


@pytest.mark.parametrize("text", [None, "", "  ", 3, float("nan")])
def test_nothing_without_a_skill(text):
    assert skill_line({"skill": text}, "skill") == ""
