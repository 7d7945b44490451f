"""Threads that end with the process."""

from __future__ import annotations

import gc
import threading

import pytest

from verl_turnkey.envs.daemon_threads import DaemonThreads


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_no_more_threads_than_allowed_at_once():
    """Three calls meet in three threads; the others wait for them."""
    meet, pool = threading.Barrier(3), DaemonThreads(3, "three")
    futures = [pool.submit(lambda n: (meet.wait(60), n)[1], n) for n in range(9)]
    assert [future.result(60) for future in futures] == [*range(9)]
    assert len(named("three")) == 3


def test_nobody_waits_for_them_at_the_end_of_the_process():
    pool, release = DaemonThreads(1, "stuck"), threading.Event()
    future = pool.submit(release.wait, 60)
    assert [thread.daemon for thread in named("stuck")] == [True]
    release.set()
    assert future.result(60)


def test_an_error_is_that_of_the_call():
    with pytest.raises(ZeroDivisionError):
        DaemonThreads(1, "failing").submit(lambda: 1 / 0).result(60)


def test_they_end_when_nobody_has_the_pool_any_more():
    pool = DaemonThreads(2, "left")
    assert pool.submit(id, pool).result(60)
    threads = named("left")
    del pool
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
