"""A server behind the environments that goes away and comes back costs time and the episodes that it was playing."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from whole_runs import BATCH, STEPS, Runs
from whole_runs import runs as runs

from verl_turnkey.envs.adapters.webshop import server as webshop_server
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.trainer import starvation
from verl_turnkey.plugins.view.join import read

SHOP = Path(__file__).parents[3] / "unit" / "envs" / "adapters"


class Server:
    """WebShop's server on a small shop, at one port."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.start()

    def start(self) -> None:
        command = [sys.executable, webshop_server.__file__, "--port", str(self.port), "--factory", "shop:Shop"]
        self.process = subprocess.Popen(command, cwd=SHOP, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().split()[-1]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(free_port: Callable[[], int]) -> Iterator[Server]:
    made = Server(free_port())
    yield made
    made.stop()


@pytest.mark.parametrize("mode", ["sync", pytest.param("colocate_async", marks=pytest.mark.long)])
def test_a_server_that_comes_back_lets_the_run_go_on(
    runs: Runs, server: Server, tmp_path: Path, monkeypatch, caplog, mode: str
):
    runs.write([Task("turnkey/WebShop-v0", seed, {"url": server.url}) for seed in range(10)])
    back, lose = threading.Thread(target=server.start), starvation.Patience.lose

    def lose_and_return(self: starvation.Patience, reason: str) -> None:
        if back.ident is None:
            back.start()
        lose(self, reason)

    def stop(step: int) -> None:
        if step == 2:
            server.stop()

    monkeypatch.setattr(starvation.Patience, "lose", lose_and_return)
    runs.start(mode, "run", "turnkey.env.patience=120", action="search[lamp]", on_update=stop)
    pauses = [record.getMessage() for record in caplog.records if "Trying again in" in record.getMessage()]
    assert pauses
    back.join()
    assert f"ServerError: the server at {server.url}/" in pauses[0]
    assert "cannot be reached" in pauses[0]
    log = tmp_path / "run" / "log"
    episodes, credit = read(log, "episodes"), read(log, "credit")
    failed = episodes["failed"].notna().sum()
    print(f"{mode}: {failed} episodes failed, {len(pauses)} pauses")
    assert episodes["failed"].notna().any()
    assert not credit.duplicated(["episode", "turn"]).any()
    trained = credit.merge(episodes[["episode", "group"]]).groupby("train_step")["group"].nunique()
    assert trained.index.tolist() == [*range(1, STEPS + 1)]
    # Batches of failed episodes alone are played again; one that the outage met in the middle is trained as it is.
    assert sorted(trained)[1:] == [BATCH] * (STEPS - 1)
