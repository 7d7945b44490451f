"""A process reward model from a run's log, end to end on a CPU: does it beat baselines that need no model?

    python benchmarks/prm_from_log.py run runs/prm_from_log      # 20 minutes or more; resumes where it stopped
    python benchmarks/prm_from_log.py table runs/prm_from_log    # print the tables from the scores

The quickstart trains SmolLM2 on errands and logs all texts; ``turnkey prm data --device cpu`` makes examples and prints
a command that trains the original SmolLM2. The score of a step of a held-out task is the trained model's probability of
"1", computed in this process by transformers. Scores are evaluated as by ``turnkey prm eval``, next to scores that are
means of training labels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from quickstart_runs import ROOT, train_missing

from verl_turnkey.plugins.cli.prm import SCORE, WHOLE_LOG
from verl_turnkey.plugins.eval import prm
from verl_turnkey.plugins.eval.prm import read_episodes
from verl_turnkey.plugins.view.join import find_log

STEPS, SEED, HELD_OUT = 10, 0, 0.3
TURN, SEEN, BOTH = "turn number", "observation seen before in the episode", "turn number and observation seen before"
MEASURES = ("auc", "accuracy", "cross_entropy", "calibration_error")
Row = Mapping[Any, Any]
Folder = Annotated[Path, typer.Argument(help="folder of all outputs")]

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(
    out: Folder, steps: int = STEPS, model: str = "smollm2", held_out: float = HELD_OUT, label: str = "outcome"
) -> None:
    """Run each stage whose output is missing in ``out``: run, examples, model, scores. Then print the tables."""
    out = out.resolve()
    keep_settings(out, steps=steps, model=model, held_out=held_out, label=label)
    options = ["--model", model, "--n-val", "16"]
    for override in WHOLE_LOG.split():
        options += ["--override", override]
    train_missing(out / "run", method="gigpo", seed=SEED, steps=steps, options=tuple(options))
    base = out / "run" / "model" if model == "tiny" else _folder(model)
    device = ("--model", base, "--device", "cpu")
    split = ("--held-out", held_out, "--label", label)
    output = _turnkey("prm", "data", out / "run", "--out", out / "prm.parquet", *device, *split)
    print(output)
    if _trained(out) is None:
        [command] = re.findall(r"^TURNKEY_DEVICE=cpu .*$", output, re.M)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": path}, check=True)
    trained = _trained(out)
    assert trained is not None, "the command has written no model"
    for name, folder in (("trained", trained), ("untrained", base)):
        file = out / f"scores_{name}.parquet"
        if not file.exists():
            rows = pd.read_parquet(out / "prm_held_out.parquet")
            rows[SCORE] = scores(folder, rows["messages"])
            rows[["episode", "turn", SCORE]].to_parquet(file)
    table(out)


def keep_settings(out: Path, **settings: object) -> None:
    """Write the settings into ``out``; refuse settings that differ from those of its earlier stages."""
    file = out / "settings.json"
    before = json.loads(file.read_text()) if file.exists() else settings
    if changed := [f"--{name.replace('_', '-')} {before[name]}" for name in settings if before[name] != settings[name]]:
        raise typer.BadParameter(f"{out} was made with {' '.join(changed)}: repeat that, or choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def _folder(model: str) -> Path:
    if model != "smollm2":
        return Path(model)
    sys.path.insert(0, str(ROOT / "examples" / "quickstart"))
    from smollm import fetch

    return fetch()


def _turnkey(*words: object) -> str:
    command = [str(Path(sys.executable).with_name("turnkey")), *map(str, words)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _trained(out: Path) -> Path | None:
    return next(iter(sorted((out / "prm_model").glob("global_step_*/huggingface"))), None)


def scores(model: Path, examples: Iterable[Sequence[Mapping[str, str]]]) -> list[float]:
    """P("1") / (P("1") + P("0")) of the first token after each example without its answer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    words = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in "01"]
    probabilities = []
    for messages in examples:
        question = [dict(message) for message in messages[:-1]]
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            logits = policy(input_ids=ids, logits_to_keep=1).logits[0, -1, words].double()
        probabilities.append(torch.softmax(logits, dim=-1)[1].item())
    return probabilities


def baselines(
    train: Sequence[Row], test: Sequence[Row], repeats: Mapping[tuple[str, int], bool]
) -> dict[str, list[float]]:
    """Mean labels of ``train`` as scores of ``test``: of all, by turn, by whether the observation repeats.

    Args:
        repeats: by episode and turn, whether an earlier turn had the same observation.
    """
    keys: dict[str, Callable[[Row], Any]] = {
        "prior": lambda row: None,
        TURN: lambda row: row["turn"],
        SEEN: lambda row: repeats[row["episode"], row["turn"]],
        BOTH: lambda row: (row["turn"], repeats[row["episode"], row["turn"]]),
    }
    prior = float(np.mean([row["label"] for row in train]))
    result = {}
    for name, key in keys.items():
        labels: dict[Any, list[float]] = defaultdict(list)
        for row in train:
            labels[key(row)].append(row["label"])
        result[name] = [float(np.mean(labels.get(key(row), [prior]))) for row in test]
    return result


def repeated(run_folder: Path) -> dict[tuple[str, int], bool]:
    """By episode and turn, whether an earlier turn of the episode had the same observation."""
    return {
        (episode.episode, turn.turn): step.observation in [before.observation for before in episode.steps[:k]]
        for episode in read_episodes(find_log(run_folder)).episodes
        for k, (turn, step) in enumerate(zip(episode.turns, episode.steps, strict=True))
    }


def auc_difference(ours: Sequence[float], baseline: Sequence[float], test: pd.DataFrame) -> tuple[float, float, float]:
    """AUC of ``ours`` minus that of ``baseline``, with its 95 % bootstrap interval over tasks."""
    labels = test["label"].to_numpy() > 0.5

    def difference(weights: Any) -> float:
        first, second = (prm.auc(np.asarray(values), labels, weights) for values in (ours, baseline))
        return first - second

    drawn = [difference(weights) for weights in prm.resamples(test["task"].to_list())]
    low, high = np.nanquantile(drawn, (0.025, 0.975))
    return difference(np.ones(len(labels))), float(low), float(high)


@app.command()
def table(out: Folder) -> None:
    """Print the tables in Markdown."""
    train, test = pd.read_parquet(out / "prm.parquet"), pd.read_parquet(out / "prm_held_out.parquet")
    rows = {}
    for name in ("trained", "untrained"):
        scored = pd.read_parquet(out / f"scores_{name}.parquet")
        rows[f"SmolLM2, {name}"] = test.merge(scored, on=["episode", "turn"])[SCORE].to_list()
    rows |= baselines(train.to_dict("records"), test.to_dict("records"), repeated(out / "run"))
    print(f"{len(train)} examples of {train['task'].nunique()} tasks, {len(test)} held-out steps of ", end="")
    print(f"{test['task'].nunique()} tasks; labels above 1/2: {(test['label'] > 0.5).mean():.2f}\n")
    print(f"| score | {' | '.join(name.replace('_', ' ') for name in MEASURES)} |\n|---|{'---|' * len(MEASURES)}")
    for name, values in rows.items():
        measured = prm.evaluate(values, test["label"], test["task"].to_list())
        cells = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in (measured[m] for m in MEASURES)]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| AUC of the trained model minus that of | |\n|---|---|")
    for name in (TURN, SEEN, BOTH):
        value, low, high = auc_difference(rows["SmolLM2, trained"], rows[name], test)
        print(f"| {name} | {value:+.3f} [{low:+.3f}, {high:+.3f}] |")
    print("\n| turns | mean score of the trained model | mean label |\n|---|---|---|")
    for number, score, label in prm.calibration(rows["SmolLM2, trained"], test["label"]):
        print(f"| {number} | {score:.3f} | {label:.3f} |")


if __name__ == "__main__":
    app()
