"""The first task is played on every node before the first step: what one node lacks is named with the node."""

from __future__ import annotations

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
    def reset(self, *, seed=None, options=None):
        if os.environ["GAMES"] != "here":
            raise FileNotFoundError("/mnt/games")
        return "a room", {}
    def step(self, action):
        return "a room", 0.0, False, False, {}

gymnasium.register("own/Mounted-v0", entry_point=Mounted)
"""
SCRIPT = """
import sys
import ray
from ray.cluster_utils import Cluster
from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.checks.probe import probe_nodes

module, file, second = sys.argv[1:]
write_parquet(file, [Task("own/Mounted-v0", 3)], "x", "train")
cluster = Cluster()
for games in ("here", second):
    cluster.add_node(num_cpus=2, env_vars={"GAMES": games}, include_dashboard=False)
ray.init(address=cluster.address, log_to_driver=False)
try:
    probe_nodes(TurnkeyConfig(modules=[module]), file)
    print("played on", len(ray.nodes()))
except ConfigError as error:
    print("refused:", error)
finally:
    ray.shutdown()
    cluster.shutdown()
"""


def probed(tmp_path: Path, second: str) -> str:
    module = tmp_path / "mounted.py"
    module.write_text(ENVIRONMENT)
    command = [sys.executable, "-c", SCRIPT, str(module), str(tmp_path / "t.parquet"), second]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_what_one_node_lacks_is_named_with_the_node(tmp_path: Path):
    said = probed(tmp_path, "elsewhere")
    assert "refused: environment 'own/Mounted-v0' with seed 3 cannot be played on node " in said
    assert "FileNotFoundError: /mnt/games" in said
    assert "turnkey.env.probe=false" in said


def test_all_nodes_can_play(tmp_path: Path):
    assert "played on 2" in probed(tmp_path, "here")


def test_the_trainer_asks_before_its_first_step(ray_queue, trainer, tmp_path):
    tasks = [Task("contract/Awkward-v0", seed, {"on_reset": "raise"}) for seed in range(4)]
    write_parquet(tmp_path / "t.parquet", tasks, "x", "train")
    asked = (f"data.train_files={tmp_path}/t.parquet", f"turnkey.modules=[{AWKWARD}]")
    manager = AgentLoopManagerTQ.__new__(AgentLoopManagerTQ)  # its construction starts model servers
    manager.agent_loop_workers = []
    with pytest.raises(ConfigError, match=r"cannot be played on node .*the reset is broken"):
        trainer(*asked).fit(manager)


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
