"""Which folder is served, and with which options."""

import asyncio
import json
import os
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
from loopback import Refusal, serve

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import JudgeError
from verl_turnkey.envs.http import Endpoint, EndpointConfig, on_this_machine
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.eval import checkpoint
from verl_turnkey.plugins.eval.result import Samples, powers, remarks, result, rows
from verl_turnkey.plugins.eval.run import ATTEMPTS, RESULT, finish, jobs, play_all
from verl_turnkey.plugins.eval.server import Server, cli_words
from verl_turnkey.plugins.view import stats


def hugging_face(folder):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"w")
    return folder


def test_a_folder_of_hugging_face_is_served_as_it_is(tmp_path):
    folder = hugging_face(tmp_path / "model")
    assert checkpoint.resolve(folder, tmp_path / "out") == folder
    assert checkpoint.name(folder) == "model"
    assert [file.name for file in checkpoint.weights(folder)] == ["model.safetensors"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["", "global_step_20", "global_step_20/actor"])
def test_weights_that_verl_saved_for_hugging_face_are_found(tmp_path, path):
    folder = hugging_face(tmp_path / "run" / "global_step_20" / "actor" / "huggingface")
    hugging_face(tmp_path / "run" / "global_step_10" / "actor" / "huggingface")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20\n")
    assert checkpoint.resolve(tmp_path / "run" / path, tmp_path / "out") == folder
    assert checkpoint.name(tmp_path / "run" / path) == "global_step_20"


def test_a_folder_that_is_neither_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither a Hugging Face folder"):
        checkpoint.resolve(tmp_path, tmp_path / "out")


@pytest.fixture
def merger(tmp_path, monkeypatch):
    """A checkpoint of verl's, and the commands of its merger, which is replaced: the real one is tested with vLLM."""
    actor = tmp_path / "global_step_3" / "actor"
    actor.mkdir(parents=True)
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"1")
    calls: list[list[str]] = []

    def merge(command, **_):
        calls.append(command)
        target = checkpoint.Path(command[command.index("--target_dir") + 1])
        (target / "config.json").write_text("{}")
        (target / "model.safetensors").write_bytes((actor / "model_world_size_1_rank_0.pt").read_bytes())
        if (actor / "lora_train_meta.json").exists():
            (target / "lora_adapter").mkdir()
            (target / "lora_adapter" / "adapter_config.json").write_text("{}")
        return type("Done", (), {"returncode": 0, "stdout": ""})

    monkeypatch.setattr(checkpoint.subprocess, "run", merge)
    return actor, calls


def test_shards_are_merged_once_for_as_long_as_they_are_the_same(merger, tmp_path):
    (actor, calls), out = merger, tmp_path / "out"
    for _ in range(2):
        assert checkpoint.resolve(tmp_path / "global_step_3", out) == out / "model"
    assert len(calls) == 1
    assert calls[0][calls[0].index("--backend") + 1] == "fsdp"
    assert "--trust-remote-code" not in calls[0]
    (actor / "model_world_size_1_rank_0.pt").write_bytes(b"22")
    checkpoint.resolve(actor, out, trust_remote_code=True)
    assert len(calls) == 2
    assert "--trust-remote-code" in calls[1]
    assert (out / "model" / "model.safetensors").read_bytes() == b"22"


def test_other_shards_than_those_evaluated_are_refused_before_they_are_merged(merger, tmp_path):
    (actor, calls), out = merger, tmp_path / "out"
    checkpoint.check_shards(actor, out)
    checkpoint.resolve(actor, out)
    (out / "eval.json").write_text(json.dumps({"model": {"sha256": "1"}}))
    checkpoint.check_shards(actor, out)
    elsewhere = tmp_path / "copy"
    shutil.copytree(actor, elsewhere)
    checkpoint.check_shards(elsewhere, out)  # the same shards at another place
    for content in (b"2", b"22"):
        (elsewhere / "model_world_size_1_rank_0.pt").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"(?s)of the shards in {actor}, not of {elsewhere}.*--new"):
            checkpoint.check_shards(elsewhere, out)
    (out / "eval.json").write_text(json.dumps({"model": {"name": "m", "tag": None}}))
    with pytest.raises(ConfigError, match="of the model m of a server"):
        checkpoint.check_shards(actor, out)
    assert len(calls) == 1


def test_a_difference_anywhere_in_a_large_shard_that_training_changed_is_seen(tmp_path):
    shard = tmp_path / "model_world_size_1_rank_0.pt"
    content = bytearray(100 * checkpoint.SAMPLED)
    shard.write_bytes(content)
    before = checkpoint._sampled(tmp_path)
    content[50 * checkpoint.SAMPLED : 60 * checkpoint.SAMPLED] = b"1" * 10 * checkpoint.SAMPLED
    shard.write_bytes(content)
    assert checkpoint._sampled(tmp_path) != before


def test_an_adapter_that_the_merger_leaves_beside_the_weights_is_refused(merger, tmp_path):
    """At each call, without merging again; the folder that the message names stays."""
    (actor, calls), out = merger, tmp_path / "out"
    (actor / "lora_train_meta.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"(?s)model/lora_adapter is a LoRA adapter.*merge_and_unload"):
            checkpoint.resolve(actor, out)
    assert len(calls) == 1
    assert (out / "model" / "lora_adapter" / "adapter_config.json").is_file()


@pytest.mark.parametrize("place", [".", "lora_adapter"])
def test_a_folder_of_hugging_face_with_an_adapter_is_refused(tmp_path, place):
    folder = hugging_face(tmp_path / "model")
    (folder / place).mkdir(exist_ok=True)
    (folder / place / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="is a LoRA adapter, which would be left out"):
        checkpoint.resolve(folder, tmp_path / "out")


def test_options_of_vllm_as_words():
    options = {"dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "quantization": None}
    words = cli_words({**options, "hf_overrides": {"a": [1]}})
    assert words[:-1] == ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--hf-overrides"]
    assert json.loads(words[-1]) == {"a": [1]}


# --- A server of our own: reached past a proxy, with its own key, and waited for no longer than a deadline ------------
NOWHERE = "http://127.0.0.1:9"


def endpoint(address: str, **options) -> Endpoint[str]:
    config = EndpointConfig(address, "m", **options, retries=0)
    return Endpoint(config, "/x", who="it", expected="a text", read=lambda answer: answer["said"], key="from-memory")


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve({"/x": lambda _: {"said": "here"}}) as (address, _):
        assert asyncio.run(endpoint(address).ask({})) == "here"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        *((f"http://{host}:8000/v1", True) for host in ("127.0.0.1", "127.0.1.1", "[::1]", "localhost", "a.localhost")),
        *((f"http://{host}/v1", False) for host in ("host", "10.0.0.5", "127.0.0.1.example.org", "[2001:db8::1]")),
    ],
)
def test_which_servers_are_on_this_machine(url, here):
    assert on_this_machine(url) == here


def test_a_key_in_memory_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("ANOTHER", "of-the-environment")
    before = dict(os.environ)

    def refuse(_):
        raise Refusal(401, "no such key: from-memory")

    with serve({"/x": refuse}) as (address, _), pytest.raises(JudgeError, match=r"no such key: \*\*\*"):
        asyncio.run(endpoint(address, api_key_env="ANOTHER").ask({}))
    assert endpoint(address)._login() == {"Authorization": "Bearer from-memory"}
    assert dict(os.environ) == before


def test_a_server_that_never_answers_is_not_waited_for_for_ever(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("loading weights\n")
    lives = SimpleNamespace(poll=lambda: None)
    with pytest.raises(ConfigError, match=r"(?s)did not answer for 0 seconds.*loading weights.*--server"):
        Server(lives, f"{NOWHERE}/v1", "key", log).wait(0.0)


# --- Which samples are played, how often, and what happens when one fails ---------------------------------------------
ROWS = [{COLUMN: Task("e", seed).to_json()} for seed in (1, 2, 3)]


def sample(success: bool, turns: int = 2) -> dict[str, Any]:
    zeros = dict.fromkeys(("env_return", "composed_return", "invalid_rate", "unparsed_rate"), 0.0)
    numbers = {"turns": turns, "truncated": not success, "tokens": 3, "composed_return.step": 0.5}
    return {**zeros, "success": success, **numbers}


@pytest.fixture
def kept(tmp_path):
    samples = Samples(tmp_path, {"model": "m"})
    yield samples
    samples.close()


def test_every_task_has_its_first_sample_before_a_second(kept):
    todo = jobs(ROWS, 2, kept)
    assert [(job.number, job.task) for job in todo] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({job.key for job in todo}) == 6
    kept.add(todo[1].key, sample(True))
    assert [job.key for job in jobs(ROWS, 2, kept)] == [job.key for i, job in enumerate(todo) if i != 1]
    groups = {job.row["uid"] for job in todo}
    assert len(groups) == 3, "samples of a task are a group in the log"


@pytest.mark.parametrize("concurrency", [1, 2, 100])
def test_no_more_at_once_than_asked_for(kept, concurrency):
    now, most = 0, 0

    async def play(key: str, row: Any) -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return sample(True)

    assert asyncio.run(play_all(jobs(ROWS, 2, kept), play, kept, concurrency=concurrency)) == []
    assert most == min(concurrency, 6)
    assert jobs(ROWS, 2, kept) == []


def test_a_failed_episode_is_played_again_and_then_left_out(kept):
    tries: dict[int, int] = {}
    sessions: list[Any] = []
    outcomes: list[bool | None] = []

    async def play(key: str, row: Any) -> dict[str, Any] | str:
        task = Task.from_json(row[COLUMN]).seed
        tries[task] = tries.get(task, 0) + 1
        sessions.append(row["session_id"])
        return "EnvironmentFailure: it died" if task == 1 or (task == 2 and tries[2] < ATTEMPTS) else sample(task == 3)

    failures = asyncio.run(play_all(jobs(ROWS, 1, kept), play, kept, concurrency=1, advance=outcomes.append))
    assert tries == {1: ATTEMPTS, 2: ATTEMPTS, 3: 1}
    assert sessions == [0, "0-1", "0-2"] * 2 + [0], "each attempt has a key of its own in the log"
    reasons = [(failure["task"], failure["seed"], failure["reason"]) for failure in failures]
    assert reasons == [(0, 1, "EnvironmentFailure: it died")]
    assert outcomes == [None, False, True]
    numbers = finish(kept, ROWS, 1, failures)
    assert (numbers["samples"], numbers["failed"]["samples"], numbers["complete"]) == (2, 1, False)
    assert [task["solved"] for task in numbers["tasks"]] == [0, 0, 1]
    assert [job.task for job in jobs(ROWS, 1, kept)] == [0], "the next call tries it again"
    mark = {"name": "small-3", "sha256": "0" * 64}
    for panel in (None, mark):
        finish(kept, ROWS, 1, failures, panel)
        assert json.loads((kept.folder / RESULT).read_text())["panel"] == panel


def test_where_nothing_can_succeed_any_more_it_stops(kept):
    async def play(key: str, row: Any) -> str:
        return "the server is gone"

    def check() -> None:
        raise RuntimeError("it ended")

    with pytest.raises(RuntimeError, match="it ended"):
        asyncio.run(play_all(jobs(ROWS, 2, kept), play, kept, concurrency=3, check=check))
    assert kept.done == {}


# --- What samples come to: against arithmetic by hand -----------------------------------------------------------------
TASKS = [{"env_id": "e", "seed": seed, "kwargs": {}} for seed in (5, 6, 7)]


def of(*solved: int, samples: int = 4) -> dict[int, list[dict[str, Any]]]:
    return {task: [sample(i < c, turns=task + 1) for i in range(samples)] for task, c in enumerate(solved)}


def test_success_and_pass_at_k():
    numbers = result(of(0, 1, 4), [], tasks=TASKS, samples_per_task=4)
    assert numbers["complete"]
    assert (numbers["samples"], numbers["samples_per_task"]) == (12, 4)
    low, high = stats.success([0, 1, 4], 4)[1:]
    assert numbers["success"] == pytest.approx({"value": 5 / 12, "low": low, "high": high})
    values = {k: rate["value"] for k, rate in numbers["pass_at"].items()}
    assert values == pytest.approx({"1": 5 / 12, "2": (0 + 0.5 + 1) / 3, "4": 2 / 3})
    assert numbers["turns"]["value"] == pytest.approx(2.0)
    assert numbers["truncated"]["value"] == pytest.approx(7 / 12)
    assert numbers["composed_return.step"]["value"] == 0.5
    tasks = [(task["seed"], task["solved"], task["samples"]) for task in numbers["tasks"]]
    assert tasks == [(5, 0, 4), (6, 1, 4), (7, 4, 4)]


def test_failed_samples_are_in_no_number_and_make_it_incomplete():
    samples = of(4, 4, 4)
    del samples[2][1:], samples[1]
    failures = [{"task": 1, "reason": "EnvironmentFailure: environment failure (timeout): slow"}] * 4
    failures += [{"task": 2, "reason": "ServerError: gone"}] * 3
    numbers = result(samples, failures, tasks=TASKS, samples_per_task=4)
    assert not numbers["complete"]
    assert numbers["success"]["value"] == 1.0
    pass_at = {k: (rate["value"], rate["tasks"]) for k, rate in numbers["pass_at"].items()}
    assert pass_at == {"1": (1.0, 2), "2": (1.0, 1), "4": (1.0, 1)}
    assert numbers["failed"]["samples"] == 7
    assert numbers["failed"]["share"] == pytest.approx(7 / 12)
    assert numbers["failed"]["kinds"] == {"timeout": 4, "ServerError": 3}
    assert [task["samples"] for task in numbers["tasks"]] == [4, 0, 1]
    text = "\n".join(remarks(numbers))
    for words in ("3 tasks", "7 samples failed", "58.3 %", "ServerError: gone", "INCOMPLETE"):
        assert words in text


@pytest.mark.parametrize(("failed", "complete"), [(0, True), (1, True), (2, False)])
def test_one_failed_sample_in_a_hundred_is_borne(failed, complete):
    samples = {0: [sample(True)] * (100 - failed)}
    numbers = result(samples, [{"task": 0, "reason": "x"}] * failed, tasks=TASKS[:1], samples_per_task=100)
    assert numbers["complete"] is complete


def test_samples_that_were_not_played_make_it_incomplete():
    numbers = result({0: [sample(True)]}, [], tasks=TASKS, samples_per_task=1)
    assert not numbers["complete"]
    assert "failed" not in "\n".join(remarks(numbers))
    numbers = result({}, [], tasks=TASKS, samples_per_task=2)
    assert numbers["success"] is None
    assert numbers["pass_at"] == {}
    assert rows(numbers) == []


def test_the_table_has_shares_in_percent():
    numbers = result(of(2, 2, 2), [], tasks=TASKS, samples_per_task=4)
    lines = {what: (value, interval) for what, value, interval in rows(numbers)}
    assert lines["success"][0] == "50.0 %"
    assert "pass@1" not in lines, "it is the success"
    assert lines["pass@4"][0] == "100.0 %"
    assert lines["turns"] == ("2", "1 to 3")
    assert "composed return: step" not in lines, "the only component is the reward"


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_are_the_powers_of_two_and_the_samples(n, expected):
    assert powers(n) == expected
