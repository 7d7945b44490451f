"""Which method trains a real language model better, and whose credit is nearer to the truth? SmolLM2-135M on errands.

    python benchmarks/real_model.py run                              # train all missing runs: methods x seeds
    python benchmarks/real_model.py run --methods gigpo --seeds 3    # some of it
    python benchmarks/real_model.py credit runs/quickstart/model     # advantages against continuations of each state
    python benchmarks/real_model.py table                            # both tables, from the lines that are kept

Each run is the quickstart with another method and leaves one line in ``benchmarks/results/real_model.jsonl``; a run
that was interrupted begins anew. Warm start and tasks are those of the seed, so runs are compared task by task and seed
by seed: intervals of success after training are over validation tasks, for the models that were trained; those of the
mean over the training steps are Student's, over seeds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from page_tables import cell
from scipy.stats import t

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.plugins.cli.tables import table as markdown
from verl_turnkey.plugins.config.machine import choose
from verl_turnkey.plugins.view.join import read

ROOT = Path(__file__).parents[1]
LINES = Path(__file__).parent / "results" / "real_model.jsonl"
QUICKSTART = ROOT / "examples" / "quickstart" / "run.py"
METHODS = ("gigpo", "hgpo", "grpo_steps", "turn_norm", "rloo_steps")
ALL = ",".join(METHODS)

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Names = Annotated[str, typer.Option(help="separated by commas")]


@app.command()
def run(
    methods: Names = ALL,
    seeds: Annotated[int, typer.Option(help="0, 1, ... of each method")] = 5,
    steps: Annotated[int, typer.Option(help="training steps")] = 10,
    game: Annotated[str, typer.Option(help="of examples/quickstart")] = "errands",
    folder: Annotated[Path, typer.Option(help="of the runs")] = Path("runs/real_model_methods"),
) -> None:
    """Train the missing runs, all methods of a seed before the next seed; these have one warm start."""
    folder = folder if game == "errands" else folder / game
    for seed in range(seeds):
        for method in methods.split(","):
            key = {"game": game, "method": method, "seed": seed, "steps": steps}
            if not any(key.items() <= line.items() for line in lines("run")):
                out = folder / f"{method}-{seed}"
                options = ["--game", game, "--method", method, "--seed", str(seed), "--out", str(out)]
                options += ["--steps", str(steps), *(SIZES if game == "errands" else ())]
                options += ["--resume"] if start_from(folder / f"{methods.split(',')[0]}-{seed}", out, method) else []
                subprocess.run([sys.executable, str(QUICKSTART), *options], check=True)
                summary = json.loads((out / "summary.json").read_text())
                results = {"curve": curve(out), "solved_after": solved(out)}
                results["dtype"] = choose("param_dtype", out / "model")  # bf16 where the processor has it
                keep({"kind": "run", **key, **{name: summary[name] for name in SUMMARY}, **results})


# On any machine; without bf16, the quickstart's own run is smaller.
SIZES = (
    "--n-val=64",
    "--override=data.train_batch_size=4",
    "--override=actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
SUMMARY = ("n_val", "success_before", "success_after", "invalid_before", "invalid_after", "seconds_train")


def start_from(first: Path, out: Path, method: str) -> bool:
    """Give a run the tasks and the warm start of the first run of its seed, if that has them, and nothing else."""
    if not (first / "setup.json").exists():
        return False
    setup = {**json.loads((first / "setup.json").read_text()), "method": method, "seconds_train": 0}
    with TemporaryDirectory(dir=out.parent) as start:
        for name in ("tasks", "model"):
            shutil.copytree(first / name, Path(start) / name)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(start, out)
    (out / "setup.json").write_text(json.dumps(setup))
    return True


def solved(out: Path) -> list[int]:
    """Of each validation task, in order of their seeds: whether its episode after training succeeded."""
    episodes = read(out / "turnkey_log", "episodes")
    episodes = episodes[episodes["validation"]]
    last = episodes[episodes["step"] == episodes["step"].max()].sort_values("seed")
    return last["success"].fillna(False).astype(int).tolist()


def curve(out: Path) -> list[float]:
    """Success of the training episodes, step by step."""
    data = [json.loads(line) for path in sorted(out.glob("metrics-*.jsonl")) for line in path.read_text().splitlines()]
    success = {line["step"]: line["data"].get("episode/success_rate") for line in data}
    return [round(value, 4) for _, value in sorted(success.items()) if value is not None]


@app.command()
def credit(
    model: Annotated[Path, typer.Argument(help="folder of the model, such as runs/quickstart/model")],
    name: Annotated[str, typer.Option(help="of the model in the table")] = "after the warm start",
    rollouts: Annotated[int, typer.Option(help="continuations of each state")] = 64,
    groups: Annotated[int, typer.Option(help="tasks, of 8 episodes each")] = 8,
    out: Annotated[Path, typer.Option(help="folder of the run")] = Path("runs/real_model_credit"),
) -> None:
    """Play ``groups`` tasks, continue each state to its end, and hold the methods' advantages against these values.

    One step of training at learning rate 0: the branching strategy ``vine`` plays the continuations.
    """
    if not (out / "turnkey_log" / "credit").exists():
        out.mkdir(parents=True, exist_ok=True)
        subprocess.run([*credit_command(model, rollouts, groups, out)], check=True)
    steps, values = played(out / "turnkey_log")
    keep({"kind": "credit", "model": name, "rollouts": rollouts, **against_values(steps, values, rollouts)})


def credit_command(model: Path, rollouts: int, groups: int, out: Path) -> list[str]:
    """One step of ``progress`` whose states before every turn are continued ``rollouts`` times."""
    turnkey = str(Path(sys.executable).with_name("turnkey"))
    overrides = f"""
        data.train_batch_size={groups}
        data.max_prompt_length=160
        data.max_response_length=400
        actor_rollout_ref.rollout.n=8
        actor_rollout_ref.actor.ppo_mini_batch_size={groups}
        actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024
        actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=1024
        actor_rollout_ref.actor.optim.lr=0.0
        trainer.val_before_train=false
        trainer.test_freq=-1
        trainer.save_freq=-1
    """
    strategy = f"turnkey.rollout.strategy={{name: vine, rollouts: {rollouts}}}"
    command = [turnkey, "train", "errands", "--model", str(model), "--method", "progress", "--device", "cpu"]
    return [*command, "--steps", "1", "--out", str(out), *overrides.split(), strategy, "turnkey.credit.alpha=0"]


def played(log: Path) -> tuple[StepBatch, np.ndarray]:
    """The steps of a log, without penalties, and the values V(s) of the states before them, (S,), as measured."""
    episodes = read(log, "episodes")
    episodes = episodes[(episodes["split"] == "train") & episodes["parent"].isna() & episodes["failed"].isna()]
    turns = read(log, "turns").merge(episodes[["episode", "group", "success"]], on="episode")
    turns = turns.sort_values(["group", "episode", "turn"], kind="stable")
    values = np.array([json.loads(extra)["turn_value"] for extra in turns["extra"]])
    return StepBatch(
        group=pd.factorize(turns["group"])[0],
        trajectory=pd.factorize(turns["episode"])[0],
        step=turns["turn"].to_numpy(),
        reward=turns["composed_reward"].to_numpy(dtype=float),
        anchor=turns["anchor"].tolist(),
        action=turns["action"].astype(object).where(turns["action"].notna(), None).tolist(),  # none was read
        valid=turns["valid"].to_numpy(dtype=bool),
        terminated=turns["terminated"].to_numpy(dtype=bool),
        truncated=turns["truncated"].to_numpy(dtype=bool),
        success=turns["success"].to_numpy(dtype=bool),
        tokens=turns["response_tokens"].to_numpy(),
    ), values


def against_values(steps: StepBatch, values: np.ndarray, rollouts: int) -> dict[str, Any]:
    """For each method: correlation of its advantages with r + V(s') - V(s), and the share of equal signs.

    ``noise``: share of the variance of r + V(s') - V(s) that is the error of two means of ``rollouts`` outcomes.
    """
    after = np.append(values[1:], 0.0) * (np.append(np.diff(steps.trajectory), 1) == 0)
    truth = np.asarray(steps.reward) + after - values
    noise = (values * (1 - values) + after * (1 - after)).mean() / rollouts / truth.var()
    clear = np.abs(truth) > 2 * np.sqrt((values * (1 - values) + after * (1 - after)) / rollouts)
    methods = {}
    for method in METHODS:
        advantage = np.asarray(compute_credit(method, steps).advantage)
        signs = np.sign(advantage[clear]) == np.sign(truth[clear])
        episodes = np.unique(np.asarray(steps.group))
        drawn = np.random.default_rng(0).choice(episodes, (1000, len(episodes)))
        rows = {group: np.nonzero(np.asarray(steps.group) == group)[0] for group in episodes}
        spread = [
            np.corrcoef(advantage[chosen], truth[chosen])[0, 1]
            for chosen in (np.concatenate([rows[group] for group in sample]) for sample in drawn)
        ]
        methods[method] = {
            "correlation": round(float(np.corrcoef(advantage, truth)[0, 1]), 3),
            "interval": [round(float(bound), 3) for bound in np.nanpercentile(spread, (2.5, 97.5))],
            "sign": round(float(signs.mean()), 3),
        }
    facts = {"steps": len(values), "groups": len(np.unique(steps.group)), "clear": int(clear.sum())}
    return {**facts, "noise": round(float(noise), 3), "methods": methods}


@app.command()
def table() -> None:
    """Print the tables as Markdown: one of the runs of each game, one of each measurement of credit."""
    runs = pd.DataFrame(lines("run"))
    for (game, steps), of_game in runs.groupby(["game", "steps"], sort=False):
        print(f"\n{game}, {steps} steps\n")
        print(markdown(HEADS, runs_table(of_game)), end="")
    for line in lines("credit"):
        print(f"\n{line['model']}: {line['steps']} steps, {line['groups']} groups, {line['rollouts']} continuations\n")
        print("| method | correlation with r + V(s') - V(s) | 95 % | same sign |\n|---|---|---|---|")
        for method, row in line["methods"].items():
            low, high = row["interval"]
            print(f"| `{method}` | {row['correlation']:.2f} | {low:.2f} to {high:.2f} | {row['sign']:.0%} |")


HEADS = ["method", "seeds", "success before", "after", "after, minus gigpo's"]
HEADS += ["mean over the training steps", "mean, minus gigpo's"]


def runs_table(runs: pd.DataFrame) -> list[list[str]]:
    """A row per method; differences are over the seeds that both methods have."""
    solved_by = {(run.method, run.seed): np.array(run.solved_after) for run in runs.itertuples()}
    mean_by = {(run.method, run.seed): float(np.mean(run.curve)) for run in runs.itertuples()}
    rows = []
    for method, of_method in runs.groupby("method", sort=False):
        before, after = (
            " ".join(f"{value:.2f}" for value in of_method[f"success_{when}"]) for when in ("before", "after")
        )
        seeds = [seed for seed in of_method["seed"] if ("gigpo", seed) in solved_by and method != "gigpo"]
        tasks = [solved_by[method, seed] - solved_by["gigpo", seed] for seed in seeds]
        differences = [cell(np.concatenate(tasks).tolist(), sign="+") if seeds else ""]
        means = " ".join(f"{mean_by[method, seed]:.2f}" for seed in of_method["seed"])
        differences += [over_seeds([mean_by[method, seed] - mean_by["gigpo", seed] for seed in seeds])]
        rows.append([f"`{method}`", str(len(of_method)), before, after, differences[0], means, differences[1]])
    return rows


def over_seeds(values: Sequence[float]) -> str:
    """Mean of a value per seed with Student's 95 % interval; empty for a single seed, which has none."""
    if len(values) < 2:
        return ""
    mean, error = np.mean(values), np.std(values, ddof=1) / len(values) ** 0.5 * t.ppf(0.975, len(values) - 1)
    return f"{mean:+.3f} [{mean - error:+.3f}, {mean + error:+.3f}]"


def lines(kind: str) -> list[dict[str, Any]]:
    """The kept lines of a kind, in the order in which they were made."""
    text = LINES.read_text() if LINES.exists() else ""
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def keep(line: dict[str, Any]) -> None:
    """Add a line with the versions and the machine that made it."""
    versions = {name: version(name) for name in ("verl", "torch", "transformers")}
    information = (text.partition(": ") for text in Path("/proc/cpuinfo").read_text().splitlines())
    models = [value for name, _, value in information if name.startswith("model name")]  # absent on ARM
    machine = f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores"
    with LINES.open("a") as file:
        file.write(json.dumps({**line, "versions": versions, "machine": machine}) + "\n")
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    app()
