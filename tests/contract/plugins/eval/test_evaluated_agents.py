"""``turnkey eval`` with agents of users' own: real processes, clients, agent loop; the server's model is a script."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from loopback import Refusal, serve
from omegaconf import OmegaConf
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.eval.completions import turn_seed
from verl_turnkey.plugins.eval.schedule import ATTEMPTS
from verl_turnkey.plugins.view.reading import read

GUESS = f"turnkey.agent.run={Path(__file__).with_name('evaluated_agents.py')}:guess"
SIZES = ("data.max_prompt_length=200", "data.max_response_length=200", "turnkey.rollout.max_tokens_per_turn=20")


class Served:
    """``served(*words)``: an evaluation of an agent on a server whose model says yes for odd seeds."""

    def __init__(self, tokenizer: Any, model_dir: Path, folder: Path) -> None:
        self.tokenizer, self.model_dir, self.folder = tokenizer, model_dir, folder
        self.requests: list[dict[str, Any]] = []
        self.fail: Callable[[dict[str, Any]], None] = lambda request: None

    def complete(self, request: dict[str, Any]) -> dict[str, Any]:
        self.fail(request)
        text = "yes" if request["seed"] % 2 else "no"
        ids = [*self.tokenizer.encode(text), self.tokenizer.eos_token_id][: request["max_tokens"]]
        return {"choices": [{"text": text, "token_ids": ids, "prompt_token_ids": request["prompt"]}]}

    def __call__(self, *words: str, sizes: Sequence[str] = SIZES) -> Any:
        models = {"data": [{"id": "m", "max_model_len": None}]}
        with serve({"/v1/completions": self.complete, "/v1/models": lambda _: models}) as (address, requests):
            server = ["--server", f"{address}/v1", "--model", "m", "--tokenizer", str(self.model_dir)]
            done = CliRunner().invoke(app, ["eval", *words, *sizes, *server, "--out", str(self.folder / "out")])
        self.requests = [request for _, request in requests][1:]  # the first is the check
        return done

    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "out" / "result.json").read_text())

    def samples(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "out" / "samples.jsonl").read_text().splitlines()]

    def tasks(self, *tasks: dict[str, Any], name: str = "val.parquet") -> str:
        """A file of tasks."""
        rows = [
            {"turnkey_task": json.dumps(task), "prompt": [{"role": "user", "content": "?"}], "data_source": "yes"}
            for task in tasks
        ]
        pd.DataFrame(rows).to_parquet(file := self.folder / name)
        return str(file)


@pytest.fixture
def served(tokenizer, model_dir, tmp_path, monkeypatch) -> Iterator[Served]:
    monkeypatch.setattr("verl_turnkey.envs.http.LONGEST_WAIT", 0.01)
    return Served(tokenizer, model_dir, tmp_path)


def asking(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{"question": f"Is {n} a number?", **more} for n in range(number)]


def good(done: Any) -> Any:
    assert done.exit_code == 0, (done.output, done.exception)
    return done


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
    logged = read(served.folder / "out" / "turnkey_log", "episodes")
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
    before = json.loads((served.folder / "out" / "eval.json").read_text())
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
    assert "the run trained on 3 of them" in done.output
    assert "response 200" in done.output
    fields = json.loads((served.folder / "out" / "eval.json").read_text())
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
