"""``turnkey eval`` on a server: real environments in real hosts, verl's agent loop; the server's model is a script."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from loopback import Refusal, serve
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.eval import schedule
from verl_turnkey.plugins.eval.completions import SeededTurns
from verl_turnkey.plugins.view.reading import read

MOVES = ("up", "down", "left", "right")
SMALL = ["data.max_prompt_length=1200", "turnkey.rollout.max_turns=6"]


@pytest.fixture
def lake(tokenizer, model_dir, ray_queue, tmp_path, monkeypatch) -> Iterator[Callable[..., Any]]:
    """``lake(*arguments)``: exit code, result and samples of an evaluation on FrozenLake; ``lake.requests``: requests.

    The model walks at random, as its seed says; greedily it goes down. ``lake.fail(prompt)`` may refuse a request.
    """

    class Lake:
        requests: list[dict[str, Any]]
        fail: Callable[[dict[str, Any]], None] = staticmethod(lambda request: None)
        with_ids = True
        room: int | None = None
        out = tmp_path / "out"

        def complete(self, request: dict[str, Any]) -> dict[str, Any]:
            self.fail(request)
            greedy = request["temperature"] == 0
            move = "down" if greedy else MOVES[request["seed"] % 4]
            ids = [*tokenizer.encode(f"<action>{move}</action>"), tokenizer.eos_token_id][: request["max_tokens"]]
            choice = {"text": tokenizer.decode(ids), "token_ids": ids, "prompt_token_ids": request["prompt"]}
            return {"choices": [choice if self.with_ids else {"text": choice["text"]}]}

        def __call__(self, *arguments: str, environment: str = "frozenlake") -> Any:
            models = {"data": [{"id": "another", "max_model_len": 1}, {"id": "m", "max_model_len": self.room}]}
            with serve({"/v1/completions": self.complete, "/v1/models": lambda _: models}) as (address, requests):
                words = ["--server", f"{address}/v1", "--model", "m", "--tokenizer", str(model_dir)]
                words += ["--out", str(self.out), *arguments]
                done = CliRunner().invoke(app, ["eval", environment, *words, *SMALL])
            self.requests = [request for _, request in requests]
            return done

        def result(self) -> dict[str, Any]:
            return json.loads((self.out / "result.json").read_text())

        def samples(self, out: Path | None = None) -> dict[str, dict[str, Any]]:
            lines = map(json.loads, ((out or self.out) / "samples.jsonl").read_text().splitlines())
            return {sample["key"]: {**sample, "seconds": 0} for sample in lines}

    monkeypatch.setattr("verl_turnkey.envs.http.LONGEST_WAIT", 0.01)
    return Lake()


def good(done: Any) -> Any:
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def test_a_result_is_what_the_samples_say(lake):
    done = good(lake("--tasks", "3", "--samples", "4"))
    result, samples = lake.result(), list(lake.samples().values())
    assert result["complete"]
    assert (result["samples"], len(samples)) == (12, 12)
    assert result["success"]["value"] == pytest.approx(sum(s["success"] for s in samples) / 12)
    assert [*result["pass_at"]] == ["1", "2", "4"]
    assert [task["samples"] for task in result["tasks"]] == [4, 4, 4]
    assert len({task["seed"] for task in result["tasks"]}) == 3
    assert all(1 <= s["turns"] <= 6 for s in samples)
    assert sum(s["turns"] for s in samples) == len(lake.requests) - 1  # one token for the check
    logged = read(lake.out / "turnkey_log", "episodes")
    assert logged["validation"].all()
    assert sorted(logged["turns"]) == sorted(s["turns"] for s in samples)
    assert [*logged.groupby("group").size()] == [4, 4, 4]
    assert "pass@4" in done.output
    assert "3 tasks: below 20" in done.output


def test_requests_are_what_training_would_send(lake, tokenizer):
    good(lake("--tasks", "1", "--temperature", "0.7", "actor_rollout_ref.rollout.top_k=5"))
    first = lake.requests[1]
    assert (first["temperature"], first["top_k"], first["top_p"], first["min_p"]) == (0.7, 5, 1, 0.0)
    assert first["max_tokens"] == 512  # the size of `turnkey train` on GPUs
    assert first["return_token_ids"] is True
    text = tokenizer.decode(first["prompt"])
    assert text.startswith("<|im_start|>user\nYou walk over a frozen lake")
    assert text.endswith("<|im_start|>assistant\n")
    assert len({request["seed"] for request in lake.requests}) == len(lake.requests)


def test_an_interrupted_evaluation_resumed_is_an_unbroken_one(lake, tmp_path, monkeypatch):
    arguments = ["--tasks", "4", "--samples", "3"]
    good(lake(*arguments))
    whole, calls = lake.samples(), len(lake.requests)

    lake.out = tmp_path / "broken"
    real = schedule.Samples.add

    def add(self: Any, key: str, sample: Any) -> None:
        real(self, key, sample)
        if len(self.done) == 6:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(schedule.Samples, "add", add)
        stopped = lake(*arguments, "--concurrency", "2")
    assert stopped.exit_code == 1
    assert "INCOMPLETE" in stopped.output
    before = lake.samples()
    assert 5 < len(before) < 12
    with (lake.out / "samples.jsonl").open("a") as file:
        file.write('{"key": "half a li')  # as a process that was killed leaves it
    first = len(lake.requests)
    good(lake(*arguments))
    assert lake.samples() == whole
    assert len(lake.requests) < calls, f"{first} requests, then all of them again"
    good(lake(*arguments))
    assert lake.requests == []


def test_more_samples_and_tasks_are_the_same_evaluation(lake):
    good(lake("--tasks", "2"))
    before = lake.samples()
    good(lake("--tasks", "3", "--samples", "2"))
    assert before.items() <= lake.samples().items()
    assert lake.result()["samples"] == 6


def test_another_evaluation_in_the_same_folder_is_refused(lake):
    good(lake("--tasks", "1"))
    done = lake("--tasks", "1", "--temperature", "0.5", "turnkey.rollout.history=1", "turnkey.env.kwargs.size=5")
    message = str(done.exception)
    assert "holds another evaluation" in message
    for line in ("rollout.history: 2 there, 1 now", "rollout.temperature: 1.0 there, 0.5 now", "kwargs.size: 4 there"):
        assert line in message
    assert lake.requests == []
    good(lake("--tasks", "1", "--temperature", "0.5", "--new"))
    assert len(lake.samples()) == 1


def test_an_error_of_the_server_is_retried_and_then_reported_apart(lake):
    """One task of three can't be played; the same command goes on with it."""
    seen: list[list[int]] = []

    def fail(request: dict[str, Any]) -> None:
        if len(request["prompt"]) > 1 and request["prompt"] not in seen:
            seen.append(request["prompt"])
        if len(request["prompt"]) > 1 and request["prompt"] == seen[0]:
            raise Refusal(400, "no room")

    lake.fail = fail
    done = lake("--tasks", "3", "--samples", "2", "--concurrency", "1")
    result = lake.result()
    assert done.exit_code == 1
    assert not result["complete"]
    assert result["failed"]["samples"] == 2
    assert result["failed"]["kinds"] == {"server": 2}
    assert "no room" in result["failed"]["reasons"][0]
    assert "no room" in done.output
    assert (result["samples"], [task["samples"] for task in result["tasks"]]) == (4, [0, 2, 2])
    assert sum(request["prompt"] == seen[0] for request in lake.requests) == 2 * schedule.ATTEMPTS

    lake.fail = lambda request: None
    good(lake("--tasks", "3", "--samples", "2"))
    assert lake.result()["failed"]["samples"] == 0


@pytest.mark.parametrize(
    ("with_ids", "status", "message"),
    [(False, None, "does not take `return_token_ids`"), (True, 404, "status 404")],
)
def test_a_server_that_cannot_is_refused_before_anything_is_played(lake, with_ids, status, message):
    def fail(request: dict[str, Any]) -> None:
        if status:
            raise Refusal(status)

    lake.with_ids, lake.fail = with_ids, fail
    done = lake("--tasks", "2")
    assert message in str(done.exception)
    assert len(lake.requests) == 1


def test_a_server_without_room_is_refused_before_anything_is_played(lake):
    lake.room = 1200 + 511
    done = lake("--tasks", "2")
    for words in ("takes 1711 tokens", "data.max_prompt_length", "data.max_response_length", "--max-model-len 1712"):
        assert words in str(done.exception)
    assert lake.requests == []
    good(lake("--tasks", "1", "--new", "turnkey.rollout.max_tokens_per_turn=511"))


def test_a_file_of_tasks_with_arguments_of_their_own(lake, tmp_path):
    tasks = [Task("turnkey/FrozenLake-v0", seed, {"size": 3}) for seed in (5, 5, 6)]
    write_parquet(tmp_path / "mine.parquet", tasks, "lake", "test")
    good(lake("--tasks", str(tmp_path / "mine.parquet"), "--greedy"))
    result = lake.result()
    assert [(task["seed"], task["kwargs"]) for task in result["tasks"]] == [(5, {"size": 3}), (6, {"size": 3})]
    assert all(request["temperature"] == 0 for request in lake.requests)
    done = lake("--tasks", str(tmp_path / "mine.parquet"), environment="babyai")
    assert "holds tasks of 'turnkey/FrozenLake-v0'" in str(done.exception)


def test_a_conversation_grows_by_what_the_model_wrote(lake, tokenizer):
    """In its own tokens, as in training; without room for a second turn it is refused, as there."""
    talk = ["turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=32"]
    good(lake("--tasks", "1", "--concurrency", "1", *talk, "data.max_response_length=2000"))
    _, *turns = lake.requests
    assert len(turns) > 1
    for before, after in pairwise(turns):
        written = [*tokenizer.encode(f"<action>{MOVES[before['seed'] % 4]}</action>"), tokenizer.eos_token_id]
        assert after["prompt"][: len(before["prompt"]) + len(written)] == [*before["prompt"], *written]
    done = lake("--tasks", "1", "--new", *talk, "data.max_response_length=32")
    assert "every conversation would end after its first turn" in str(done.exception)
    assert lake.requests == []


def test_a_file_of_your_own_is_a_part_of_the_identity(lake, tmp_path):
    own = tmp_path / "own_env.py"
    own.write_text((Path(__file__).parents[4] / "examples" / "custom_env.py").read_text())
    good(lake("--tasks", "2", environment=str(own)))
    assert lake.result()["complete"]
    own.write_text(own.read_text() + "# another version\n")
    done = lake("--tasks", "2", environment=str(own))
    assert "differs in\n  turnkey.modules: ['own_env.py (" in str(done.exception)


def test_images_are_refused():
    turns = SeededTurns(cast(Any, None), "k")
    with pytest.raises(ConfigError, match="sends token ids alone, and this prompt has images"):
        asyncio.run(turns.generate("a", prompt_ids=[1], sampling_params={}, image_data=[object()]))
