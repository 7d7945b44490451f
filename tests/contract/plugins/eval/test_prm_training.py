"""The examples of ``turnkey prm-data`` in verl's SFT trainer."""

from __future__ import annotations

import shlex
from pathlib import Path

import pandas as pd
import verl.trainer
from hydra import compose, initialize_config_dir
from synthetic_run import write
from transformers import AutoTokenizer
from typer.testing import CliRunner
from verl.trainer.sft_trainer import create_sft_dataset
from verl.utils.config import omega_conf_to_dataclass

from verl_turnkey.plugins.cli.main import app


def test_verls_sft_trainer_takes_the_printed_command_and_trains_the_answer(tmp_path: Path, model_dir: Path):
    write(tmp_path, episodes=60, turns=8, steps=2)
    arguments = ["prm-data", str(tmp_path), "--out", str(tmp_path / "prm.parquet"), "--model", str(model_dir)]
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
