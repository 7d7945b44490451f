"""The launch scripts: bash reads them, and the line of verl that each would start passes the driver's checks."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from contract_tools import driven
from omegaconf import DictConfig

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.config import presets

FOLDER = Path(__file__).parents[3] / "examples" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))
MAIN = "verl.trainer.main_ppo"

#: In the place of every program that a script starts: notes its words, and answers as a cluster of two nodes would.
STANDS_IN = """\
#!/usr/bin/env bash
line="$(printf '%s\\t' "${0##*/}" "$@")"
echo "$line" >> "$NOTED" # at once: two of them can run side by side
case "${0##*/} $*" in
  *hostnames*) printf 'node1\\nnode2\\n' ;;
  *hostname*--ip-address) echo 10.0.0.1 10.0.0.2 ;;
  *"import ray"*) echo 16 ;;
esac
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    for split in ("train", "val"):
        write_parquet(folder / f"{split}.parquet", [Task("", seed) for seed in range(32)], "x", split)
    return folder


def noted(script: str, tasks: Path, *arguments: str, **env: str) -> list[list[str]]:
    """The words of each program that the script starts, in order."""
    folder = tasks.parent / "bin"
    folder.mkdir(exist_ok=True)
    for name in ("python", "ray", "scontrol", "srun", "turnkey"):
        (folder / name).write_text(STANDS_IN)
        (folder / name).chmod(0o755)
    notes = tasks.parent / "noted"
    notes.write_text("")
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_SUBMIT_DIR": str(FOLDER.parents[1])}
    own = {"PATH": f"{folder}:{os.environ['PATH']}", "NOTED": str(notes), "TASKS": str(tasks), "HEAD_SECONDS": "0"}
    subprocess.run(
        # With what it left in the background.
        ["bash", "-c", 'source "$0" "$@"; wait', str(FOLDER / f"{script}.sh"), *arguments],
        env={**os.environ, **slurm, **own, "OUT": str(tasks.parent / "out"), **env},
        check=True,
        timeout=60,
    )
    return [line.split("\t")[:-1] for line in notes.read_text().splitlines()]


def overrides(words: list[str]) -> list[str]:
    """What follows verl's main program."""
    return words[words.index(MAIN) + 1 :]


def started(script: str, tasks: Path, *arguments: str, **env: str) -> list[str]:
    """The overrides of the one run of verl that the script starts."""
    (words,) = (words for words in noted(script, tasks, *arguments, **env) if MAIN in words)
    return overrides(words)


def is_the_presets(config: DictConfig, printed: str, name: str) -> None:
    preset = presets.read(name)
    assert config.algorithm.adv_estimator == preset.method
    assert config.turnkey.preset.name == name
    kept = " ".join(printed.split()).split(" estimator ")[0]
    differs = {"trainer.save_freq"} & {setting.key for setting in preset.settings}
    assert kept.count("(published") == len(differs), kept


def has_a_log_that_is_found(config: DictConfig) -> None:
    """By ``turnkey view RUN``, where RUN is the folder that the checkpoints are in."""
    log = Path(config.turnkey.log.trajectories)
    assert (log.parent, log.name) == (Path(config.trainer.default_local_dir).parent, "turnkey_log")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_reads_it(path: Path):
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=True).stderr == ""


def test_each_script_is_below():
    assert {path.stem for path in SCRIPTS} == {"common", "one_node", "slurm", "ray_job"}
    assert [path.name for path in FOLDER.glob("*.yaml")] == ["rayjob.yaml"]


@pytest.mark.parametrize("script", ["one_node", "slurm", "ray_job"])
@pytest.mark.parametrize(
    ("env", "preset"),
    [
        ({}, "gigpo_alfworld_1.5b"),
        (
            {
                "METHOD": "hgpo",
                "ENVIRONMENT": "webshop",
                "PRESET": "hgpo_webshop_7b",
                "URL": "http://shop:1",
            },
            "hgpo_webshop_7b",
        ),
    ],
    ids=["default", "chosen"],
)
def test_a_script_starts_what_passes(tasks: Path, script: str, env: dict[str, str], preset: str):
    line = started(script, tasks, "turnkey.env.probe=false", **env)
    assert line[-1] == "turnkey.env.probe=false"  # the last word is the caller's
    config, printed = driven(line)
    is_the_presets(config, printed, preset)
    assert config.trainer.nnodes == (2 if script == "slurm" else 1)
    assert config.trainer.n_gpus_per_node == (8 if script == "slurm" else 2)
    assert config.turnkey.env.kwargs.get("url") == env.get("URL")
    has_a_log_that_is_found(config)


def test_without_a_preset_the_line_is_the_callers(tasks: Path):
    line = started("one_node", tasks, PRESET="", METHOD="salt")
    assert line[:2] == ["+turnkey=salt", "+turnkey/env=alfworld"]
    assert not [word for word in line if word.startswith("+turnkey/preset")]


def test_tasks_are_written_where_they_are_missing(tasks: Path):
    empty = tasks.parent / "none"
    (words,) = (words for words in noted("one_node", tasks, TASKS=str(empty)) if words[0] == "turnkey")
    assert words[1:4] == ["tasks", str(empty), "--env"]
    shop = {"ENVIRONMENT": "webshop", "PRESET": "gigpo_webshop_7b", "URL": "http://shop:1", "TASKS": str(empty)}
    (words,) = (words for words in noted("one_node", tasks, GOALS="900", **shop) if words[0] == "turnkey")
    assert words[words.index("--kwargs") + 1] == '{"goals": [500, 900]}'
    for env in (shop, {"ENVIRONMENT": "search", "TASKS": str(empty)}):
        with pytest.raises(subprocess.CalledProcessError):
            noted("one_node", tasks, **env)


def test_slurm_starts_a_head_then_workers_then_the_run(tasks: Path):
    words = [" ".join(words) for words in noted("slurm", tasks, "turnkey.env.probe=false")]
    head, workers = (next(line for line in words if text in line) for text in ("--head", "ray start --address="))
    assert "--nodelist=node1 ray start --head --node-ip-address=10.0.0.1 --port=6379" in head
    assert "--nodes=1 --ntasks=1 --exclude=node1 ray start --address=10.0.0.1:6379 --num-gpus=8 --block" in workers
    # The head and the workers start in the background: only the run has its place in the order.
    (run,) = (line for line in words if MAIN in line)
    assert "--nodelist=node1 python -m verl.trainer.main_ppo" in run


def test_the_job_is_submitted_to_the_cluster(tasks: Path):
    (words,) = noted("ray_job", tasks, RAY_API_SERVER_ADDRESS="http://head:8265")
    assert words[:6] == ["ray", "job", "submit", "--address=http://head:8265", "--no-wait", "--"]
    assert words[6:9] == ["python", "-m", MAIN]


@pytest.fixture
def ray_job() -> dict[str, Any]:
    return yaml.safe_load((FOLDER / "rayjob.yaml").read_text(encoding="utf-8"))


def test_the_line_of_the_kubernetes_job_passes(ray_job: dict[str, Any], tasks: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "in the cluster")  # where its paths are
    words = shlex.split(ray_job["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", MAIN]
    line = [word.replace("/shared/data/alfworld", str(tasks)) for word in overrides(words)]
    config, printed = driven([*line, "turnkey.env.probe=false"])
    is_the_presets(config, printed, "gigpo_alfworld_7b")
    has_a_log_that_is_found(config)


def test_the_cluster_of_the_kubernetes_job_has_what_the_line_asks_for(ray_job: dict[str, Any]):
    assert (ray_job["apiVersion"], ray_job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = ray_job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    words = shlex.split(ray_job["spec"]["entrypoint"])
    gpus = group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    assert f"trainer.nnodes={group['replicas']}" in words
    assert f"trainer.n_gpus_per_node={gpus}" in words
    for template in (cluster["headGroupSpec"]["template"], group["template"]):
        (container,) = template["spec"]["containers"]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
    paths = [word.partition("=")[2] for word in words if "=/" in word]
    assert paths
    assert all(path.startswith("/shared/") for path in paths)
