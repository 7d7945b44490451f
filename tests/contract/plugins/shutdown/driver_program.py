"""A driver like verl's main program: ``run_ppo`` starts Ray and waits for an actor. Arguments: what it does, grace.

The actor holds ``$SEGMENT`` open, if there is one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import ray
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.config.checkpoint_files import TRACKER
from verl_turnkey.plugins.shutdown import channel, driver

WHAT, GRACE = sys.argv[1], float(sys.argv[2])
BEFORE = ("loads", "validates")
"""no step begins: models are loaded; a server dies while verl validates"""


class Ending(driver.Ending):
    """The driver's, within reach of this program."""

    made: Ending

    def __init__(self, grace: float) -> None:
        super().__init__(grace)
        Ending.made = self


driver.Ending = Ending  # type: ignore[misc]


@ray.remote(num_cpus=0)
class Worker:
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@ray.remote
class Runner:
    def run(self, config: DictConfig) -> None:
        if WHAT not in BEFORE:
            channel.put("begun", "1")
        if segment := os.environ.get("SEGMENT"):
            self.held = open(segment, "w")  # noqa: SIM115 - as long as this process lives
        if WHAT == "dies":
            ray.get(Worker.remote().end.remote())
        if WHAT == "fails":
            raise ValueError("as it was")
        if WHAT in ("reports", "validates"):
            channel.put("dead", "a process died: inference server 0")
        while True:
            time.sleep(0.2)
            if WHAT == "listens" and (name := channel.get("signal")):
                (Path(config.trainer.default_local_dir) / TRACKER).write_text("3")
                raise channel.StoppedError(f"{name}: stopped after step 3")


def run_ppo(config, task_runner_class) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    runner = task_runner_class.options(num_cpus=1).remote()
    call = runner.run.remote(config)
    if WHAT not in BEFORE:
        while not Ending.made._begun and not ray.wait([call], timeout=0.1)[0]:
            pass
    print("waiting", file=sys.stderr, flush=True)
    ray.get(call)


def main() -> None:
    driver.guard_run()  # where verl's main program calls validate_config
    driver.guard_run()
    config = {"turnkey": {"stop": {"grace": GRACE}}, "trainer": {"default_local_dir": folder, "save_freq": -1}}
    run_ppo(OmegaConf.create(config), task_runner_class=Runner)


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="tks", dir="/tmp")
    try:
        main()
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
