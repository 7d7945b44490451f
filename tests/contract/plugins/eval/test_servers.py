"""``turnkey eval`` on a server: real environments in real hosts, verl's agent loop; the server's model is a script."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from loopback import Refusal, serve
from omegaconf import OmegaConf
from PIL import Image
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.eval import run
from verl_turnkey.plugins.eval.player import SeededTurns, turn_seed
from verl_turnkey.plugins.eval.run import ATTEMPTS
from verl_turnkey.plugins.view.join import read

MOVES = ("up", "down", "left", "right")
SIZES = ("data.max_prompt_length=200", "data.max_response_length=200", "turnkey.rollout.max_tokens_per_turn=20")
GUESS = f"turnkey.agent.run={Path(__file__).with_name('evaluated_agents.py')}:guess"
SMALL = ["data.max_prompt_length=1200", "turnkey.rollout.max_turns=6"]


class Served:
    """``served(*words)``: an evaluation on a server; then its result and samples, and what the server was asked."""

    fail: Callable[[dict[str, Any]], None] = staticmethod(lambda request: None)
    with_ids = True
    room: int | None = None

    def __init__(self, tokenizer: Any, model_dir: Path, folder: Path) -> None:
        self.tokenizer, self.model_dir, self.folder, self.out = tokenizer, model_dir, folder, folder / "out"
        self.requests: list[dict[str, Any]] = []

    def text(self, request: dict[str, Any]) -> str:
        """Yes for odd seeds."""
        return "yes" if request["seed"] % 2 else "no"

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        self.fail(request)
        text = self.text(request)
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id][: request["max_tokens"]]
        further = {"token_ids": ids, "prompt_token_ids": request["prompt"]} if self.with_ids else {}
        return {"choices": [{"text": text, **further}]}

    def evaluate(self, *words: str) -> Any:
        models = {"data": [{"id": "another", "max_model_len": 1}, {"id": "m", "max_model_len": self.room}]}
        with serve({"/v1/completions": self.complete, "/v1/models": lambda _: models}) as (address, requests):
            server = ["--server", f"{address}/v1", "--model", "m", "--tokenizer", str(self.model_dir)]
            done = CliRunner().invoke(app, ["eval", *words, *server, "--out", str(self.out)])
        self.requests = [request for _, request in requests]
        return done

    def __call__(self, *words: str, sizes: Sequence[str] = SIZES) -> Any:
        done = self.evaluate(*words, *sizes)
        self.requests = self.requests[1:]  # the first is the check
        return done

    def result(self) -> dict[str, Any]:
        return json.loads((self.out / "result.json").read_text())

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "samples.jsonl").read_text().splitlines()]

    def tasks(self, *tasks: dict[str, Any], name: str = "val.parquet") -> str:
        """A file of tasks."""
        rows = [
            {"turnkey_task": json.dumps(task), "prompt": [{"role": "user", "content": "?"}], "data_source": "yes"}
            for task in tasks
        ]
        pd.DataFrame(rows).to_parquet(file := self.folder / name)
        return str(file)


class Lake(Served):
    """On FrozenLake, where the model walks at random, as its seed says, and down if it is greedy."""

    def text(self, request: dict[str, Any]) -> str:
        move = "down" if request["temperature"] == 0 else MOVES[request["seed"] % 4]
        return f"<action>{move}</action>"

    def __call__(self, *arguments: str, environment: str = "frozenlake") -> Any:
        return self.evaluate(environment, *arguments, *SMALL)

    def samples(self) -> Any:
        return {sample["key"]: {**sample, "seconds": 0} for sample in super().samples()}


@pytest.fixture
def served(tokenizer, model_dir, tmp_path, monkeypatch) -> Served:
    monkeypatch.setattr("verl_turnkey.envs.http.LONGEST_WAIT", 0.01)
    return Served(tokenizer, model_dir, tmp_path)


@pytest.fixture
def lake(served, ray_queue) -> Lake:
    return Lake(served.tokenizer, served.model_dir, served.folder)


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


@pytest.mark.parametrize(("opponent", "roles"), [("random", 1), ("self", 2)])
def test_win_draw_and_loss_of_each_role(lake, opponent: str, roles: int):
    """Against another the policy has one role of each task, in self-play both."""
    lake.text = lambda request: f"<action>{('Pass', 'Bet')[request['seed'] % 2]}</action>"
    of_recipe = [] if opponent == "random" else [f"turnkey.val_opponent={opponent}"]
    done = good(lake("--tasks", "10", "--samples", "2", *of_recipe, environment="openspiel"))
    result, samples = lake.result(), list(lake.samples().values())
    assert result.get("players") == ({"policy": "m", "opponent": "random"} if opponent == "random" else None)
    assert {len(sample["outcomes"]) for sample in samples} == {roles}
    assert [*result["roles"]] == ["player 0", "player 1"]
    for role, numbers in result["roles"].items():
        ends = [sample["outcomes"][role] for sample in samples if role in sample["outcomes"]]
        assert numbers["samples"] == len(ends) > 1
        for end, share in {
            "win": [e > 0 for e in ends],
            "draw": [e == 0 for e in ends],
            "loss": [e < 0 for e in ends],
        }.items():
            assert numbers[end]["value"] == pytest.approx(sum(share) / len(ends))
            assert numbers[end]["low"] <= numbers[end]["value"] <= numbers[end]["high"]
            assert f"{role}: {end}" in done.output
    won = [max(s["outcomes"].values() if roles == 1 else [s["outcomes"]["player 0"]]) > 0 for s in samples]
    assert result["success"]["value"] == pytest.approx(sum(won) / len(samples))


def test_models_that_played_each_other_are_rated(lake):
    """One bets, one passes, and the third does as its seed says."""

    def always(action: str) -> Callable[[Any], Any]:
        return lambda _: {"choices": [{"message": {"role": "assistant", "content": f"<action>{action}</action>"}}]}

    folders = []
    with serve({"/v1/chat/completions": always("Bet")}) as (address, _):
        bets = f"turnkey.val_opponent={{url: {address}/v1, model: bets}}"
        for name, against in (("passes", bets), ("passes", "turnkey.val_opponent=random"), ("bets", "")):
            lake.out = lake.folder / f"{name}-{len(folders)}"
            lake.text = lambda request, name=name: f"<action>{'Bet' if name == 'bets' else 'Pass'}</action>"
            good(lake("--tasks", "8", "--tag", name, *[against] * bool(against), environment="openspiel"))
            folders.append(str(lake.out))
    assert [json.loads((Path(folder) / "result.json").read_text())["players"] for folder in folders] == [
        {"policy": "passes", "opponent": "bets"},
        {"policy": "passes", "opponent": "random"},
        {"policy": "bets", "opponent": "random"},
    ]
    done = good(CliRunner().invoke(app, ["compare", *folders]))
    assert all(f"\n  {name} " in done.output for name in ("passes", "bets", "random"))


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
    real = run.Samples.add

    def add(self: Any, key: str, sample: Any) -> None:
        real(self, key, sample)
        if len(self.done) == 6:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run.Samples, "add", add)
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
    assert sum(request["prompt"] == seen[0] for request in lake.requests) == 2 * run.ATTEMPTS

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


TAGS = "turnkey.rollout.action_format=tags"
SHADES = """
import gymnasium
import numpy


class Shades(gymnasium.Env):
    \"\"\"The words are the same everywhere: the picture says which action solves it.\"\"\"

    def reset(self, *, seed=None, options=None):
        self.bright = seed % 2
        return self.seen(task="Say what you see.")

    def step(self, action):
        won = action == ("bright" if self.bright else "dark")
        return self.seen()[0], float(won), True, False, self.seen(success=won)[1]

    def seen(self, **info):
        picture = numpy.full((8, 12, 3), 200 * self.bright, "uint8")
        return "A wall.", {"admissible": ["dark", "bright"], "images": [picture], **info}


gymnasium.register("eval/Shades-v0", entry_point=Shades)
"""


class Seeing(Served):
    """A server of Chat Completions whose model says how bright the last picture is, and how large pictures are."""

    sees = True

    def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        content = request["messages"][-1]["content"]
        (url,) = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
        if not self.sees:
            raise Refusal(400, "this model takes no images")
        image = Image.open(BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)))
        shade = "bright" if image.getpixel((0, 0)) == (200, 200, 200) else "dark"
        text = f"{image.size[0]} x {image.size[1]} <action>{shade}</action>"
        return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}

    def evaluate(self, *words: str) -> Any:
        with serve({"/v1/chat/completions": self.chat}) as (address, requests):
            server = ["--server", f"{address}/v1", "--model", "m", "--tokenizer", str(self.model_dir)]
            done = CliRunner().invoke(app, ["eval", *words, *server, "--out", str(self.out)])
        self.requests = [request for _, request in requests]
        return done


@pytest.fixture
def seeing(served, tmp_path, ray_queue) -> Seeing:
    (tmp_path / "shades.py").write_text(SHADES)
    return Seeing(served.tokenizer, served.model_dir, served.folder)


def test_images_go_to_a_server_of_messages(seeing, tmp_path):
    """What is played needs the picture; the model's tokenizer here takes none."""
    words = [str(tmp_path / "shades.py"), "--tasks", "6", *SMALL, "turnkey.rollout.system=You look.", TAGS]
    good(seeing.evaluate(*words, "actor_rollout_ref.rollout.top_k=-1"))
    result = seeing.result()
    assert (result["complete"], result["success"]["value"]) == (True, 1.0)
    check, *requests = seeing.requests
    assert check["max_tokens"] == 1
    assert len(requests) == 6
    for request in requests:
        assert {*request} == {"model", "messages", "temperature", "top_p", "max_tokens", "seed"}
        system, user = request["messages"]
        assert system == {"role": "system", "content": "You look."}
        assert [part["type"] for part in user["content"]] == ["image_url", "text"]
        assert "A wall." in user["content"][1]["text"]
    turns, texts = (read(seeing.out / "turnkey_log", table) for table in ("turns", "texts"))
    assert {image[:5] for image in turns["images"]} == {"12x8-"}
    assert {text[:7] for text in texts["response"]} == {"12 x 8 "}
    assert len(read(seeing.out / "turnkey_log", "pictures")) == 2
    seeing.sees = False
    done = seeing.evaluate(*words, "--new")
    assert "a message with an image" in str(done.exception)
    assert "this model takes no images" in str(done.exception)


def test_images_that_cannot_go_to_a_server_are_refused_before_the_run(seeing, tmp_path):
    words = [str(tmp_path / "shades.py"), "--tasks", "2", *SMALL]
    own = CliRunner().invoke(app, ["eval", *words, "--checkpoint", str(seeing.model_dir), "--out", str(seeing.out)])
    assert "the server that --checkpoint starts gets token ids alone" in str(own.exception)
    talk = ("turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=32")
    done = seeing.evaluate(*words, *talk, "data.max_response_length=2000")
    assert "turnkey.rollout.prompt=conversation works with token ids alone" in str(done.exception)
    assert seeing.requests == []


def test_images_that_only_later_prompts_have_are_refused_there():
    turns = SeededTurns(cast(Any, None), "k")
    with pytest.raises(ConfigError, match="sends token ids alone, and this prompt has images"):
        asyncio.run(turns.generate("a", prompt_ids=[1], sampling_params={}, image_data=[object()]))


# --- agents of users' own: real processes, clients, agent loop --------------------------------------------------------


def asking(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"Is {n} a number?", **more} for n in range(number)]


def test_the_result_is_the_count_by_hand(served: Served):
    done = good(served(GUESS, "--tasks", served.tasks(*asking(4)), "--samples", "3"))
    result, samples = served.result(), served.samples()
    by_hand = {}
    for sample in samples:  # a sample's seeds follow from its key
        first, second = (turn_seed(sample["key"], turn) % 2 for turn in (0, 1))
        by_hand[sample["key"]] = (bool(first or second), 1.0 if first else 0.5 * second, 2 - first)
    assert {s["key"]: (s["success"], s["env_return"], s["turns"]) for s in samples} == by_hand
    successes = [success for success, _, _ in by_hand.values()]
    assert 0 < sum(successes) < 12
    assert result["complete"]
    assert result["success"]["value"] == pytest.approx(sum(successes) / 12)
    assert result["success"]["low"] < result["success"]["value"] < result["success"]["high"]
    assert result["env_return"]["value"] == pytest.approx(sum(paid for _, paid, _ in by_hand.values()) / 12)
    assert [task["samples"] for task in result["tasks"]] == [3] * 4
    assert [task["question"] for task in result["tasks"]] == [task["question"] for task in asking(4)]
    assert sum(task["solved"] for task in result["tasks"]) == sum(successes)
    assert len(served.requests) == sum(turns for _, _, turns in by_hand.values())
    assert {request["temperature"] for request in served.requests} == {1.0}, (
        "the agent's own is ignored, as in training"
    )
    assert {request["max_tokens"] for request in served.requests} == {20}
    logged = read(served.out / "turnkey_log", "episodes")
    assert sorted(logged["turns"]) == sorted(turns for _, _, turns in by_hand.values())
    assert "agent     " in done.output
    assert "tasks     4, 3 samples per task" in done.output
    count = len(served.requests)
    good(served(GUESS, "--tasks", served.tasks(*asking(4)), "--samples", "3"))
    assert count
    assert served.requests == [], "each sample is there already"
    other = served(GUESS.replace(":guess", ":other"), "--tasks", served.tasks(*asking(4)))
    assert "other" in str(other.exception)


def test_an_agent_that_breaks_down_costs_its_own_episodes(served: Served):
    tasks = served.tasks(*asking(2), {"ends": "silent"}, {"question": "?", "ends": "raise"})
    done = served(GUESS, "--tasks", tasks, "--samples", "2")
    result = served.result()
    assert done.exit_code == 1
    assert (result["complete"], result["samples"], result["failed"]["samples"]) == (False, 4, 4)
    assert result["failed"]["kinds"] == {"AgentFailure": 4}
    reasons = " ".join(result["failed"]["reasons"])
    assert "the agent made no request" in reasons
    assert "KeyError: 'lost'" in reasons
    assert [task["samples"] for task in result["tasks"]] == [2, 2, 0, 0]
    assert "4 samples failed" in done.output
    assert sum(len(request["prompt"]) for request in served.requests) > 0
    raised = len(served.requests) - sum(sample["turns"] for sample in served.samples())
    assert raised == 2 * ATTEMPTS, "each attempt at the task that raises asked once"


def test_a_server_that_does_not_answer_is_no_failure_of_the_agent(served: Served):
    def fail(request: dict[str, Any]) -> None:
        if len(request["prompt"]) > 1:
            raise Refusal(400, "no room")

    served.fail = fail
    done = served(GUESS, "--tasks", served.tasks(*asking(1)))
    assert done.exit_code == 1
    assert served.result()["failed"]["kinds"] == {"server": 1}
    assert "no room" in done.output


def test_a_command_plays_in_processes_of_its_own(served: Served):
    script = served.folder / "script.py"
    script.write_text(
        "import sys, openai\n"
        "reply = openai.OpenAI().chat.completions.create(\n"
        "    model='policy', messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
        "sys.exit(reply.choices[0].message.content != 'yes')\n"
    )
    run = f"turnkey.agent.run=['{sys.executable}','{script}','{{question}}']"
    words = [run, "turnkey.agent.sandbox=none", "turnkey.agent.reward=exit_code", "turnkey.agent.state=workspace"]
    good(served(*words, "--tasks", served.tasks(*asking(3))))
    samples = served.samples()
    assert [s["success"] for s in samples] == [turn_seed(s["key"], 0) % 2 == 1 for s in samples]
    before = json.loads((served.out / "eval.json").read_text())
    script.write_text("import sys; sys.exit(1)")
    changed = served(*words, "--tasks", served.tasks(*asking(3)))
    assert "differs in\n  turnkey.agent.run: " in str(changed.exception)
    assert before["turnkey.agent.run"][1].startswith("script.py (")
    assert before["turnkey.agent.run"][2:] == ["{question}"]


def test_a_run_of_an_agent_is_evaluated_with_its_settings(served: Served):
    """On the tasks of its validation, without a word about them on the command line."""
    run, trained = served.folder / "run", served.tasks(*asking(3), name="train.parquet")
    record = run / "hydra" / ".hydra"
    record.mkdir(parents=True)
    line = ["+turnkey=gigpo", GUESS, *SIZES, "turnkey.agent.timeout=77"]
    line += [f"data.train_files={trained}", f"data.val_files={served.tasks(*asking(5))}"]
    line += ["actor_rollout_ref.rollout.temperature=0.7", f"trainer.default_local_dir={run}/checkpoints"]
    config = composed(line)
    OmegaConf.update(config, "turnkey.agent.files", {"a.b/c.toml": 'x = "{model}"\ny = 1'}, force_add=True)
    OmegaConf.save(config, record / "config.yaml")
    done = good(served(str(run), "--tasks", "4", sizes=()))
    assert f"settings  of the run in {run}" in done.output
    assert "; 3 with the same content as a task that the run trained on" in done.output
    assert "response 200" in done.output
    fields = json.loads((served.out / "eval.json").read_text())
    assert [*fields["turnkey.agent.files"]] == ["a.b/c.toml"]
    assert fields["turnkey.agent.timeout"] == 77
    assert {request["max_tokens"] for request in served.requests} == {20}
    assert {request["temperature"] for request in served.requests} == {0.7}
    assert [task["question"] for task in served.result()["tasks"]] == [task["question"] for task in asking(4)]


def test_what_is_played_is_named_once(served: Served):
    both = served("frozenlake", GUESS)
    assert "either turnkey/FrozenLake" in both.output.replace("\n", " ") or "either frozenlake" in both.output
    nothing = served(GUESS)
    assert "the tasks of an agent are the first of data.val_files" in str(nothing.exception)
    assert served.requests == []
