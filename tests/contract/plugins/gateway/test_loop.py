"""The loop turnkey_agent as verl makes it, with agents of users' own; only the language model is a script."""

from __future__ import annotations

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import real_tokenizers
from agents_of_users import chat
from contract_tools import Compose, loop_of_verl
from other_model import other_model
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.envs.agents.base import AgentHandle
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.checks.driver import resolve_and_check
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.eval.player import outcome as evaluated
from verl_turnkey.plugins.gateway import loop as gateway_loop
from verl_turnkey.plugins.gateway import process
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.view.join import read

AGENTS = Path(__file__).with_name("agents_of_users.py")
EXAMPLES = Path(__file__).parents[4] / "examples" / "agents"
SIZES = ("data.max_prompt_length=400", "data.max_response_length=600", "turnkey.rollout.max_tokens_per_turn=50")


class Model:
    """verl's client of the servers; says how many turns it has written."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text(self, prompt: str, sampling: Any) -> str:
        return f"turn {prompt.count('assistant')}"

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        text = self.text(self.tokenizer.decode(prompt_ids), sampling_params)
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        versions = {"global_steps": 7, "min_global_steps": 7, "max_global_steps": 7, "num_cached_tokens": 0}
        return TokenOutput(token_ids=ids, log_probs=[-0.1] * len(ids), extra_fields=versions)


@pytest.fixture
def play(compose: Compose, ray_queue, monkeypatch):
    """``play(task, *overrides)``: the rows of its episode, with the agent in this process."""

    def run(*tasks: dict[str, Any], overrides: tuple[str, ...] = (), function: str = "chat") -> list[list[Any]]:
        line = ("+turnkey=gigpo", f"turnkey.agent.run={AGENTS}:{function}", "turnkey.agent.in_process=true", *SIZES)
        config = compose(*line, *overrides)
        resolve_and_check(config, use_critic=False)
        assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "turnkey_agent"
        monkeypatch.setattr(loop_worker, "_process", None)
        monkeypatch.setattr(process, "_process", None)
        tokenizer = real_tokenizers.tokenizer("qwen3")

        async def episode(session: int, task: dict[str, Any]) -> list[Any]:
            loop = loop_of_verl("turnkey_agent", config, Model(tokenizer), tokenizer)
            assert type(loop) is gateway_loop.UserAgentLoop
            row = {"uid": "u", "session_id": session, "global_steps": 7, "turnkey_task": json.dumps(task)}
            return await loop.run({"temperature": 1.0, "logprobs": True}, **row)

        async def group() -> list[list[Any]]:
            return list(await asyncio.gather(*(episode(n, task) for n, task in enumerate(tasks))))

        return asyncio.run(group())

    return run


def test_an_episode_is_one_row_with_a_record_per_turn(play) -> None:
    ((row,),) = play({"turns": 3})
    steps = row.extra_fields["turnkey"]["steps"]
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert [step["composed_reward"] for step in steps] == [0.25, 0.0, 1.0]
    assert [step["action"] for step in steps] == ["turn 1", "turn 2", "turn 3"]
    assert [step["terminated"] for step in steps] == [False, False, True]
    assert all(step["success"] for step in steps)
    assert [step["extra"]["depth"] for step in steps] == [0, 1, 2]
    assert [step["extra"]["found"] for step in steps] == [3, 3, 3]
    assert [step["extra"]["next_anchor"] for step in steps] == [steps[1]["anchor"], steps[2]["anchor"], "(end)"]
    assert row.reward_score == 1.25
    assert row.extra_fields["reward_extra_info"]["acc"] == 1.0
    assert row.extra_fields["turnkey_agent"] == {"calls": 3.0, "left_out": 0.0}
    assert row.extra_fields["turnkey_break"] == "first"


def test_a_method_that_reads_it_gets_the_limit_of_turns(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of calls of the model, or the agent's own."""
    monkeypatch.setattr(loop_worker, "recorded", lambda config, turnkey: (False, {"turn_limit"}))
    tasks = ({"turns": 2}, {"turns": 2, "extra": {"turn_limit": 4}}, {"turns": 2, "extra": {"turn_limit": 90}})
    rows = play(*tasks, overrides=("turnkey.rollout.max_turns=9",))
    limits = [{step["extra"]["turn_limit"] for step in row.extra_fields["turnkey"]["steps"]} for (row,) in rows]
    assert limits == [{9.0}, {4.0}, {9.0}]


class Service(BaseHTTPRequestHandler):
    """Runs ``chat`` of :data:`AGENTS` for whoever posts an episode."""

    def do_POST(self) -> None:
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        handle = AgentHandle(episode["base_url"], episode["key"], episode["model"])
        body = json.dumps(asyncio.run(chat(episode["task"], handle))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_a_service_runs_the_agent(play, listen: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        run = f"turnkey.agent.run=http://127.0.0.1:{server.server_port}/run"
        overrides = (run, "turnkey.agent.in_process=false", f"turnkey.agent.listen={listen}")
        ((row,), (unasked,)) = play({"turns": 3}, {"turns": 1, "ends": "nothing"}, overrides=overrides)
        server.shutdown()
    assert [step["composed_reward"] for step in row.extra_fields["turnkey"]["steps"]] == [0.25, 0.0, 1.0]
    assert "the agent gave no reward" in unasked.extra_fields["turnkey"]["failed"]


def test_equal_histories_are_equal_states_across_episodes(play) -> None:
    first, second, other = (
        [step["anchor"] for step in rows[0].extra_fields["turnkey"]["steps"]]
        for rows in play({"turns": 2}, {"turns": 2}, {"turns": 2, "question": "Who?"})
    )
    assert first == second
    assert not {*first} & {*other}


def test_files_are_the_key_of_a_state(play) -> None:
    rows = play({"text": "b"}, {"text": "a"}, overrides=("turnkey.agent.state=workspace",), function="write")
    changed, same = (
        [step["anchor"] for row in outputs for step in row.extra_fields["turnkey"]["steps"]] for outputs in rows
    )
    assert len({*changed}) == 3
    assert same == [changed[0], changed[1], changed[1]]


ASK = "curl -sf $OPENAI_BASE_URL/chat/completions -H 'content-type: application/json' -d '%s' >/dev/null"
BODY = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "Go on."}]})


def test_a_function_of_states_sees_the_files_of_a_command(play, tmp_path: Path) -> None:
    states = tmp_path / "states.py"
    states.write_text("def key(view):\n    return f'{view.step} {sorted(view.files)}'\n")
    (tmp_path / "agent.sh").write_text(f"set -e\n{ASK % BODY}\ntouch done\n{ASK % BODY}\n")
    command = f"turnkey.agent.run=[bash,{tmp_path}/agent.sh]"
    further = ("turnkey.agent.in_process=false", "turnkey.agent.sandbox=none", "turnkey.agent.reward=exit_code")
    (rows,) = play({}, overrides=(command, *further, f"turnkey.agent.state={states}:key"))
    assert [step["anchor"] for row in rows for step in row.extra_fields["turnkey"]["steps"]] == ["0 []", "0 ['done']"]


def test_a_function_of_states_sees_the_files_of_a_function_in_a_sandbox(play, tmp_path: Path) -> None:
    states = tmp_path / "states.py"
    states.write_text("def key(view):\n    return f'{view.step} {sorted(view.files)}'\n")
    boxed = ("turnkey.agent.in_process=false", "turnkey.agent.sandbox=bwrap", f"turnkey.agent.state={states}:key")
    (rows,) = play({"text": "b"}, overrides=boxed, function="write")
    anchors = [step["anchor"] for row in rows for step in row.extra_fields["turnkey"]["steps"]]
    assert anchors[0] == "0 []"
    assert "[]" not in anchors[-1]


@pytest.mark.parametrize(
    ("task", "reason"),
    [
        ({"ends": "raise"}, "KeyError: 'lostlost"),
        ({"ends": "hang"}, "the agent ran longer than turnkey.agent.timeout=15"),
        ({"ends": "nothing"}, "the agent gave no reward"),
        ({"turns": 0}, "the agent made no request"),
        ({"reward": "much"}, "must return a finite number"),
        ({"question": "word " * 1200}, "the agent's first prompt takes"),
    ],
)
def test_an_episode_that_cannot_be_trained_is_one_masked_row(play, task: dict[str, Any], reason: str) -> None:
    (failed,), (good,) = play(task, {"turns": 1}, overrides=("turnkey.agent.timeout=15", "turnkey.agent.grace=0.2"))
    assert failed.response_mask == [0]
    assert reason in failed.extra_fields["turnkey"]["failed"]
    assert len(failed.extra_fields["turnkey"]["failed"]) < 360
    assert good.extra_fields["turnkey"]["failed"] is None


@pytest.mark.parametrize("in_process", [True, False])
def test_the_example_of_two_roles_pays_each_its_own_outcome(play, in_process: bool) -> None:
    run = (f"turnkey.agent.run={EXAMPLES}/planner_and_executor.py:play", f"turnkey.agent.in_process={in_process}")
    (rows,) = play({"numbers": [2, 3]}, overrides=run)
    by_row = [row.extra_fields["turnkey"]["steps"] for row in rows]
    assert [[step["step"] for step in steps] for steps in by_row] == [[0, 2], [1, 3]]
    assert [[step["extra"]["role"] for step in steps] for steps in by_row] == [["planner"] * 2, ["executor"] * 2]
    assert [[step["extra"]["depth"] for step in steps] for steps in by_row] == [[0, 1], [0, 1]]
    for steps, outcome in zip(by_row, (-0.012, -0.012), strict=True):  # twice the length of "turn 1"
        assert [step["composed_reward"] for step in steps] == pytest.approx([0.0, outcome])
        assert [step["extra"]["role_outcome"] for step in steps] == pytest.approx([outcome] * 2)
        assert "after" not in steps[0]
    assert not any(step["success"] for steps in by_row for step in steps)
    assert [row.extra_fields["turnkey_break"] for row in rows] == ["first", "role"]


@pytest.mark.parametrize(
    ("task", "rewards"),
    [
        ({"returns": {"outcome": {"a": 1, "b": -1}}}, {"a": [0, 1], "b": [0, -1], "policy": [0]}),
        ({"posts": {"a": 0.5, "b": 2}}, {"a": [0, 0.5], "b": [0, 2], "policy": [0]}),
        ({"posts": {"a": 9}, "returns": {"reward": 1, "outcome": {"a": 3}}}, {"a": [0, 4], "b": [0, 1], "policy": [1]}),
        # Samples of one request by two roles at once are no tree; those by one role are, and its outcome is for all.
        ({"at_once": True, "returns": 1.0}, {"a": [0, 0, 1], "b": [0, 1], "policy": [1]}),
    ],
)  # fmt: skip
def test_what_pays_a_role(play, task: dict[str, Any], rewards: dict[str, list[float]]) -> None:
    """A reward of the episode pays every role, on its last turn; the plain model name is a role among others."""
    (rows,) = play(task, function="several")
    steps = sorted((s for row in rows for s in row.extra_fields["turnkey"]["steps"]), key=lambda s: s["step"])
    by_role: dict[str, list[float]] = {}
    for step in steps:
        by_role.setdefault(step["extra"].get("role", "policy"), []).append(step["composed_reward"])
        assert step.get("outcome", 0.0) == (step["composed_reward"] if task.get("at_once") else 0.0)
    assert by_role == rewards
    of_evaluation = evaluated(rows, "own").get("outcomes", {})  # with turnkey.agent.model=own
    assert of_evaluation.keys() == (set() if task.get("at_once") else {"a", "b", "own"})
    assert all(step["success"] for step in steps), "the first role's outcome, or the reward, is above 0"


def test_the_log_has_calls_of_other_models_and_no_key(play, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of an episode that failed, as its judge did."""
    monkeypatch.setenv("JUDGE_KEY", "a-key-of-the-user")
    with other_model() as served:
        models = f"turnkey.agent.models={{judge:{{url:'{served.url}',model:big,key_env:JUDGE_KEY}}}}"
        tasks = ({}, {"asks": "fail"}, {"asks": None})
        log = (models, f"turnkey.log.trajectories={tmp_path}/log")
        (good,), (failed,), (without,) = play(*tasks, overrides=log, function="judged")
    assert good.extra_fields["turnkey_agent"] == {"calls": 1.0, "left_out": 0.0, "models/judge": 1.0}
    assert len(good.extra_fields["turnkey"]["steps"]) == len(without.extra_fields["turnkey"]["steps"]) == 1
    assert "answers 500" in failed.extra_fields["turnkey"]["failed"]
    assert loop_worker._process is not None
    assert loop_worker._process.log.drain(120.0)
    episodes = read(tmp_path / "log", "episodes").sort_values("episode")
    logged = [json.loads(calls) if isinstance(calls, str) else None for calls in episodes["other_calls"]]
    assert [calls and [call["model"] for call in calls] for calls in logged] == [["judge"], ["judge"], None]
    assert (logged[0][0]["path"], logged[0][0]["after_turns"]) == ("/chat/completions", 1)
    assert "for big" in logged[0][0]["reply"]
    assert "answers 500" in logged[1][0]["error"]
    assert "a-key-of-the-user" not in episodes.to_json()


def test_an_outcome_of_a_role_without_a_turn_fails_the_episode(play) -> None:
    (unknown,), (without,) = (
        play({"returns": {"outcome": {"c": 1}}}, function="several")[0],
        play({"returns": {"outcome": {"c": 1}}, "roles": []}, function="several")[0],
    )
    reason = "an outcome of the role 'c', which took no turn; of the episode are: "
    assert f"{reason}a, b, policy" in unknown.extra_fields["turnkey"]["failed"]
    assert f"{reason}none: name policy/<role> as the model" in without.extra_fields["turnkey"]["failed"]


def test_a_reward_that_the_agent_posts_counts(play) -> None:
    ((row,),) = play({"ends": "post"})
    assert row.reward_score == 0.5


def test_agents_wait_for_their_place_outside_their_time(play) -> None:
    few = ("turnkey.agent.at_once=1", "turnkey.agent.timeout=12")
    rows = play(*[{"turns": 2, "sleeps": 2.5}] * 6, overrides=few)
    assert [outputs[0].extra_fields["turnkey"]["failed"] for outputs in rows] == [None] * 6


@pytest.mark.parametrize(
    ("function", "task", "leaves"),
    [
        ("chat", {"turns": 1}, None),
        ("keeps", {"keeps": "client"}, "calls through a client of an earlier episode"),
        ("keeps", {"keeps": "own"}, "calls through a client of an earlier episode"),
        ("keeps_async", {}, "calls through a client of an earlier episode"),
        ("keeps", {"keeps": "thread"}, "leaves the thread 'asker' running"),
    ],
)
def test_a_module_that_keeps_something_plays_each_episode_in_a_new_process(
    play, caplog, function: str, task: dict[str, Any], leaves: str | None
) -> None:
    """Said once; no episode is lost, and none gets turns of another."""
    serial = ("turnkey.agent.in_process=false", "turnkey.agent.at_once=1")
    rows = play(*[task] * 2, overrides=serial, function=function)
    assert [outputs[0].extra_fields["turnkey"]["failed"] for outputs in rows] == [None] * 2
    assert [len(outputs[0].extra_fields["turnkey"]["steps"]) for outputs in rows] == [1] * 2
    messages = [record.message for record in caplog.records]
    warnings = [message for message in messages if message.endswith("Each of its episodes gets a new process")]
    assert len(warnings) == (leaves is not None)
    assert all(leaves in warning for warning in warnings if leaves)


@pytest.mark.parametrize("in_process", ["true", "false"])
def test_an_episode_that_also_calls_through_a_client_of_another_fails_with_the_reason(play, in_process: str) -> None:
    serial = (f"turnkey.agent.in_process={in_process}", "turnkey.agent.at_once=1")
    first, second, third = (
        outputs[0].extra_fields["turnkey"]["failed"]
        for outputs in play(*[{"keeps": "client", "mixes": True}] * 3, overrides=serial, function="keeps")
    )
    assert first is None
    assert "keeps calls through a client of an earlier episode: make the client in the function" in second
    assert (third is None) == (in_process == "false")


def test_a_function_in_a_sandbox_is_trained_and_one_that_exceeds_a_limit_costs_its_episode(play) -> None:
    isolated = ("turnkey.agent.in_process=false", "turnkey.agent.sandbox=bwrap", "turnkey.agent.memory_gb=1")
    (row,), (failed,) = play({"turns": 2}, {"turns": 1, "allocates": 2 << 30}, overrides=isolated)
    assert [step["composed_reward"] for step in row.extra_fields["turnkey"]["steps"]] == [0.25, 1.0]
    assert row.extra_fields["turnkey"]["failed"] is None
    assert "MemoryError" in failed.extra_fields["turnkey"]["failed"]
    assert failed.response_mask == [0]


FINISHES = """
import json, os, urllib.request
def post(url, value):
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(value).encode(), headers), timeout=30).read()
messages = [{"role": "user", "content": "Go on."}]
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "policy", "messages": messages})
post(os.environ["TURNKEY_URL"] + "/finish", {})
"""


def test_a_verifier_has_its_time_after_an_agent_that_finishes(play, tmp_path: Path) -> None:
    for name in ("environment", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "instruction.md").write_text("Go on.")
    (tmp_path / "task.toml").write_text("[verifier]\ntimeout_sec = 30.0\n")
    (tmp_path / "tests/test.sh").write_text("sleep 3; echo 1 > /logs/verifier/reward.txt")
    (tmp_path / "environment/agent.py").write_text(FINISHES)
    agent = {"run": "[/usr/bin/python3, agent.py]", "in_process": "false", "sandbox": "bwrap", "grace": 0.5}
    task = {"env_id": "harbor", "kwargs": {"path": str(tmp_path)}}
    ((row,),) = play(task, overrides=tuple(f"turnkey.agent.{name}={value}" for name, value in agent.items()))
    assert row.extra_fields["turnkey"]["failed"] is None
    assert row.reward_score == 1.0
    # In a task of several steps the agent has finished one of them.
    (tmp_path / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    text = "[verifier]\ntimeout_sec = 3.0\n"
    for name in ("one", "two"):
        (tmp_path / "steps" / name / "workdir").mkdir(parents=True)
        (tmp_path / "steps" / name / "instruction.md").write_text("Go on.")
        text += f"[[steps]]\nname = '{name}'\n"
    (tmp_path / "steps/two/workdir/setup.sh").write_text("sleep 8")
    (tmp_path / "task.toml").write_text(text)
    (rows,) = play(task, overrides=tuple(f"turnkey.agent.{name}={value}" for name, value in agent.items()))
    assert rows[0].extra_fields["turnkey"]["failed"] is None
    assert sum(len(row.extra_fields["turnkey"]["steps"]) for row in rows) == 2


# --- the policy as a user ---------------------------------------------------------------------------------------------

ASKS = "What is your email address?"
TALK = f'talk(message="{ASKS}")'
SERVICE = (
    "turnkey.rollout.action_format=plain",
    "data.max_prompt_length=1500",
    "data.max_response_length=1500",
    "turnkey.rollout.max_tokens_per_turn=40",
)


class AgentAndCustomer(Model):
    """Asks the customer as the agent, and answers with a number as the customer."""

    def __init__(self, tokenizer: Any, silent: bool, fails: bool) -> None:
        super().__init__(tokenizer)
        self.silent, self.fails = silent, fails
        self.as_customer: list[str] = []
        self.params: list[dict[str, Any]] = []

    def text(self, prompt: str, sampling: Any) -> str:
        if "You are" not in prompt or "a customer of a shop" not in prompt:
            return TALK
        self.as_customer.append(prompt)
        self.params.append(sampling)
        if self.fails:
            raise ValueError("the server is gone")
        return "" if self.silent else f"Answer {len(self.as_customer)}."


@pytest.fixture
def serve(compose: Compose, ray_queue, monkeypatch):
    """``serve(episodes, silent)``: the rows of each, and the model."""

    def run(episodes: int, silent: bool = False, fails: bool = False) -> tuple[list[list[Any]], AgentAndCustomer]:
        config = compose("+turnkey=gigpo", "+turnkey/env=service", "turnkey.rollout.max_turns=3", *SERVICE)
        monkeypatch.setattr(loop_worker, "_process", None)
        tokenizer = real_tokenizers.tokenizer("qwen3")
        model = AgentAndCustomer(tokenizer, silent, fails)
        task = {"env_id": "turnkey/Service-v0", "seed": 3, "kwargs": {"user": {"url": "policy"}}}

        async def episode(session: int) -> list[Any]:
            loop = loop_of_verl("turnkey_env", config, model, tokenizer)
            row = {"uid": "u", "session_id": session, "global_steps": 7, "turnkey_task": json.dumps(task)}
            return await loop.run({"temperature": 0.7, "logprobs": True}, **row)

        async def group() -> list[list[Any]]:
            return list(await asyncio.gather(*map(episode, range(episodes))))

        rows = asyncio.run(group())
        loop_worker.finish(None)
        return rows, model

    return run


def test_the_policy_answers_and_is_not_trained_on_it(serve) -> None:
    episodes, model = serve(2)
    assert len(model.as_customer) == 6
    assert {params["temperature"] for params in model.params} == {0.7}
    assert sorted(prompt.count(ASKS) for prompt in model.as_customer) == [1, 1, 2, 2, 3, 3]
    for rows in episodes:
        steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
        assert [step["action"] for step in steps] == [TALK] * 3
        for row in rows:
            sampled = [token for token, bit in zip(row.response_ids, row.response_mask, strict=True) if bit]
            assert "Answer" not in model.tokenizer.decode(sampled)
    assert any("Customer: Answer" in model.tokenizer.decode(row.prompt_ids + row.response_ids) for row in episodes[0])


def test_nothing_said_is_an_answer(serve) -> None:
    ((row,),), model = serve(1, silent=True)
    assert row.extra_fields["turnkey"]["failed"] is None
    assert "Customer: ..." in model.tokenizer.decode(row.prompt_ids + row.response_ids)


def test_every_episode_asks_anew_and_no_failure_shows_the_address(serve) -> None:
    _, model = serve(2)
    _, again = serve(2)
    assert len(model.as_customer) == len(again.as_customer) == 6
    ((row,), (other,)), _ = serve(2, fails=True)
    for failed in (row.extra_fields["turnkey"]["failed"], other.extra_fields["turnkey"]["failed"]):
        assert "the simulated user" in failed
        assert "at policy" in failed
        assert "/v1" not in failed


@pytest.mark.parametrize("seed", range(6))
def test_the_probe_plays_with_a_user_who_always_answers(compose: Compose, seed: int) -> None:
    """With two of these seeds random steps speak to the customer."""
    config = compose("+turnkey=gigpo", "+turnkey/env=service", "+turnkey.env.kwargs.user={url: policy}", *SERVICE)
    turnkey = turnkey_config(config)
    observation, _, _ = asyncio.run(probe.play(turnkey, probe._configured(Task("turnkey/Service-v0", seed), turnkey)))
    assert "Customer: Hello!" in observation
