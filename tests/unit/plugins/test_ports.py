"""Ports to listen on, also later."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_turnkey.plugins import ports


def test_a_free_port_is_none_that_linux_hands_out() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    drawn = {ports.free_port() for _ in range(20)}
    assert len(drawn) > 5
    assert all(ports.FIRST_PORT <= port < first for port in drawn)


def test_a_port_in_use_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*drawn: int) -> None:
        monkeypatch.setattr(random, "SystemRandom", lambda: SimpleNamespace(randrange=min, sample=lambda *_: drawn))

    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        used.listen()
        taken, free = used.getsockname()[1], ports.free_port()
        draw(taken, free)
        assert ports.free_port() == free
        draw(taken)
        assert ports.free_port() not in (0, taken)


@pytest.mark.parametrize("text", ["1024\t65535\n", None])
def test_where_linux_hands_out_all_ports_or_is_not_there_any_free_one_is_taken(monkeypatch, text: str | None) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _: text or Path("/another/system").read_bytes())
    assert ports.port_range() is None
    assert ports.free_port() > 0
