"""What hosts measure."""

from __future__ import annotations

import pytest

from verl_turnkey.envs.hosting import measures
from verl_turnkey.envs.hosting.measures import Measures


def test_a_reading_starts_anew():
    own = Measures()
    with own.timed("step"):
        assert own.in_flight == 1
        with pytest.raises(KeyError), own.timed("reset"):
            raise KeyError
    with own.timed("import"):
        own.lost += 1
    first = own.take()
    assert [len(first["step"]), len(first["reset"]), first["lost"], first["in_flight"]] == [1, 1, 1, 0]
    assert first["step"][0] >= first["reset"][0] >= 0
    again = own.take()
    assert [len(again["step"]), len(again["reset"]), again["lost"]] == [0, 0, 0]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(measures, "MOST", 3)
    own = Measures()
    for _ in range(5):
        with own.timed("step"):
            pass
    assert len(own.take()["step"]) == 3
