"""``turnkey eval`` as a command on real vLLM servers, with a tiny model of random weights."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from contract_tools import Compose
from safetensors.torch import load_file

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.eval import server
from verl_turnkey.plugins.eval.player import Completions
from verl_turnkey.plugins.eval.server import Server, serve
from verl_turnkey.plugins.ports import port_range

pytestmark = pytest.mark.timeout(1800)  # which includes the start of a server

COMMAND = [sys.executable, "-c", "from verl_turnkey.plugins.cli.main import main; main()", "eval", "frozenlake"]
SMALL = ["data.max_prompt_length=1200", "data.max_response_length=8", "turnkey.rollout.max_turns=3"]


@pytest.fixture(scope="module")
def serving(strong_model_dir: Path, compose: Compose, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serving") / "server.log"
    with serve(strong_model_dir, compose("+turnkey=base", "+turnkey/device=cpu", *SMALL), log) as ours:
        assert server.KEY not in os.environ
        os.environ["OURS"] = ours.key
        yield ours


def start(out: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*COMMAND, "--out", str(out), "--concurrency", "1", *arguments, *SMALL]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen[str], code: int = 0) -> str:
    output, _ = process.communicate(timeout=1500)
    assert process.returncode == code, output[-4000:]
    return output


def samples(out: Path) -> dict[str, dict[str, Any]]:
    path = out / "samples.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {sample["key"]: {**sample, "seconds": 0} for sample in map(json.loads, lines)}


@pytest.mark.long
def test_sampling_interrupted_and_resumed_is_sampling_unbroken(serving, strong_model_dir, tmp_path):
    arguments = ["--server", serving.url, "--model", server.NAME, "--tokenizer", str(strong_model_dir)]
    arguments += ["--api-key-env", "OURS", "--tasks", "4", "--samples", "2"]
    end(start(tmp_path / "whole", *arguments))
    whole = samples(tmp_path / "whole")
    assert len(whole) == 8
    assert len({sample["digest"] for sample in whole.values()}) == 8, "each sample has seeds of its own"

    broken = start(tmp_path / "broken", *arguments)
    while len(samples(tmp_path / "broken")) < 2 and broken.poll() is None:
        time.sleep(0.01)
    broken.send_signal(signal.SIGINT)
    output = end(broken, 1)
    assert "INCOMPLETE" in output
    before = samples(tmp_path / "broken")
    assert 2 <= len(before) < 8, "it was interrupted too late for this test"
    assert before.items() <= whole.items()
    end(start(tmp_path / "broken", *arguments))
    assert samples(tmp_path / "broken") == whole
    results = [json.loads((tmp_path / out / "result.json").read_text()) for out in ("whole", "broken")]
    for result in results:
        assert result["complete"]
    assert results[0]["success"] == results[1]["success"]


def test_our_server_answers_nobody_without_its_key(serving):
    with pytest.raises(ConfigError, match="status 401"):
        asyncio.run(Completions(serving.url, server.NAME, concurrency=1).check())


def test_our_server_has_a_port_that_linux_hands_out_to_nobody(serving):
    """vLLM binds it only seconds after its choice."""
    port, bounds = urlsplit(serving.url).port, port_range()
    assert bounds is None or (port is not None and port < bounds[1])


def test_many_long_seeded_requests_at_once_are_answered(serving):
    """More tokens of prompts than vLLM computes at once."""

    async def ask() -> list[list[int]]:
        client = Completions(serving.url, server.NAME, concurrency=16, api_key_env="OURS", retries=0)
        sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 8}
        return await asyncio.gather(*(client.generate([5 + i] * 1190, sampling, i) for i in range(16)))

    answers = asyncio.run(ask())
    assert len({tuple(ids) for ids in answers}) == 16


@pytest.fixture
def sharded(strong_model_dir: Path, tmp_path: Path) -> Path:
    """The model as verl's FSDP checkpoints hold it."""
    actor = tmp_path / "run" / "global_step_7" / "actor"
    (actor / "huggingface").mkdir(parents=True)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("7")
    for file in strong_model_dir.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, actor / "huggingface")
    torch.save(load_file(strong_model_dir / "model.safetensors"), actor / "model_world_size_1_rank_0.pt")
    (actor / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    return tmp_path / "run"


def test_a_checkpoint_of_verl_is_merged_served_and_played(sharded, strong_model_dir, tmp_path):
    out = tmp_path / "out"
    end(start(out, "--checkpoint", str(sharded), "--greedy", "--tasks", "2"))
    merged, original = (load_file(folder / "model.safetensors") for folder in (out / "model", strong_model_dir))
    assert merged.keys() == original.keys()
    for name, weight in merged.items():
        assert torch.equal(weight.float(), original[name].bfloat16().float()), name
    result = json.loads((out / "result.json").read_text())
    assert result["complete"]
    assert [task["samples"] for task in result["tasks"]] == [1, 1]
    fields = json.loads((out / "eval.json").read_text())
    assert fields["model"]["engine"]["dtype"] == "float32"


def test_a_model_that_vllm_refuses_says_why(strong_model_dir, compose, tmp_path):
    shutil.copytree(strong_model_dir, tmp_path / "broken")
    (tmp_path / "broken" / "config.json").write_text("no configuration")
    refused = pytest.raises(ConfigError, match=r"(?s)vLLM server of the checkpoint ended with code.*config\.json")
    with refused, serve(tmp_path / "broken", compose("+turnkey=base", *SMALL), tmp_path / "server.log"):
        pass
