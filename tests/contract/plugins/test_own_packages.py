"""Installed packages of users that register by an entry point: found by commands, driver, workers and environments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.envs.tasks import Task, write_parquet

ROOT = Path(__file__).parents[3]
ESTIMATOR = """
from dataclasses import dataclass

from verl_turnkey.advantage import Credit, StepBatch, register_estimator


@dataclass(frozen=True)
class Params:
    scale: float = 1.0  # factor of the reward


@register_estimator("{name}", params=Params, summary="each step by its own reward")
def {name}(batch: StepBatch, params: Params) -> Credit:
    return Credit.of_parts({{"own_reward": params.scale * batch.reward}}, batch.penalty)
"""
LOSS = """
from dataclasses import dataclass

from verl_turnkey.losses import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class Params:
    pass


@register_loss("alpha_loss", params=Params, summary="the policy gradient without a ratio")
def plain(inputs: LossInputs, params: Params) -> TokenLoss:
    return TokenLoss(-inputs.log_prob * inputs.advantages)
"""
REWARD = """
from dataclasses import dataclass

from verl_turnkey.envs.rewards import register_reward


@dataclass(frozen=True)
class Brevity:
    limit: int = 5

    def __call__(self, steps):
        return [float(step.tokens <= self.limit) for step in steps]


register_reward("brevity")(Brevity)
"""
# Its process must import neither torch nor a method: a host has hundreds of them.
ENVIRONMENT = (
    (ROOT / "examples/custom_env.py").read_text(encoding="utf-8").replace("example/GuessNumber-v0", "alpha/Guess-v0")
    + """

class Light(GuessNumber):
    def begin(self, seed):
        import sys
        assert not {"torch", "alpha_lab.methods"} & set(sys.modules)
        return super().begin(seed)


gymnasium.register("alpha/Light-v0", entry_point=Light)
"""
)
THEIRS = """
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("theirs")
def theirs(token_level_rewards, response_mask, **kwargs):
    return token_level_rewards * response_mask, token_level_rewards
"""
# Distribution -> files of its module, entry points by group.
PACKAGES: dict[str, tuple[dict[str, str], dict[str, dict[str, str]]]] = {
    "alpha-lab": (
        {"methods": ESTIMATOR.format(name="alpha"), "loss": LOSS, "reward": REWARD, "world": ENVIRONMENT},
        {
            "verl_turnkey.estimators": {"alpha": "alpha_lab.methods:alpha"},
            "verl_turnkey.losses": {"alpha_loss": "alpha_lab.loss"},
            "verl_turnkey.rewards": {"brevity": "alpha_lab.reward"},
            "verl_turnkey.envs": {"guess": "alpha_lab.world"},
        },
    ),
    "beta-lab": ({"all": ESTIMATOR.format(name="beta")}, {"verl_turnkey.plugins": {"beta": "beta_lab.all"}}),
    "broken-lab": (
        {"old": "from verl_turnkey.advantage import Advantages\n"},
        {"verl_turnkey.estimators": {"old": "broken_lab.old", "older": "broken_lab.older"}},
    ),
    "verl-other": ({"plugin": THEIRS}, {"verl.plugins": {"other": "verl_other.plugin"}}),
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A wheel of each package, by its name."""
    folder = tmp_path_factory.mktemp("packages")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"  # what pip calls
    for name, (files, groups) in PACKAGES.items():
        module = folder / name / name.replace("-", "_")
        module.mkdir(parents=True)
        for file, text in {"__init__": "", **files}.items():
            (module / f"{file}.py").write_text(text, encoding="utf-8")
        lines = ["[project]", f'name = "{name}"', 'version = "1.0"']
        for group, entries in groups.items():
            lines += [f'[project.entry-points."{group}"]', *(f'{key} = "{value}"' for key, value in entries.items())]
        (folder / name / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
        command = [sys.executable, "-c", build, str(folder)]
        subprocess.run(command, cwd=folder / name, check=True, capture_output=True)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in PACKAGES}


class Site:
    """A folder beside the installed packages, with the wheels of ``names``."""

    def __init__(self, folder: Path, wheels: dict[str, Path], names: list[str], environment: dict[str, str]) -> None:
        uv = Path(sys.executable).with_name("uv")
        install = [uv, "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", folder / "site"]
        subprocess.run([*install, *(wheels[name] for name in names)], check=True)
        self.folder = folder
        path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, "PYTHONPATH": path, **environment}

    def turnkey(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from verl_turnkey.plugins.cli.main import main; main()", *words]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=self.environment, cwd=self.folder
        )

    def json(self, *words: str) -> list[dict]:
        done = self.turnkey(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def site(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("beside"), wheels, ["alpha-lab", "beta-lab", "broken-lab"], {})


def warnings_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if "cannot be used" in line]


def test_commands_list_what_two_packages_register_and_warn_of_a_third(site: Site) -> None:
    rows = {row["switch"]: row for row in site.json("list", "methods")}
    for name in ("alpha", "beta"):
        assert rows[f"adv_estimator={name}"]["what it does"] == "each step by its own reward"
    assert "+turnkey=gigpo" in rows
    assert "loss_mode=alpha_loss" in {row["switch"] for row in site.json("list", "losses")}
    assert "alpha/Guess-v0" in {row["id"] for row in site.json("list", "envs")}
    done = site.turnkey("list", "methods", "alpha")
    assert done.stdout.startswith("alpha is a method of the module alpha_lab.methods\n")
    assert "  +turnkey.credit.scale=1.0  factor of the reward" in done.stdout
    [warning] = warnings_in(done.stderr)
    assert "the installed package broken-lab 1.0 cannot be used: importing broken_lab.old" in warning
    assert "ImportError: cannot import name 'Advantages'" in warning
    assert "pip uninstall broken-lab" in warning


def test_names_of_packages_are_taken(site: Site) -> None:
    done = site.turnkey("new", "estimator", "beta", "--out", "my_beta.py")
    assert "'beta' is the estimator of beta_lab.all" in done.stderr


def test_a_launch_line_uses_what_a_package_registers(site: Site, stock_overrides: list[str], tmp_path: Path) -> None:
    """The check plays the first task in a process like those of the hosts."""
    write_parquet(tmp_path / "tasks.parquet", [Task("alpha/Light-v0", seed) for seed in range(8)], "guess", "train")
    line = [
        "+turnkey=base",
        "algorithm.adv_estimator=alpha",
        "+turnkey.credit.scale=0.5",
        "actor_rollout_ref.actor.policy_loss.loss_mode=alpha_loss",
        "turnkey.rewards=[{name: step}, {name: brevity, weight: 0.1, limit: 3}]",
        *stock_overrides,
        *(f"data.{split}_files={tmp_path}/tasks.parquet" for split in ("train", "val")),
    ]
    done = site.turnkey("check", *line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "alpha: scale=0.5 (default 1.0)" in done.stdout
    assert len(warnings_in(done.stdout + done.stderr)) == 1
    done = site.turnkey("check", *line, "+turnkey.credit.scal=1")
    assert done.returncode == 1
    assert "scale" in done.stderr


def test_doctor_finds_them_here_and_in_a_ray_worker(site: Site) -> None:
    done = site.turnkey("doctor", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["problems"] == [
        f"{place}: own package {name} (broken-lab 1.0) failed to load"
        for place in ("this process", "a Ray worker")
        for name in ("old", "older")
    ]
    for place in report["places"]:
        registered = {(point["kind"], point["name"]) for point in place["points"] if point["status"] == "registered"}
        assert registered >= {("estimator", "alpha"), ("estimator", "turnkey/beta"), ("loss", "alpha_loss")}
        assert "beta (beta-lab 1.0)" in [plugin["name"] for plugin in place["plugins"]]


@pytest.mark.parametrize("way", ["an entry point", "VERL_USE_EXTERNAL_MODULES"])
def test_another_plugin_of_verl_beside_ours(
    wheels: dict[str, Path], way: str, stock_overrides: list[str], tmp_path: Path
) -> None:
    """An estimator that it registers in verl trains under our trainer, and an estimator of a package of ours too."""
    by_entry_point = way == "an entry point"
    theirs = {} if by_entry_point else {"VERL_USE_EXTERNAL_MODULES": "their_module"}
    site = Site(tmp_path, wheels, ["beta-lab", *(["verl-other"] if by_entry_point else [])], theirs)
    (tmp_path / "site" / "their_module.py").write_text(THEIRS)
    for estimator in ("theirs", "beta"):
        done = site.turnkey("check", "+turnkey=base", f"algorithm.adv_estimator={estimator}", *stock_overrides)
        assert done.returncode == 0, done.stdout + done.stderr
        assert estimator in done.stdout
