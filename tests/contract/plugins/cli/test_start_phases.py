"""The texts by which `turnkey train` tells the phases of a start are those that verl, vLLM and Ray print."""

from __future__ import annotations

from pathlib import Path
from pprint import pformat

import pytest
import ray
import verl
from tqdm import tqdm

from verl_turnkey.plugins.cli.console import PHASES, PROGRESS

PACKAGES = Path(verl.__file__).parents[1], Path(ray.__file__).parents[1]
# The text of a phase -> the file that prints it, and how.
PRINTED = {
    "ray init kwargs: ": ("verl/trainer/main_ppo.py", 'print(f"ray init kwargs: {'),
    "Started a local Ray instance.": ("ray/_private/worker.py", 'info_str = "Started a local Ray instance."'),
    "Connected to Ray cluster.": ("ray/_private/worker.py", 'info_str = "Connected to Ray cluster."'),
    "Using dataset class: ": ("verl/utils/dataset/rl_dataset.py", 'print(f"Using dataset class: {'),
    "colocated worker base class ": ("verl/single_controller/ray/base.py", 'print(f"colocated worker base class {'),
    "['serve',": ("verl/workers/rollout/vllm_rollout/vllm_async_server.py", "pprint(server_args)"),
    "LLMServerManager: [": ("verl/workers/rollout/llm_server.py", 'print(f"LLMServerManager: {self.server_addresses}'),
    "Found checkpoint: ": ("verl/utils/checkpoint/checkpoint_manager.py", 'print("Found checkpoint: '),
    "Creating file logger at ": ("verl/utils/tracking.py", 'print(f"Creating file logger at {'),
}


def source(path: str) -> str:
    return next(root / path for root in PACKAGES if (root / path).is_file()).read_text(encoding="utf-8")


def test_the_table_is_complete():
    assert [text for _, text in PHASES] == [*PRINTED]


@pytest.mark.parametrize("text", PRINTED)
def test_it_is_printed(text):
    path, code = PRINTED[text]
    assert code in source(path)


def test_the_arguments_of_the_server_begin_as_they_are_printed():
    assert 'server_args = ["serve", ' in source(PRINTED["['serve',"][0])
    assert pformat(["serve", "a/model", *(f"--option_{number}" for number in range(9))]).startswith("['serve',\n")


def test_the_bar_of_steps(capsys):
    assert 'initial=self.global_steps, desc="Training Progress")' in source("verl/trainer/ppo/v1/trainer_base.py")
    tqdm(total=6, initial=4, desc="Training Progress").close()
    assert PROGRESS.findall(capsys.readouterr().err)[-1] == ("4", "6")
