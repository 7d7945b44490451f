"""A command in bubblewrap is trained on Harbor tasks: their tests pay, and the files of an episode are its states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import naive
import pytest
from launch import Run, data, train
from transformers import AutoTokenizer

AGENT = Path(__file__).with_name("sandbox_agent.py")
STEPS = 2
TESTS = 'python3 -I -c \'print(sum(open("/app/notes.txt", "rb").read()) % {0} / {0})\' > /logs/verifier/reward.txt\n'


def harbor_task(folder: Path, modulus: int) -> None:
    files = {
        "task.toml": 'schema_version = "1.1"\n[environment]\nworkdir = "/app"\nallow_internet = false\n',
        "instruction.md": f"Write notes; sums of {modulus} pay.\n",
        "environment/readme.txt": "Nothing is noted yet.\n",
        "solution/solve.sh": "printf a > notes.txt\n",
        "tests/test.sh": TESTS.format(modulus),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    for folder, modulus in (("train", 5), ("train", 7), ("val", 3)):
        harbor_task(out / folder / f"sums_{modulus}", modulus)
    command = ["-m", "verl_turnkey", "tasks", out / "data", "--harbor", out / "train", "--val-from", out / "val"]
    subprocess.run([sys.executable, *command], check=True)
    return train(
        out,
        model,
        "+turnkey=gigpo",
        f"turnkey.agent.run=[/usr/bin/python3,{AGENT}]",
        f"turnkey.agent.readable=[{AGENT}]",
        "turnkey.agent.sandbox=bwrap",
        "turnkey.agent.state=workspace",
        "turnkey.rollout.max_turns=4",
        "turnkey.rollout.max_tokens_per_turn=8",
        *data(out / "data", batch=2),
        "data.max_response_length=256",
        "trainer.test_freq=2",
        steps=STEPS,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_an_episode_is_a_row_of_what_was_sampled(run: Run, model: Path, step: int) -> None:
    metrics = run.metrics[step]
    assert metrics["rows/per_episode"] == 1
    assert metrics["agent/calls"] == metrics["episode/length/mean"] == 3
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_tests_of_the_task_pay_and_nothing_else(run: Run, step: int) -> None:
    episodes = [episode for episode in run.episodes("train") if episode["global_step"] == step]
    assert len(episodes) == 8
    for episode in episodes:
        notes = "".join(f"{text['response']}\n" for text in episode["texts"]).encode()
        rewards = [turn["reward"] for turn in episode["steps"]]
        assert rewards[:2] == [0, 0]
        assert rewards[2] in {sum(notes) % modulus / modulus for modulus in (5, 7)}


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_compares_equal_files(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)
    steps = [record for record in run.steps() if record["global_step"] == step]
    first = {record["anchor"] for record in steps if record["step"] == 0}
    assert len(first) == 1, "every episode begins with the same files"
    assert len({record["anchor"] for record in steps}) > 1
