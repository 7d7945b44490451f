"""What writes in the background neither stops the caller nor gives up, and says what it lost."""

from __future__ import annotations

import threading

import pytest

from verl_turnkey.plugins.rollout.writer import Writer

SECONDS = 30.0  # for what takes none


def test_items_are_written_in_order_and_by_another_thread():
    written: list[tuple[int, bool]] = []
    writer = Writer[int](lambda item: written.append((item, threading.current_thread().daemon)), "numbers", most=1000)
    for item in range(1000):
        writer.put(item)
    assert writer.drain(SECONDS)
    assert written == [(item, True) for item in range(1000)]
    assert writer.lost == 0


def test_a_sink_that_hangs_costs_what_the_queue_does_not_hold(caplog):
    begun, go_on = threading.Event(), threading.Event()
    written: list[int] = []

    def stalled(item: int) -> None:
        begun.set()
        assert go_on.wait(SECONDS)
        written.append(item)

    writer = Writer[int](stalled, "numbers", most=3)
    writer.put(0)
    assert begun.wait(SECONDS)  # in the sink's hands, and no longer in the queue
    for item in range(1, 10):
        writer.put(item)
    assert not writer.drain(0.01)
    assert (written, writer.lost) == ([], 6)
    [record] = caplog.records  # once, however many were lost
    assert record.getMessage() == "numbers are not written until this is over: writing hangs, and 3 wait"
    go_on.set()
    assert writer.drain(SECONDS)
    assert written == [0, 1, 2, 3]
    assert caplog.records[-1].getMessage() == "numbers are written again; 6 were lost, 6 in all"
    assert len(caplog.records) == 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), TypeError("no JSON"), KeyError("x")])
def test_what_cannot_be_written_costs_itself(error, caplog):
    written: list[int] = []

    def full(item: int) -> None:
        if item in (1, 2, 4):
            raise error
        written.append(item)

    writer = Writer[int](full, "numbers")
    for item in range(6):
        writer.put(item)
    assert writer.drain(SECONDS)
    assert written == [0, 3, 5]
    assert writer.lost == 3
    said = [record.getMessage() for record in caplog.records]
    assert str(error) in said[0]
    assert said[1::2] == [
        "numbers are written again; 2 were lost, 2 in all",
        "numbers are written again; 1 were lost, 3 in all",
    ]
    assert len(said) == 4


def test_nothing_to_wait_for():
    assert Writer[int](print, "numbers").drain(0.0)
