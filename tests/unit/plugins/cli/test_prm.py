"""``turnkey prm data`` and ``turnkey prm eval``."""

import re
import shlex
from pathlib import Path

import pandas as pd
import pytest
from judge_server import JudgeServer
from synthetic_run import write
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.rewards import compose
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.overrides import read


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write(folder, episodes=120, turns=10, steps=3)
    return folder


def invoke(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done.output


def test_it_writes_both_files_and_says_how_to_use_them(run: Path, tmp_path: Path):
    file, held_out = tmp_path / "prm.parquet", tmp_path / "prm_held_out.parquet"
    output = invoke("prm", "data", run, "--out", file)
    rows, test = pd.read_parquet(file), pd.read_parquet(held_out)
    assert f"{len(rows)} examples of {rows['task'].nunique()} tasks in {file}" in output
    assert f"{(test['label'] > 0.5).mean():.2f} of the labels positive" in output
    assert not {*rows["task"]} & {*test["task"]}
    assert "left out: " in output  # failed episodes
    [line] = re.findall(r"^torchrun.*$", output, re.M)
    assert f"data.train_files={file}" in shlex.split(line)
    [rewards] = re.findall(r"^'(turnkey\.rewards=.*)'$", output, re.M)
    compose(read(rewards)[1])
    assert "per: step, binary: true" in rewards
    assert re.search(f"^turnkey prm eval {held_out} --url .* --binary$", output, re.M)


def test_balanced_and_progress_and_pairs(run: Path, tmp_path: Path):
    file = tmp_path / "prm.parquet"
    invoke("prm", "data", run, "--out", file, "--balance", "--held-out", "0")
    assert (pd.read_parquet(file)["label"] > 0.5).mean() == 0.5
    assert not (tmp_path / "prm_held_out.parquet").exists()
    output = invoke("prm", "data", run, "--out", file, "--kind", "progress", "--max-chars", "500")
    assert "per: gain, url" in output
    assert "--binary" not in output
    assert "max_chars: 500}" in output
    assert 0 < pd.read_parquet(file)["label"].mean() < 1
    output = invoke("prm", "data", run, "--out", file, "--kind", "pairs", "--label", "outcome")
    assert "torchrun" not in output
    assert {"prompt", "chosen", "rejected"} <= {*pd.read_parquet(file).columns}


def test_labels_of_a_person(run: Path, tmp_path: Path):
    first = invoke("prm", "data", run, "--out", tmp_path / "all.parquet", "--held-out", "0")
    assert "no held-out tasks" in first
    chosen = pd.read_parquet(tmp_path / "all.parquet")[["episode", "turn"]].head(7).assign(label=0.25)
    chosen.to_parquet(tmp_path / "labels.parquet")
    options = ("--label", "column", "--labels", tmp_path / "labels.parquet")
    invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", "--held-out", "0", *options)
    assert pd.read_parquet(tmp_path / "prm.parquet")["label"].to_list() == [0.25] * 7
    chosen.assign(label=2.0).to_parquet(tmp_path / "labels.parquet")
    with pytest.raises(ValueError, match=r"labels from 0 to 1, got 2\.0"):
        invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", *options)
    chosen.drop(columns="turn").to_parquet(tmp_path / "labels.parquet")
    with pytest.raises(ValueError, match="lacks turn"):
        invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", *options)


def test_the_served_model_is_asked_what_it_was_trained_on(run: Path, tmp_path: Path):
    invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", "--label", "outcome")
    held_out = tmp_path / "prm_held_out.parquet"
    rows = pd.read_parquet(held_out)
    answers = {messages[0]["content"]: messages[-1]["content"] for messages in rows["messages"]}

    def answer(question):
        right = answers[question["messages"][0]["content"]]
        return {right: 0.8, "01".replace(right, ""): 0.2}

    with JudgeServer(answer) as server:
        scores = tmp_path / "scores.parquet"
        output = invoke("prm", "eval", held_out, "--url", server.url, "--binary", "--out", scores)
        with pytest.raises(ConfigError, match="written for answers 1 or 0: add --binary"):
            invoke("prm", "eval", held_out, "--url", server.url)
    assert all(len(question["messages"]) == 1 for question in server.questions)
    assert {*pd.read_parquet(scores)["score"].round(6)} == {0.2, 0.8}
    assert "accuracy           1.000 [1.000, 1.000]" in output
    assert "auc                1.000 [1.000, 1.000]" in output
    assert f"over {rows['task'].nunique()} tasks; {len(rows)} turns" in output
    assert invoke("prm", "eval", held_out, "--scores", scores) == output
    pd.read_parquet(scores).iloc[1:].to_parquet(scores)
    with pytest.raises(ConfigError, match=f"no score of 1 of the {len(rows)} held-out turns"):
        invoke("prm", "eval", held_out, "--scores", scores)


def test_sampled_answers_of_a_server_without_logprobs(run: Path, tmp_path: Path):
    invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", "--label", "outcome")
    with JudgeServer(lambda question: str(int(question["seed"] < 3))) as server:
        options = ("--url", server.url, "--binary", "--samples", 4, "--out", tmp_path / "scores.parquet")
        invoke("prm", "eval", tmp_path / "prm_held_out.parquet", *options)
    assert {*pd.read_parquet(tmp_path / "scores.parquet")["score"]} == {0.75}
    assert all(question["temperature"] == 1 for question in server.questions)
    invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", "--kind", "progress")
    with JudgeServer(lambda question: f"Score: {question['seed']}") as server:
        options = ("--url", server.url, "--samples", 3, "--out", tmp_path / "scores.parquet")
        invoke("prm", "eval", tmp_path / "prm_held_out.parquet", *options)
        with pytest.raises(ConfigError, match=r"written for answers like Score: .*: leave out --binary"):
            invoke("prm", "eval", tmp_path / "prm_held_out.parquet", "--url", server.url, "--binary")
    assert pd.read_parquet(tmp_path / "scores.parquet")["score"].round(6).unique().tolist() == [0.1]


def test_the_command_for_a_cpu(run: Path, tmp_path: Path):
    output = invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", "--device", "cpu", "--model", "m")
    [line] = re.findall(r"^TURNKEY_DEVICE=cpu .* torchrun .*$", output, re.M)
    words = shlex.split(line)
    assert re.search(r"^TURNKEY_DEVICE=cpu python -m verl_turnkey\.plugins\.eval\.vllm_main serve ", output, re.M)
    assert {"trainer.device=cpu", "engine.strategy=fsdp2", "model.use_remove_padding=false"} < {*words}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kind", "regression"], "expected one of judge, progress, pairs"),
        (["--label", "human"], "expected one of outcome, state, column"),
        (["--label", "column"], "--labels FILE"),
        (["--kind", "progress", "--label", "state"], "labels of its own"),
        (["--kind", "pairs", "--balance"], "goes with --kind judge"),
        (["--device", "tpu"], "expected one of gpu, cpu"),
    ],
)
def test_wrong_options(run: Path, tmp_path: Path, options: list[str], message: str):
    output = invoke("prm", "data", run, "--out", tmp_path / "prm.parquet", *options, code=2)
    assert message in " ".join(re.sub("[│╭╮╰╯─]", " ", output).split())


def test_a_log_without_texts_names_the_keys(tmp_path: Path):
    log = write(tmp_path, episodes=20, turns=6, steps=1)
    for file in (log / "texts").glob("*/*.parquet"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"turnkey\.log\.keep_texts=null turnkey\.log\.share=1"):
        invoke("prm", "data", tmp_path, "--out", tmp_path / "prm.parquet")
