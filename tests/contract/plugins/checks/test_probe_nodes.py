"""The first task is played on every node before the first step: what one node lacks is named with the node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from contract_tools import AWKWARD
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet

ENVIRONMENT = """
import os
import gymnasium

class Mounted(gymnasium.Env):
    def __init__(self, games="/mnt/games"):
        self.games = games
    def reset(self, *, seed=None, options=None):
        if self.games not in os.environ["GAMES"].split(":"):
            raise FileNotFoundError(self.games)
        return "a room", {}
    def step(self, action):
        return "a room", 0.0, False, False, {}

gymnasium.register("own/Mounted-v0", entry_point=Mounted)
"""
SCRIPT = """
import json, os, sys
import ray
from ray.cluster_utils import Cluster
from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.config.schema import EnvConfig, TurnkeyConfig
from verl_turnkey.plugins.checks.probe import probe_nodes

homes, file = sys.argv[1:3], sys.argv[3]
write_parquet(file, [Task("own/Mounted-v0", 3)], "x", "train")
cluster = Cluster()
for home, games in zip(homes, ("/mnt/games:/mnt/more", "/mnt/games"), strict=True):
    paths = f"{home}:{os.environ['PYTHONPATH']}"
    seen = {"HOME": home, "PYTHONPATH": paths, "GAMES": games}
    cluster.add_node(num_cpus=2, env_vars=seen, node_name=os.path.basename(home), include_dashboard=False, wait=False)
cluster.wait_for_nodes(timeout=300)
ray.init(address=cluster.address, log_to_driver=False)

def probed(module, **kwargs):
    try:
        probe_nodes(TurnkeyConfig(modules=[module], env=EnvConfig(kwargs=kwargs)), file)
        return f"played on {len(ray.nodes())}"
    except ConfigError as error:
        return f"refused: {error}"

found = {
    "all": probed("~/both.py"),
    "data": probed("~/both.py", games="/mnt/more"),
    "file": probed("~/first_alone.py"),
    "module": probed("first_alone"),
}
print("found " + json.dumps(found))
ray.shutdown()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the probe says in a cluster of the nodes ``first`` and ``second``, which lacks some of what is asked for."""
    folder = tmp_path_factory.mktemp("nodes")
    homes = [folder / "first", folder / "second"]
    for home in homes:
        home.mkdir()
        (home / "both.py").write_text(ENVIRONMENT)
    (homes[0] / "first_alone.py").write_text(ENVIRONMENT)
    command = [sys.executable, "-c", SCRIPT, *map(str, homes), str(folder / "t.parquet")]
    environment = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("found ")]
    return {**json.loads(line.removeprefix("found ")), "second": str(homes[1])}


@pytest.mark.timeout(1000)
def test_all_nodes_can_play(outcomes):
    assert outcomes["all"] == "played on 2"


LACKS = {
    "data": "FileNotFoundError: /mnt/more",
    "file": "cannot import '~/first_alone.py' (FileNotFoundError: there is no file {second}/first_alone.py)",
    "module": "cannot import 'first_alone' (ModuleNotFoundError: No module named 'first_alone')",
}


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("what", LACKS)
def test_what_one_node_lacks_is_named_with_the_node(outcomes, what: str):
    first, _, rest = outcomes[what].partition("\n")
    assert first.startswith("refused: environment 'own/Mounted-v0' with seed 3 cannot be played on node ")
    assert " (second) (reset): " in first
    assert LACKS[what].format(second=outcomes["second"]) in first
    assert "turnkey.env.probe=false" in rest


def test_the_trainer_asks_before_its_first_step(ray_queue, trainer, tmp_path):
    tasks = [Task("contract/Awkward-v0", seed, {"on_reset": "raise"}) for seed in range(4)]
    write_parquet(tmp_path / "t.parquet", tasks, "x", "train")
    overrides = (f"data.train_files={tmp_path}/t.parquet", f"turnkey.modules=[{AWKWARD}]")
    manager = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)  # its construction starts model servers
    manager.agent_loop_workers = []
    with pytest.raises(ConfigError, match=r"cannot be played on node .*the reset is broken"):
        trainer(*overrides).fit(manager)


SCORED = """
import gymnasium

class Scored(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        return "a room", {}
    def step(self, action):
        return "a room", 0.0, True, False, {"extra": {"score": 1.0}}

gymnasium.register("own/Scored-v0", entry_point=Scored)
"""
PLAYING = """
import asyncio, sys
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.probe import play
from verl_turnkey.plugins.config.schema import TurnkeyConfig
print(asyncio.run(play(TurnkeyConfig(modules=[sys.argv[1]]), Task("own/Scored-v0", 3)))[2])
print({"verl", "torch", "transformers"} & {*sys.modules})
"""


def test_playing_imports_nothing_of_verl(tmp_path: Path):
    """Which would take a quarter of a minute, on every node."""
    module = tmp_path / "scored.py"
    module.write_text(SCORED)
    command = [sys.executable, "-c", PLAYING, str(module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.stdout.splitlines(), done.returncode) == (["{'score'}", "set()"], 0), done.stderr
