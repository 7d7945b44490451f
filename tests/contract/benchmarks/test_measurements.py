"""The scripts that measure what credit costs and how rollouts scale, on little data."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import advantage_step
import cluster_sim
import estimators
import gpu_check
import gpu_stack
import numpy as np
import pandas as pd
import pictures
import prm_from_log
import pytest
import real_model
import step_seconds
import synthetic_run
import transfer_queue as tq
import typer
from contract_tools import driven
from PIL import Image
from prm_from_log import BOTH, SEEN, TURN
from synthetic_run import write
from typer.testing import CliRunner
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.tables import shipped
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

ROOT = Path(__file__).parents[3]


def test_every_estimator_and_its_naive_twin_are_timed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(estimators, "TURNS", (2, 9))
    estimators.compare_estimators((1, 2))
    estimators.compare_similarity(rows=60, naive_rows=60)
    printed = capsys.readouterr().out
    timings = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| (?!what)(.*) \|$", printed, re.M)
        if (cells := line.split(" | "))
    }
    others = {"write of the tensor", estimators.WORDS, "verl's `grpo`, vectorized"}
    assert {*timings} == {*others, *(f"`{name}`" for name in shipped())}
    assert re.search(r"loo_td takes [\d.]+ times as long as gigpo, and [\d.]+ times with words", printed)
    for name in shipped():
        _, *seconds, times_write, _, growth, memory = (float(cell.replace(",", "")) for cell in timings[f"`{name}`"])
        assert len(seconds) == 2
        assert min(*seconds, times_write, growth, memory) > 0
    assert "similarity >= 0.9 at 60 rows" in printed


@pytest.mark.parametrize(
    ("extras", "ranks"),
    [((), 8), (advantage_step.EXTRAS, 8), (("turnkey.log.trajectories={folder}",), 64)],
    ids=["plain", "extras", "log"],
)
def test_both_drivers_run_on_the_same_rows(queue, tmp_path: Path, extras, ranks: int) -> None:
    rows, extras = 120, [word.format(folder=tmp_path / "log") for word in extras]
    batch = advantage_step.fill(rows, tokens=6)
    assert len(batch.keys) == rows
    for trainer, config in (
        (PPOTrainerSync, advantage_step.configuration("grpo", rows)),
        (TurnkeyTrainerSync, advantage_step.configuration("gigpo", rows, extras)),
    ):
        took = advantage_step.Took()
        advantage_step.drive(advantage_step.make_trainer(trainer, config, ranks), batch, took)
        *seconds, cpu, memory = took.row()
        assert seconds[2] == pytest.approx(seconds[0] + seconds[1])
        assert min(*seconds, cpu) > 0
        assert 0 <= memory < 1
    assert len(tq.kv_list("train")["train"]) == rows  # no padding is left for the next repeat


def test_the_processes_of_the_queue_are_found(queue) -> None:
    assert len(advantage_step.queue_processes()) >= 2


def test_credit_alone_runs(capsys) -> None:
    advantage_step.credit_alone(60, 20)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gigpo", "turn_gae"]


@pytest.mark.long
def test_a_wave_makes_its_environments_and_the_next_one_finds_them():
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout_scale.py"), "--place", "process", "--workers", "2"]
    command += ["--episodes", "4", "--turns", "3", "--turn-seconds", "0.05"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    header, new, warm = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*", ran.stdout, re.M)
    )
    rows = [dict(zip(header, row, strict=True)) for row in (new, warm)]
    assert [row["environments"] for row in rows] == ["new", "warm"]
    for row in rows:
        assert (row["episodes"], row["failed"]) == ("4", "0")
        assert float(row["wall / ideal"]) >= 1.0
        assert float(row["wall s"]) >= float(row["ideal s"]) > 0
        assert float(row["CPU of the loop, ms a turn"]) > 0
    # An interpreter with gymnasium each, which stay.
    assert float(rows[0]["hosts, MB an episode"]) > 5 > float(rows[1]["hosts, MB an episode"])
    assert "processes left behind: 0" in ran.stdout


# --- where a step spends its time -------------------------------------------------------------------------------------


def test_the_phases_of_a_run_are_read_from_its_metrics(tmp_path: Path) -> None:
    timings = {"gen": 20.0, "update_actor": 15.5, "update_weights": 2.0, "step": 40.0}
    steps = [{"step": 0, "data": {"timing_s/testing": 9.0}}]
    steps += [{"step": 1, "data": {f"timing_s/{name}": seconds for name, seconds in timings.items()}}]
    (tmp_path / "metrics-1.jsonl").write_text("\n".join(map(json.dumps, steps)))
    printed = CliRunner().invoke(step_seconds.app, ["run", str(tmp_path)]).stdout.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (printed[0], *printed[2:])]
    validated, trained = (dict(zip(cells[0], row, strict=True)) for row in cells[1:])
    assert (validated["validation"], validated["whole step"]) == ("9.0", "9.0")
    assert (trained["rollout"], trained["update"], trained["whole step"]) == ("20.0", "15.5", "40.0")


def test_an_update_of_trees_is_measured_beside_one_of_rows(model: Path) -> None:
    command = [
        sys.executable,
        step_seconds.__file__,
        "engine",
        str(model),
        "--groups",
        "1",
        "--repeats",
        "1",
        "--tokens",
        "2048",
    ]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows, trees = (int(re.search(rf"\| {way} \| \d+ \| (\d+)", printed)[1]) for way in ("padded rows", "trees"))
    assert trees < 0.8 * rows
    assert float(re.search(r"differ by (\S+) of the norm", printed)[1]) < 1e-4


# --- the script for a GPU ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    gpu_stack.write_model(folder, gpu_check.TINY.models["tiny"])
    return folder


@pytest.mark.parametrize(("layout", "loss"), [*product(gpu_stack.LAYOUTS, gpu_stack.ON_STACK)])
def test_a_launch_line_passes(model: Path, tmp_path: Path, layout: str, loss: str):
    overrides = gpu_stack.overrides(layout, loss, gpu_check.FULL.turns, gpu_check.FULL.answer, 4)
    command = gpu_stack.command(model, tmp_path, "cuda", overrides)
    printed = subprocess.run([*command, "--print"], capture_output=True, text=True, check=True, timeout=120).stdout
    words = shlex.split(printed.partition("verl.trainer.main_ppo")[2].replace("\\\n", " "))
    config, output = driven(words)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.trainer.total_training_steps == 2
    assert "conversation" in output or layout == "row per step"
    assert loss == "vanilla" or loss in output


def test_the_line_of_the_7b_preset_passes(model: Path, tmp_path: Path):
    node = gpu_stack.Node("cuda", 4, tmp_path, gpu_check.FULL, [f"actor_rollout_ref.model.path={model}"])
    command = [*node.line("preset-7b"), "--print", "trainer.n_gpus_per_node=4"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    words = shlex.split(printed.partition("verl.trainer.main_ppo")[2].replace("\\\n", " "))
    config, output = driven(words)
    assert "gigpo_alfworld_7b" in output
    assert config.trainer.total_training_steps == 4
    assert (config.trainer.save_freq, config.trainer.test_freq) == (-1, -1)
    assert not config.trainer.val_before_train


def test_what_is_measured_is_of_the_last_step(tmp_path: Path):
    def logged(step: int, seconds: float, **more: float) -> dict:
        parts = {"gen": seconds, "adv": 1.0, "update_actor": 6.0, "step": 10.0}
        data = {f"timing_s/{part}": value for part, value in parts.items()} | {"perf/total_num_tokens": 500} | more
        return {"step": step, "data": data}

    second = {gpu_stack.SECOND: 1.5, "perf/max_memory_allocated_gb": 20.0}
    lines = [logged(1, 99.0), logged(2, 3.0, **second)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gpu_stack.measured(tmp_path) == {
        "tokens": 500,
        "seconds": 10.0,
        "share": 0.25,
        "gib": 20.0,
        "parts": {"gen": 3.0, "adv": 1.0, "update_actor": 6.0, "second pass": 1.5},
    }


@pytest.mark.long
def test_every_part_that_a_cpu_has_passes(tmp_path: Path) -> None:
    command = [sys.executable, gpu_check.__file__, "--device", "cpu", "--tiny", "--out", str(tmp_path / "result.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    result = json.loads((tmp_path / "result.json").read_text())
    assert done.returncode == 0, (result["outcomes"], done.stderr[-2000:])
    on_gpus = {"sleep": "1 GPU", "tensor-parallel": "2 GPUs", "preset-7b": "4 GPUs"}
    assert result["outcomes"] == {
        **dict.fromkeys(("costs", "gradients", "sequence-parallel", "smollm2"), "passed"),
        **{part: f"skipped: it needs {number}, and there are 0" for part, number in on_gpus.items()},
    }
    assert {row["setup"]: row["ok"] for row in result["sequence-parallel"]} == dict.fromkeys(gpu_stack.SETUPS, True)
    assert [row["steps"] for row in result["smollm2"]] == [gpu_stack.STEPS]


# --- the comparison of methods with a language model ------------------------------------------------------------------


TURNS, EPISODES, GROUPS = 3, 8, 4


def played() -> tuple[StepBatch, np.ndarray]:
    """Each episode wins or loses in its second turn alone; values are those of states before the turns."""
    n = GROUPS * EPISODES
    won = np.arange(n) % 2
    step = np.tile(np.arange(TURNS), n)
    trajectory = np.repeat(np.arange(n), TURNS)
    group = trajectory // EPISODES
    outcome = won[trajectory]
    reward = np.where(step == TURNS - 1, outcome, 0.0)
    anchor = [f"{s}-{o if s == TURNS - 1 else ''}" for s, o in zip(step, outcome, strict=True)]
    values = np.where(step == TURNS - 1, outcome, 0.5)
    batch = StepBatch(
        group=group,
        trajectory=trajectory,
        step=step,
        reward=reward,
        anchor=anchor,
        action=["go"] * len(step),
        valid=np.ones(len(step), dtype=bool),
        success=outcome.astype(bool),
        tokens=np.ones(len(step), dtype=int),
    )
    return batch, values


def test_credit_is_held_against_the_values_of_states() -> None:
    steps, values = played()
    comparison = real_model.against_values(steps, values, rollouts=64)
    assert (comparison["steps"], comparison["groups"]) == (GROUPS * EPISODES * TURNS, GROUPS)
    assert comparison["clear"] == GROUPS * EPISODES  # the second turns, in which an episode is decided
    # The truth is +-0.5 there and 0 elsewhere; the same +-1 on all three turns correlates by 1/sqrt(3) with it.
    assert comparison["methods"]["grpo_steps"]["correlation"] == pytest.approx(3**-0.5, abs=1e-3)
    for numbers in comparison["methods"].values():
        assert numbers["sign"] == 1.0
        assert numbers["interval"][0] <= numbers["correlation"] <= numbers["interval"][1]


def test_a_turn_without_an_action_is_a_step_too(monkeypatch) -> None:
    episodes = {"episode": ["e"], "group": ["g"], "success": [True], "split": ["train"], "parent": [None]}
    turns = {"episode": ["e"] * 2, "turn": [0, 1], "extra": ['{"turn_value": 0.25}', '{"turn_value": 0.5}']}
    turns |= {"composed_reward": [0.0, 1.0], "anchor": ["a", "b"], "action": [None, "go"], "valid": [False, True]}
    turns |= {"terminated": [False, True], "truncated": [False, False], "response_tokens": [3, 2]}
    tables = {"episodes": pd.DataFrame({**episodes, "failed": [None]}), "turns": pd.DataFrame(turns)}
    tables["turns"]["action"] = pd.Series([None, "go"], dtype="str")
    monkeypatch.setattr(real_model, "read", lambda _, table: tables[table])
    steps, values = real_model.played(Path("log"))
    assert list(values) == [0.25, 0.5]
    assert compute_credit("gigpo", steps).advantage.shape == (2,)


def test_the_tables_are_made_from_the_kept_lines(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(real_model, "LINES", tmp_path / "lines.jsonl")
    for seed in (0, 1):
        line = {
            "kind": "run",
            "game": "errands",
            "seed": seed,
            "steps": 2,
            "curve": [0.25, 0.75],
            "success_before": 0.25,
        }
        real_model.keep({**line, "method": "gigpo", "success_after": 0.5 + seed / 4, "solved_after": [0, 1]})
        better = {"method": "turn_norm", "curve": [0.5, 0.75 + seed / 4], "success_after": 1.0, "solved_after": [1, 1]}
        real_model.keep({**line, **better})
    real_model.keep({**line, "game": "service", "method": "gigpo", "success_after": 0.125, "solved_after": [0, 0]})
    steps, values = played()
    real_model.keep({"kind": "credit", "model": "made", "rollouts": 64, **real_model.against_values(steps, values, 64)})
    capsys.readouterr()
    real_model.table()
    printed = capsys.readouterr().out
    assert "| `gigpo` | 2 | 0.25 0.25 | 0.50 0.75 |  | 0.50 0.50 |  |" in printed
    # Student's interval over two seeds: 0.1875 +- 12.706 * 0.0625
    assert "| 1.00 1.00 | +0.50 [+0.00, +1.00] | 0.62 0.75 | +0.188 [-0.607, +0.982] |" in printed
    assert "service, 2 steps" in printed
    assert "| `gigpo` | 1 | 0.25 | 0.12 |  | 0.50 |  |" in printed
    assert "made: 96 steps, 4 groups, 64 continuations" in printed
    assert "| `grpo_steps` | 0.58 |" in printed
    assert json.loads((tmp_path / "lines.jsonl").read_text().splitlines()[0])["versions"]["verl"]


# --- the scores that a reward model is compared with ------------------------------------------------------------------


def test_baselines_are_means_of_training_labels():
    train = [
        {"episode": "a", "turn": 0, "label": 1.0},
        {"episode": "a", "turn": 1, "label": 0.0},
        {"episode": "b", "turn": 0, "label": 0.5},
    ]
    test = [{"episode": "c", "turn": 0}, {"episode": "c", "turn": 1}, {"episode": "c", "turn": 2}]
    seen = {("a", 0): False, ("a", 1): True, ("b", 0): False, ("c", 0): False, ("c", 1): False, ("c", 2): True}
    assert prm_from_log.baselines(train, test, seen) == {
        "prior": [0.5, 0.5, 0.5],
        TURN: [0.75, 0.0, 0.5],
        SEEN: [0.75, 0.75, 0.0],
        BOTH: [0.75, 0.5, 0.5],
    }


def test_the_table_of_a_log(tmp_path: Path, model_dir: Path):
    write(tmp_path / "run", episodes=60, turns=6, steps=2)
    arguments = ["prm", "data", str(tmp_path / "run"), "--out", str(tmp_path / "prm.parquet"), "--held-out", "0.3"]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    rows = pd.read_parquet(tmp_path / "prm_held_out.parquet")
    seen = prm_from_log.repeated(tmp_path / "run")
    assert {(e, t) for e, t in rows[["episode", "turn"]].itertuples(index=False)} <= {*seen}
    scores = prm_from_log.scores(model_dir, rows["messages"].head(3))
    assert all(0 < score < 1 for score in scores)
    for name, values in (("trained", rows["label"]), ("untrained", 1 - rows["label"])):
        rows.assign(score=values)[["episode", "turn", "score"]].to_parquet(tmp_path / f"scores_{name}.parquet")
    done = CliRunner().invoke(prm_from_log.app, ["table", str(tmp_path)], catch_exceptions=False)
    cells = {line.split(" | ")[0]: line.split(" | ")[1] for line in done.output.splitlines() if line.count(" | ") > 2}
    assert cells["| SmolLM2, trained"].startswith("1.000")
    assert cells["| SmolLM2, untrained"].startswith("0.000")
    assert cells["| prior"].startswith("0.500")
    test = rows.reset_index(drop=True)
    assert prm_from_log.auc_difference(list(test["label"]), list(1 - test["label"]), test)[0] == pytest.approx(1.0)


def test_a_folder_keeps_to_the_settings_it_was_made_with(tmp_path: Path):
    """Otherwise a model that learned one kind of label would be tested on the other."""
    settings = {"steps": 10, "model": "smollm2", "held_out": 0.3, "label": "outcome"}
    for _ in range(2):
        prm_from_log.keep_settings(tmp_path, **settings)
    words = ["run", str(tmp_path), "--label", "state", "--held-out", "0.5"]
    done = CliRunner().invoke(prm_from_log.app, words)
    assert done.exit_code == 2
    message = " ".join(done.output.replace("│", " ").split())
    assert "was made with --held-out 0.3 --label outcome: repeat that, or choose another folder" in message
    assert {path.name for path in tmp_path.iterdir()} == {"settings.json"}


# --- the pictures of README and docs/, drawn of invented logs, with the labels that are there -------------------------


DOCS = ROOT / "docs"
DRAWN = ("quickstart.png", "view-collapse.png", "view-episode.png", "view-group.png")
SHOTS = DRAWN[1:]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each picture by its name, of a run that learns and of one that loses its success at step 8."""
    folder = tmp_path_factory.mktemp("pictures")
    healthy, collapsed = folder / "healthy", folder / "collapsed"
    synthetic_run.write(healthy, episodes=240, turns=16, steps=12)
    synthetic_run.write(collapsed, episodes=240, turns=16, steps=12, lost=8)
    with pictures.chromium() as browser:
        paths = [*pictures.of_runs(browser, healthy, healthy, collapsed, folder)]
        assert browser.console() == []
    return {path.name: path for path in paths}


def test_all_pictures_are_drawn(drawn: dict[str, Path]) -> None:
    assert sorted(drawn) == sorted(DRAWN)
    sizes = {name: Image.open(path).size for name, path in drawn.items()}
    assert sizes["view-episode.png"] == (1200, 860)
    assert sizes["view-group.png"] == (1200, 800)
    assert sizes["view-collapse.png"] == (1360, 1000)
    for path in drawn.values():
        assert 10_000 < path.stat().st_size < 200_000


def test_a_picture_keeps_its_labels(drawn: dict[str, Path]) -> None:
    labels = {name: pictures.labels_in(drawn[name]) for name in SHOTS}
    assert {"Run", "Episodes", "Group", "Compare"} <= set.intersection(*labels.values())
    assert {"prompt", "response", "reward", "composed reward"} <= labels["view-episode.png"]
    assert {"Where solved and unsolved episodes diverge", "states"} <= labels["view-group.png"]
    assert {"from step", "what changed"} <= labels["view-collapse.png"]


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("view-*.png")))
def test_the_pictures_of_the_documentation_show_the_labels_of_today(drawn: dict[str, Path], name: str) -> None:
    labels = pictures.labels_in(DOCS / name)
    today = pictures.labels_in(drawn[name])
    if name == "view-episode.png":  # of a chat, which invented prompts are not
        assert {"system", "user"} <= labels
        today |= {"system", "user"}
    assert labels, f"docs/{name} keeps no labels: draw it with benchmarks/pictures.py"
    assert labels <= today, f"draw docs/{name} anew with benchmarks/pictures.py"


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.png")))
def test_each_picture_is_on_a_page(name: str) -> None:
    pages = [ROOT / "README.md", *DOCS.glob("*.md"), *(ROOT / "benchmarks/results").glob("*.md")]
    image = re.compile(rf"!\[[^\]]+\]\((?:[./]*docs/)?{name}\)")
    assert any(image.search(page.read_text(encoding="utf-8")) for page in pages)


# --- a cluster by arithmetic ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("episodes", "changes", "full"),
    [
        (10, {}, "nothing"),
        (5000, {}, "GPUs"),
        (5000, {"most_turns": 1e6, "turn_seconds": 0.3}, "agent-loop workers"),
        (5000, {"env_seconds": 2.0}, "hosts"),
    ],
)
def test_what_is_full_first_in_a_cluster(episodes, changes, full):
    settings = {"turns": 20, "turn_seconds": 3.0, "most_turns": 800.0, "env_seconds": 0.02, "workers": 8, "hosts": 32}
    seconds, fullest = cluster_sim.step(episodes, **settings | changes)
    assert fullest == full
    more, _ = cluster_sim.step(2 * episodes, **settings | changes)
    assert more == pytest.approx(seconds * (1 if full == "nothing" else 2))


def test_the_table_of_a_cluster_and_its_check():
    command = CliRunner()
    app = typer.Typer()
    app.command()(cluster_sim.main)
    needed = command.invoke(app, ["--episodes", "1000,3000"]).output.splitlines()
    assert needed[3].startswith("| 3000 | 75 | 800 | GPUs | 1.6 | 1.0 |")  # as docs/gpus.md says
    checked = [line.split("|")[1:-1] for line in command.invoke(app, ["--check"]).output.splitlines()[2:]]
    assert [cells[4].strip() for cells in checked] == ["nothing"] * 4
    assert [float(cells[6]) for cells in checked] == [1.01, 1.05, 1.06, 1.07]


def test_a_step_against_stock_grpo_by_hand():
    """512 episodes on 8 GPUs; 20 turns of 200 and 300 tokens after a prompt of 800, or a row of 1,800 and 200 each."""
    rows = {(name, gpus): cells for name, gpus, *cells in cluster_sim.against_grpo(20, 200, 300, 2500.0, 60.0, 0.02)}
    conversation, per_step = rows["`gigpo`, conversation", 8], rows["`gigpo`, row per step", 8]
    assert conversation[:3] == ["512", "2,048,000", f"{64 * 10_800:,}"]
    assert per_step[:3] == ["10,240", "2,048,000", f"{64 * 20 * 2000:,}"]
    # A turn of 200 tokens at 2,500 a second, after reading 300 or 1,800 with 2 operations per parameter: 0.0914 or
    # 0.1485 s, and there are 64 x 20 per GPU.
    assert (conversation[3], per_step[3]) == (117, 190)
    # 7.616e9 parameters, 691,200 or 2,560,000 tokens, 400e12 operations per second; 2 operations each for the old
    # log-probabilities, the forward pass, the same again, gradients of activations, gradients of weights.
    assert (conversation[4], per_step[4]) == (132, 487)
    # 0.72 ms per row and 0.246 us per token: 512 rows of 10,000, or 10,240 of 200; of stock 1.077 times that.
    assert (conversation[5], per_step[5]) == ("1.6", "7.9")
    assert rows["stock `grpo`, conversation", 8][:6] == [*conversation[:5], "1.8"]
    assert machine.GPU not in os.environ
    # Weights, gradients and AdamW's state, 16 bytes per parameter, are shared by 56 GPUs more.
    states = 16 * 7.616 * (1 / 8 - 1 / 64)
    assert float(conversation[-1]) - float(rows["`gigpo`, conversation", 64][-1]) == pytest.approx(states, abs=0.3)
