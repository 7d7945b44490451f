"""The examples of ``turnkey prm data`` in verl's SFT trainer."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import verl.trainer
from hydra import compose, initialize_config_dir
from synthetic_run import write
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.config import omega_conf_to_dataclass

from verl_turnkey.plugins.cli.main import app


def test_verls_sft_trainer_takes_the_printed_command_and_trains_the_answer(tmp_path: Path, model_dir: Path):
    write(tmp_path, episodes=60, turns=8, steps=2)
    arguments = ["prm", "data", str(tmp_path), "--out", str(tmp_path / "prm.parquet"), "--model", str(model_dir)]
    output = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    words = shlex.split(next(line for line in output.splitlines() if line.startswith("torchrun")))
    place = words.index("verl.trainer.sft_trainer")
    assert words[:place] == ["torchrun", "--standalone", "--nproc_per_node=1", "-m"]
    with initialize_config_dir(str(Path(verl.trainer.__path__[0]) / "config"), version_base=None):
        config = compose("sft_trainer_engine", words[place + 1 :])
    for node in ("model", "engine", "optim", "checkpoint"):  # as SFTTrainer._build_config
        omega_conf_to_dataclass(config[node])
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    dataset = create_sft_dataset(config.data.train_files, config.data, tokenizer, None)
    rows = pd.read_parquet(tmp_path / "prm.parquet")
    assert len(dataset) == len(rows) >= config.data.train_batch_size
    for i in (0, len(rows) - 1):
        example, messages = dataset[i], rows["messages"][i]
        trained = tokenizer.decode(example["input_ids"][example["loss_mask"].bool()])
        assert trained == f"{messages[-1]['content']}<|im_end|>\n"
        assert messages[0]["content"] in tokenizer.decode(example["input_ids"])


def test_the_printed_command_for_a_cpu_trains_a_model_that_answers(tmp_path: Path, model_dir: Path):
    write(tmp_path, episodes=12, turns=3, steps=1)
    arguments = ["prm", "data", str(tmp_path), "--out", str(tmp_path / "prm.parquet"), "--model", str(model_dir)]
    output = CliRunner().invoke(app, [*arguments, "--device", "cpu"], catch_exceptions=False).output
    [command] = [line for line in output.splitlines() if "verl.trainer.sft_trainer" in line]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    line = f"{command} trainer.total_training_steps=2 optim.lr=3e-2"
    ran = subprocess.run(
        ["bash", "-c", line],
        env={**os.environ, "PATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"train/loss:([\d.]+)", ran.stdout)]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    trained = tmp_path / "prm_model" / "global_step_2" / "huggingface"
    tokenizer, rows = AutoTokenizer.from_pretrained(trained), pd.read_parquet(tmp_path / "prm.parquet")
    probability = {}
    for folder in (model_dir, trained):
        question = [dict(rows["messages"][0][0])]
        text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
        model = AutoModelForCausalLM.from_pretrained(folder)
        logits = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits[0, -1]
        words = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in "01"]
        probability[folder] = logits.softmax(-1)[words].sum().item()
    assert probability[trained] > 2 * probability[model_dir], "it answers with 1 or 0"
