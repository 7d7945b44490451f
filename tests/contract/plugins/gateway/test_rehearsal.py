"""``turnkey agent``: an agent plays one task with a stand-in for the model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import real_tokenizers
from agents_of_users import ADD
from gateway_parts import Played, run, seeing
from loopback import serve
from other_model import other_model
from PIL import Image
from recorded_traffic import DATA, recorded
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.http import post_json
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.gateway.codec import Parsed
from verl_turnkey.plugins.gateway.messages import Message, ToolCall
from verl_turnkey.plugins.gateway.models import Model, Script, Server, example, read_replies
from verl_turnkey.plugins.gateway.rehearsal import WHY, Rehearsal, codec_for, configuration, rehearse
from verl_turnkey.plugins.gateway.turns import Limits
from verl_turnkey.plugins.rollout.episode import Prompt

AGENTS = Path(__file__).with_name("agents_of_users.py")
SUM = {"question": "2 + 3", "answer": "5"}
FIVE = [Parsed("I add.", (ToolCall("add", {"a": 2, "b": 3}, ""),), "Simple."), Parsed("5")]


def play(function: str, model: Model, task: dict[str, Any] | None = None, **agent: Any) -> Rehearsal:
    settings = {"run": f"{AGENTS}:{function}", "in_process": True, **agent}
    config = configuration([override(f"turnkey.agent.{key}", value) for key, value in settings.items()])
    (episode,) = asyncio.run(rehearse(config, task or SUM, lambda: model))
    return episode


def test_an_agent_with_a_tool():
    episode = play("adder", Script(FIVE))
    assert (episode.failure, episode.success, episode.rows, episode.refused) == (None, True, 1, 0)
    assert episode.overruled == {"temperature": 2}
    first, second = episode.turns
    assert (first.messages, first.tools, first.after, first.broke, first.reward) == (1, 1, None, None, 0.0)
    assert (second.messages, second.after, second.new, second.broke, second.reward) == (3, 0, 1, None, 1.0)
    assert (first.reply, second.reply) == ('[["add", {"a": 2, "b": 3}]]', "5")
    again = play("adder", Script(FIVE))
    assert [turn.state for turn in again.turns] == [first.state, second.state]
    assert first.state != second.state
    other = play("adder", Script(FIVE), {**SUM, "question": "3 + 2"}, state="call")
    assert other.turns[1].state == play("adder", Script(FIVE), state="call").turns[1].state


def test_the_built_in_script_calls_the_first_tool_and_answers():
    episode = play("adder", Script())
    assert [turn.reply for turn in episode.turns] == ['[["add", {"a": 1.0, "b": 1.0}]]', "ok"]
    assert (episode.failure, episode.success, episode.turns[1].reward) == (None, False, 0.0)


def test_rows_and_why_they_begin():
    episode = play("rewriting", Script([Parsed(text) for text in "vwxyz"]))
    assert [turn.broke for turn in episode.turns] == [None, None, "branch", "history", "branch"]
    assert [turn.after for turn in episode.turns] == [None, 0, 0, None, None]
    assert [turn.trained for turn in episode.turns] == [True, True, True, True, False]
    assert (episode.rows, episode.success) == (3, True)
    assert {turn.broke for turn in episode.turns} - {None} <= set(WHY)
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 0.0, 0.5, None]


def test_what_the_policy_cannot_give_is_refused_or_ignored():
    episode = play("demanding", Script())
    assert (len(episode.turns), episode.refused) == (1, 1)
    assert "n=2 is not supported" in (episode.last_refusal or "")
    assert "n=2 is not supported" in (episode.failure or "")
    ignoring = play("demanding", Script(), unsupported="ignore")
    assert (ignoring.failure, ignoring.overruled, ignoring.refused) == (None, {"n": 1}, 0)


def test_an_agent_that_asks_nothing():
    episode = play("idle", Script())
    assert (episode.turns, episode.rows) == ([], 0)
    assert "the agent made no request" in (episode.failure or "")


def test_a_server_as_the_model():
    answers = [
        {
            "content": None,
            "reasoning_content": "Simple.",
            "tool_calls": [{"id": "x", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}],
        },
        {"content": "5"},
    ]

    def chat(_: dict[str, Any]) -> dict[str, Any]:
        return {"choices": [{"message": answers.pop(0)}]}

    with serve({"/v1/chat/completions": chat}) as (url, requests):
        episode = play("adder", Server(f"{url}/v1", "theirs"))
    assert (episode.failure, episode.success, episode.rows) == (None, True, 1)
    (_, first), (_, second) = requests
    assert (first["model"], first["tools"], first["messages"]) == (
        "theirs", [ADD], [{"role": "user", "content": "2 + 3"}],
    )  # fmt: skip
    _, called, result = second["messages"]
    assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert result == {"role": "tool", "content": "5", "tool_call_id": called["tool_calls"][0]["id"]}
    assert "temperature" not in first


def test_the_command_prints_the_episode(tmp_path: Path):
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps([{"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}, "5"]))
    task = tmp_path / "task.json"
    task.write_text(json.dumps(SUM))
    words = ["agent", f"{AGENTS}:adder", "turnkey.agent.in_process=true", "--task", str(task)]
    done = CliRunner().invoke(app, [*words, "--replies", str(replies)])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "turn 0  1 message, 1 tool"
    assert lines[3] == "turn 1  3 messages, 1 tool, 1 new after turn 0"
    counts = ["2 turns, 2 of them trained, in 1 row", "ignored: temperature, in 2 requests"]
    assert lines[6:9] == [*counts, "return 1, success True"]
    launch = lines[9].replace('"', "").replace("'", "")
    assert launch == f"on a launch line: turnkey.agent.run={AGENTS}:adder turnkey.agent.in_process=true"
    failed = CliRunner().invoke(app, ["agent", f"{AGENTS}:demanding", "turnkey.agent.in_process=true", "--json"])
    assert failed.exit_code == 1
    assert "n=2 is not supported" in json.loads(failed.stdout)["failure"]


GROUP = ["turnkey.agent.in_process=true", "--times", "3", "--at-once", "3"]


def group(function: str, *words: str, replies: Path | None = None, code: int = 0) -> list[str]:
    """What the command prints of three episodes."""
    further = [] if replies is None else ["--replies", str(replies)]
    done = CliRunner().invoke(
        app, ["agent", f"{AGENTS}:{function}", "--task", json.dumps(SUM), *GROUP, *further, *words]
    )
    assert done.exit_code == code, done.output
    return done.stdout.splitlines()


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted replies take so long that of two calls at once the second begins before the first one's reply."""
    monkeypatch.setattr("verl_turnkey.plugins.gateway.rehearsal.SECONDS", (0.8, 1.0))


def test_episodes_of_a_task_and_the_credit_of_the_worst(overlapping):
    lines = group("forking", "turnkey.credit.norm=mean", "turnkey.credit.step_advantage_w=0")
    assert lines[:2] == [
        "3 episodes, 0 failed, 2 solved",
        "3 episodes: new row, prefix: calls of one conversation overlapped, so each has its own row",
    ]
    assert lines[2] == "3 episodes: some turns got no reward of their own (turns 0 and 3 of episode 0); intended?"
    assert not any("outcomes are equal" in line or "summed" in line for line in lines)
    at = next(n for n, line in enumerate(lines) if line.startswith("the worst"))
    assert re.fullmatch(r"the worst, episode \d: return 0.5, credit by gigpo", lines[at])
    # Returns of 0.5, 1.5, 1.5: the worst is 2/3 below their mean.
    assert [line.partition("  ok")[0] for line in lines[at + 1 : at + 5]] == [
        "turn 0  reward 0, credit -0.667",
        *[f"turn {n}  after turn 0, reward 0.25, credit -0.667" for n in (1, 2)],
        "turn 3  after turn 2, reward 0, credit -0.667",
    ]


def test_a_method_that_would_stop_the_run():
    lines = group("forking", "+turnkey=loo_td", code=1)
    error = "loo_td follows one conversation per episode, but the {}'s calls ran in parallel or branched (episode_0)"
    assert f"training would stop: {error.format('episode')}: choose another method" in lines
    assert not any("credit by" in line or "on a launch line" in line for line in lines)
    roles = json.dumps(SUM | {"roles": ["planner", "worker"]})
    lines = group("delegating", "+turnkey=loo_td", "--task", roles, code=1)
    assert f"training would stop: {error.format('worker')}: choose another method" in lines
    lines = group("adder", "+turnkey=hae", code=1)
    assert any("training would stop: estimator 'hae' needs the column 'extra.switch'" in line for line in lines)
    task = {"at_once": True, "roles": ["a"], "returns": {"reward": 1.0, "extra": {"switch": 1}}}
    lines = group("several", "+turnkey=hae", "--task", json.dumps(task), code=1)
    assert f"training would stop: {error.replace('loo_td', 'hae').format('episode')}: choose another method" in lines
    lines = group("chat", "+turnkey=hae", "--task", json.dumps({"extra": {"switch": 1}}))
    columns = "extra.value_low, extra.value_high, extra.value_term"
    assert f"3 episodes: no credit: hae needs {columns}, which only training has" in lines
    assert not any("credit by" in line or ", credit" in line for line in lines)
    lines = group("chat", "+turnkey=turn_gae")
    assert "3 episodes: no credit: turn_gae needs value, which only training has" in lines


def test_episodes_that_start_in_the_same_state(tmp_path: Path):
    """Also if the first reply is masked in some of them; one that comes with its number does not."""
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps(["one", "two", "three"]))
    words = ["turnkey.agent.discarded=mask"]
    lines = group("drafting", *words, replies=replies)
    assert not any("different states" in line for line in lines)
    task = json.dumps(SUM | {"dated": True})
    why = "the episodes start in 3 different states: look for a date or a folder in the first prompt"
    assert why in group("drafting", *words, "--task", task, replies=replies)
    further = [GROUP[0], *words, "--task", json.dumps(SUM), "--replies", str(replies)]
    lines = CliRunner().invoke(app, ["agent", f"{AGENTS}:drafting", *further]).stdout.splitlines()
    place = next(line for line in lines if line.startswith("turn 1"))
    assert re.fullmatch(r"turn 1  1 message, 0 tools, a new row \((branch|prefix)\)", place)  # whether they overlapped
    assert [line.strip() for line in lines if "not trained" in line] == ["not trained: its reply was not used"]


def test_the_turn_that_a_turn_follows():
    """A worker follows the plan that started it, unless it has a role of its own. Its reward is one of several sums."""
    words = ["turnkey.credit.norm=mean", "turnkey.credit.step_advantage_w=0"]
    for roles, counts, total in (
        (["", ""], (1, 3), "return 1.2 to 1.2; 18 turns"),
        (["planner", "worker"], (3, 1), "return 2.2 to 2.2 (summed over roles); 18 turns"),
    ):
        lines = group("delegating", *words, "--task", json.dumps(SUM | {"roles": roles}))
        assert any(line.startswith(total) for line in lines)
        assert "all outcomes are equal, so every credit is 0: vary the reward to see credit" in lines
        after = [re.search(r"after turn (\d)", line) for line in lines if line.startswith("turn ")]
        numbers = [match and int(match[1]) for match in after]
        assert (numbers[0], numbers[-1], numbers.count(None), numbers.count(0)) == (None, 0, *counts)
    task = json.dumps(SUM | {"roles": ["planner", "worker"]})
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:delegating", GROUP[0], "--task", task])
    assert "return 2.2 (summed over roles), success True" in done.stdout.splitlines()
    assert re.search(r"^turns 0, .* and 5 got no reward of their own; intended\?$", done.stdout, re.MULTILINE)


OWN = """
def scaled(steps):
    scale = steps[-1].row["extra_info"]["scale"]
    return [scale * step.reward for step in steps]

CALLS = []

def second_time(steps):  # fails in one episode of two
    CALLS.append(steps)
    return [0.0 for step in steps if len(CALLS) % 2 or step.row["extra_info"]]

def broken(steps):
    return [step.reward / steps[0].row.get("scale", 0) for step in steps]

def bug(steps):
    return [1 / 0]

def ends(steps):
    return [0.0] * (len(steps) - 1) + [-float(steps[-1].reward)]

def better(first, second):
    return [sum(step.reward for step in steps) for steps in (first, second)]
"""


def test_credit_is_of_the_composed_reward(tmp_path: Path):
    """Components that lack a field of the data row are left out, by name; a task may have those that agents get."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = ["turnkey.credit.norm=mean", "turnkey.credit.step_advantage_w=0"]
    rewards = f"turnkey.rewards=[{{name: step}}, {{name: '{own}:scaled', weight: 2}}]"
    task = json.dumps(SUM | {"extra_info": {"scale": 0.5}})
    lines = group("forking", *words, rewards, "--task", task)
    at = next(n for n, line in enumerate(lines) if line.startswith("the worst"))
    assert [line.partition("  ok")[0] for line in lines[at + 1 : at + 3]] == [
        "turn 0  reward 0, credit -1.33",
        "turn 1  after turn 0, reward 0.25, composed 0.5, credit -1.33",
    ]
    assert re.fullmatch(r"the worst, episode \d: return 0.5, composed 1, credit by gigpo", lines[at])
    assert not any("without the component" in line for line in lines)
    lines = group("forking", *words, rewards)
    assert (
        "3 episodes: rewards and credit are without the component scaled: turnkey.rewards[1] (scaled) failed: "
        "KeyError: 'extra_info'; a rehearsal sees only the task, not the whole data row"
    ) in lines
    at = next(n for n, line in enumerate(lines) if line.startswith("the worst"))
    assert lines[at + 2].startswith("turn 1  after turn 0, reward 0.25, credit -0.667  ok")


def test_only_the_component_that_lacks_a_field_is_left_out(tmp_path: Path):
    """The credit along parallel conversations, and a column that the agent gives itself, are as without it."""
    own = tmp_path / "own.py"
    own.write_text(OWN)
    words = ["turnkey.credit.norm=mean", "turnkey.credit.step_advantage_w=0"]
    credits: list[list[str]] = []
    for others in ("", f", {{name: '{own}:second_time'}}, {{name: answer}}"):
        lines = group("forking", *words, f"turnkey.rewards=[{{name: step, weight: 10}}{others}]")
        at = next(n for n, line in enumerate(lines) if line.startswith("the worst"))
        credits.append([line.partition("  ok")[0] for line in lines[at + 1 : at + 5]])
    assert credits[0] == credits[1]
    assert credits[0][1].endswith("reward 0.25, composed 2.5, credit -6.67")
    labels = [re.search(r"without the component (\w+): ", line) for line in lines]
    assert [label[1] for label in labels if label] == ["answer", "second_time"]
    rewards = f"turnkey.rewards=[{{name: step}}, {{name: '{own}:scaled', column: turn_score}}]"
    task = json.dumps({"extra": {"turn_score": 0.5}})
    lines = group("chat", "+turnkey=step_episode", rewards, "--task", task)
    assert any("without the component scaled" in line for line in lines)
    assert any("credit by step_episode" in line for line in lines)


def test_rewards_that_would_fail_in_training(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    for function, error in {
        "bug": "turnkey.rewards[1] (bug) failed: ZeroDivisionError: division by zero",
        "ends, column: turn_score": "the environment gives info['extra']['turn_score'] itself",
    }.items():
        name, _, column = function.partition(",")
        rewards = f"turnkey.rewards=[{{name: answer}}, {{name: '{own}:{name}'{f',{column}' * bool(column)}}}]"
        task = json.dumps({"extra": {"turn_score": 0.5}, "reward_model": {"ground_truth": "ok"}})
        lines = group("chat", rewards, "--task", task, code=1)
        assert lines[0] == "3 episodes, 3 failed, 0 solved"
        assert lines[1].startswith(f"failed, 3 episodes: {error}")
        assert lines[1].endswith("; in training, the episode would fail likewise")
        assert "sees only the task" not in "\n".join(lines)
    lines = group("chat", f"turnkey.rewards=[{{name: '{own}:broken'}}]")
    assert any("(broken) failed: ZeroDivisionError" in line and "sees only the task" in line for line in lines)


def test_the_worst_episode_is_of_the_composed_reward(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    rewards = f"turnkey.rewards=[{{name: '{own}:ends'}}]"
    lines = group("forking", rewards)
    assert any(re.match("return 0.5 to 1.5, composed -1 to 0; 12 turns", line) for line in lines)
    assert any(re.match(r"the worst, episode \d: return 1.5, composed -1, credit", line) for line in lines)
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:chat", rewards, "turnkey.agent.in_process=true"])
    assert "return 1.25, composed -1, success True" in done.stdout.splitlines()


def test_tokens_are_counted_by_a_tokenizer_alone():
    path = real_tokenizers.tokenizer("qwen3").name_or_path
    words = ["turnkey.rewards=[{name: step}, {name: length, weight: -0.5, label: long}]"]
    why = "tokens are counted only if actor_rollout_ref.model.path names a model"
    assert f"3 episodes: rewards and credit are without the component long: {why}" in group("chat", *words)
    for further in ([f"actor_rollout_ref.model.path={path}"], [words[0].replace("label", "unit: turns, label")]):
        lines = group("chat", *words, *further)
        assert not any(why in line for line in lines)
        assert any(line.startswith("return 1.25 to 1.25, composed ") for line in lines)


def test_episodes_are_compared_as_in_training(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(OWN)
    run = [override("turnkey.agent.run", f"{AGENTS}:forking"), "turnkey.agent.in_process=true"]
    config = configuration([*run, f"turnkey.rewards=[{{name: arena, compare: '{own}:better'}}]"])
    for times, places in ((1, [0.0]), (3, [0.0, 0.5, 1.0])):
        episodes = asyncio.run(rehearse(config, SUM, Script, times))
        assert sorted(episode.turns[-1].composed_reward or 0.0 for episode in episodes) == places


def test_numbers_of_turns_that_shift_fail_their_episodes(overlapping):
    lines = group("numbering", code=1)
    assert lines[0] == "3 episodes, 3 failed, 0 solved"
    assert "a reward of a turn by its number, but calls of the episode ran at the same time" in lines[1]
    assert "a state for the next turn, but calls of the episode ran at the same time" in group("steering", code=1)[1]


def test_ids_and_states_that_an_agent_loses():
    lines = group("renaming")
    assert [line for line in lines if line.startswith("3 episodes: ")] == [
        "3 episodes: calls came back under other ids: send those of the reply, or equal calls cannot be told apart",
        "3 episodes: a state was posted after the last request: it belongs to no turn",
        "3 episodes: new row, history: its messages do not begin with an earlier request and the reply to it",
    ]
    assert "differs from the turn before at message 0, user: '2 + 3b', was user: '2 + 3'" in "\n".join(lines)


def test_a_client_that_is_kept_for_the_next_episode():
    words = ["--task", '{"keeps": "client", "mixes": true}', "--times", "2"]
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:keeps", *words])
    assert done.exit_code == 1
    assert "calls through a client of an earlier episode: make the client in the function" in done.stdout
    assert "1 episode: requests came after its end: a client was kept for a later episode" in done.stdout


def test_the_models_own_tokenizer_template_and_parser(tmp_path: Path):
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps([{"text": "I add.", "calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}, "5"]))
    path = real_tokenizers.tokenizer("qwen3").name_or_path
    lines = group("adder", f"actor_rollout_ref.model.path={path}", "+turnkey=grpo_steps", replies=replies)
    assert lines[0] == "3 episodes, 0 failed, 3 solved"
    assert "return 1 to 1; 6 turns in 3 rows" in lines
    tree = lines[lines.index("the worst, episode 0: return 1, credit by grpo_steps") + 1 :]
    assert tree[:2] == [
        'turn 0  reward 0, credit 0  [["add", {"a": 2, "b": 3}]]',
        "turn 1  after turn 0, reward 1, credit 0  5",
    ]
    assert tree[2].endswith(f"turnkey.agent.in_process=true actor_rollout_ref.model.path={path} +turnkey=grpo_steps")


def test_a_file_without_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def one(x): ...\nasync def play(task, agent): ...\ndef _two(task, agent): ...\n")
    Path("broken.py").write_text("def play(:")
    for file, advice in {
        "own.py": "write own.py:play",
        "broken.py": "has no function that takes (task, agent): write broken.py:FUNCTION",
        "no.py": "and there is no such file: write no.py:FUNCTION",
    }.items():
        done = CliRunner().invoke(app, ["agent", file])
        assert advice in str(done.exception)


def test_requests_for_another_model_are_counted():
    with other_model() as served:
        models = f"turnkey.agent.models={{judge:{{url:'{served.url}'}}}}"
        done = CliRunner().invoke(app, ["agent", f"{AGENTS}:judged", models, "turnkey.agent.in_process=true"])
    assert done.exit_code == 0, done.output
    assert "answered by the model judge: 1 request\n" in done.output


def test_the_command_prints_who_takes_a_turn():
    example = str(Path(__file__).parents[4] / "examples" / "agents" / "planner_and_executor.py:play")
    done = CliRunner().invoke(app, ["agent", example, "--task", '{"numbers": [2, 3]}', "turnkey.agent.in_process=true"])
    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("turn ")] == [
        "turn 0  planner, 1 message, 0 tools",
        "turn 1  executor, 1 message, 0 tools, a new row (history)",
        "turn 2  planner, 3 messages, 0 tools, 1 new after turn 0",
        "turn 3  executor, 3 messages, 0 tools, 1 new after turn 1",
    ]


def test_images_are_shown_by_their_size_and_sent_to_a_server():
    with serve({"/v1/chat/completions": lambda _: {"choices": [{"message": {"content": "Red."}}]}}) as (url, requests):
        model = ["--model", f"{url}/v1", "--model-name", "theirs"]
        done = CliRunner().invoke(app, ["agent", f"{AGENTS}:looking", "turnkey.agent.in_process=true", *model])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "turn 0  1 message, 0 tools, 2 x [image 64x48]"
    at = next(n for n, line in enumerate(lines) if line.startswith("turn 1"))
    pictures = "[image 64x48] [image 64x48]"
    assert lines[at : at + 2] == [
        "turn 1  1 message, 0 tools, 2 x [image 64x48], a new row (history)",
        f"        differs from the turn before at message 0, user: {pictures}, was user: {pictures} with other content",
    ]
    for (_, request), red in zip(requests, (0, 255), strict=True):
        first, second, text = request["messages"][0]["content"]
        assert (first, text) == (second, {"type": "text", "text": "Look."})
        data = first["image_url"]["url"].removeprefix("data:image/png;base64,")
        image = Image.open(io.BytesIO(base64.b64decode(data)))
        assert (image.size, image.getpixel((0, 0))) == ((64, 48), (red, 0, 0))


def test_images_are_tokenized_as_in_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    trained, seen, red = seeing(), [Image.new("RGB", (64, 48))] * 2, [Image.new("RGB", (64, 48), "red")] * 2
    trained.tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    monkeypatch.setattr("verl.utils.hf_processor", lambda *_, **__: trained._builder.processor)
    words = ["turnkey.agent.in_process=true", f"actor_rollout_ref.model.path={tmp_path}"]
    messages, others = ([Message("user", "Look.", images=tuple(images))] for images in (seen, red))
    codec = codec_for(configuration([*words, "turnkey.agent.run=a:b"]))
    ids = codec.first(messages, (), seen)
    assert ids == trained.first(messages, (), seen) == codec.first(others, (), red)
    assert codec.contents(Prompt(ids, seen)) == (messages, ()), "the stand-in sees the images of its own prompt"
    assert ids.count(trained.tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 2 * 4
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:looking", *words])
    assert done.exit_code == 0, done.output
    assert "turn 0  1 message, 0 tools, 2 x [image 64x48]\n        reply  ok\n" in done.stdout


def test_output_for_scripts_is_json_alone():
    """In a process of its own: what loads verl says which keys it was given, and agents print."""
    words = [f"{AGENTS}:raises", "turnkey.agent.in_process=true", "turnkey.agent.state=call", "--json"]
    done = subprocess.run([sys.executable, "-m", "verl_turnkey", "agent", *words], capture_output=True, text=True)
    assert done.returncode == 1
    episode = json.loads(done.stdout)
    assert "ValueError: I give up at http://127.0.0.1:" in episode["failure"]
    assert "/***/v1" in episode["failure"]
    assert "the agent prints" in done.stderr


def test_turns_of_an_episode_that_failed_are_no_side_calls():
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:raises", "turnkey.agent.in_process=true"])
    why = [line.strip() for line in done.stdout.splitlines() if "not trained" in line]
    assert why == [*["not trained: the episode failed"] * 7, "not trained: a side call (model 'small', 0 tools)"]


def test_a_service_as_the_agent():
    def run(episode: dict[str, Any]) -> Any:
        body = {"model": episode["model"], "messages": [{"role": "user", "content": str(episode["task"])}]}
        return post_json(f"{episode['base_url']}/chat/completions", body, timeout=30, key="") and 0.5

    with serve({"/run": run}) as (url, _):
        done = CliRunner().invoke(app, ["agent", f"{url}/run", "--task", '{"q": 1}'])
    assert done.exit_code == 0, done.output
    assert "return 0.5, success" in done.stdout
    assert f'turnkey.agent.run="{url}/run"' in done.stdout


def test_a_thread_that_is_left_running_is_named():
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:leaves_a_thread"])
    assert "a process for each episode: the agent leaves the thread 'asker' running" in done.stdout


def test_a_function_in_a_sandbox_as_the_agent():
    words = ["turnkey.agent.sandbox=bwrap", "turnkey.agent.memory_gb=2", "--task", json.dumps(SUM), "--json"]
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:adder", *words])
    assert done.exit_code == 0, done.output
    episode = json.loads(done.stdout)
    assert [turn["reply"] for turn in episode["turns"]] == ['[["add", {"a": 1.0, "b": 1.0}]]', "ok"]


def test_a_command_as_the_agent(tmp_path: Path):
    """In a process of its own, which gets the address in its environment."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, openai\n"
        "reply = openai.OpenAI().chat.completions.create(\n"
        "    model='policy', messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
        "sys.exit(reply.choices[0].message.content != 'ok')\n"
    )
    words = ["turnkey.agent.sandbox=none", "turnkey.agent.reward=exit_code", "--task", '{"instruction": "Say ok."}']
    done = CliRunner().invoke(app, ["agent", f"{sys.executable} {script} {{instruction}}", *words, "--json"])
    assert done.exit_code == 0, done.output
    episode = json.loads(done.stdout)
    assert [turn["reply"] for turn in episode["turns"]] == ["ok"]
    assert episode["turns"][0]["reward"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["turnkey.agent.stat=call"], "turnkey.agent.stat: unknown key; did you mean 'state'?"),
        (["actor_rollout_ref.model.path=/nowhere"], "actor_rollout_ref.model.path: no tokenizer in '/nowhere'"),
        (["--model", "http://127.0.0.1:1/v1", "--replies", "x.json"], "--replies goes with --model scripted"),
        (["turnkey.agent.state=cal"], "workspace or module:function, got 'cal'; did you mean 'call'?"),
        (["--task", "[1]"], "--task must be a JSON object"),
        (["--model", "gpt-4"], "--model: expected scripted, or the URL of a server such as http://host:8000/v1, got"),
        (
            ["turnkey.agent.in_process=true", "turnkey.agent.processes=9"],
            "turnkey.agent.processes=9 has no effect on an",
        ),
        (["turnkey.agent.sandbox=docker"], "turnkey.agent.sandbox=docker is for commands; a function runs in this"),
    ],
)
def test_what_the_command_refuses(words: list[str], message: str):
    done = CliRunner().invoke(app, ["agent", f"{AGENTS}:adder", *words])
    assert done.exit_code != 0
    assert message in " ".join(f"{done.output} {done.exception}".replace("│", "").split())


def test_replies_of_a_file(tmp_path: Path):
    file = tmp_path / "replies.yaml"
    file.write_text("- Hello.\n- {text: So, reasoning: Hm., calls: [{name: add, arguments: {a: 1}}, {name: add}]}\n")
    assert read_replies(file) == [
        Parsed("Hello."),
        Parsed("So", (ToolCall("add", {"a": 1}, ""), ToolCall("add", {}, "")), "Hm."),
    ]
    for text, words in {"a: 1": "expected a list", "- 3": "reply 0: expected text", "- {calls: [add]}": "calls of name",
                        "- {txt: a}": "reply 0: expected text", "[": "neither JSON nor YAML"}.items():  # fmt: skip
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_replies(file)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (ADD["function"]["parameters"], {"a": 1.0, "b": 1.0}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
        ({"type": ["string", "null"]}, "example"),
        ({"enum": ["x", "y"]}, "x"),
        ({"const": 3}, 3),
        ({"type": "boolean", "default": False}, False),
        ({"properties": {"a": {"type": "array"}, "b": {}}, "required": ["a", "b"]}, {"a": [], "b": "example"}),
        ({}, "example"),
    ],
)
def test_arguments_that_a_schema_takes(schema: dict[str, Any], value: Any):
    assert example(schema) == value


# --- recorded agents --------------------------------------------------------------------------------------------------

# Recorded requests of published agents, sent again to a gateway with a real tokenizer: the rows that training gets.
#
# ``tests/contract/envs/agents/record_agents.py NAME`` records an agent again.

EPISODE = "episode0"
"""what the records have in the place of an episode's tag"""
# agent -> why its rows begin, parameter -> requests in which it is ignored
EXPECTED: dict[str, tuple[list[str], dict[str, int]]] = {
    "aider": (["first", "history", "history"], {"temperature": 4}),
    "codex": (["first"], {"tools/namespace": 3, "tools/web_search": 3}),
    "langgraph": (["first"], {"temperature": 3}),
    "mini_swe": (["first", "branch"], {}),
    "openai_agents": (["first"], {"strict": 3}),
    "openai_agents_chat": (["first"], {"strict": 3}),
    "opencode": (["first"], {}),
    "pi": (["first"], {}),
    "pydantic_ai": (["first"], {"strict": 3}),
    "qwen_code": (["first"], {}),
    "smolagents": (["first", "history", "history"], {"tool_choice": 3}),
}


def written(reply: dict[str, Any]) -> str:
    """A recorded reply as Qwen writes it."""
    thoughts = f"<think>\n{reply['reasoning'].strip()}\n</think>\n\n" if reply["reasoning"] else ""
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments, _ in reply["calls"]]
    return thoughts + reply["text"] + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


def replay(lines: list[dict[str, Any]], **limits: Any) -> Played:
    """An episode with recorded requests and replies."""

    async def agent(url: str) -> None:
        async with httpx.AsyncClient() as client:
            for line in lines:
                answer = await client.post(url + line["path"], json=line["body"], timeout=60)
                assert answer.status_code == 200, answer.text

    turns = [written(line["reply"]) for line in lines]
    return run(agent, turns, limits=Limits(room=40_000, turn=2_000, **limits), tag=EPISODE)


def steps(played: Played) -> list[int]:
    """The steps of all rows."""
    return [step["step"] for step in played.steps]


SIDE_CALLS = {"opencode": [{"no_tools": True}]}
"""``leave_out`` of its recipe"""


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_rows_of_a_recorded_agent(name: str, expected: tuple[list[str], dict[str, int]]) -> None:
    """``run`` also checks that each prompt is the head of a row, and that each sampled id is under exactly one mask."""
    lines = recorded(name)
    played = replay(lines, leave_out=SIDE_CALLS.get(name, ()))
    overruled = Counter(key for turn in played.session.turns for key in turn.request.overruled)
    assert (played.breaks, dict(overruled)) == expected
    assert sorted(steps(played)) == [*range(sum(line["trained"] for line in lines))]


def test_a_commit_message_of_the_policys_own_name_is_left_out_by_a_rule() -> None:
    """aider without ``--weak-model`` asks the policy for it, and none of its requests has tools."""
    lines = recorded("aider")
    lines = [{**line, "body": line["body"] | {"model": "policy"}} for line in lines]
    assert sorted(steps(replay(lines))) == [0, 1, 2, 3]
    assert sorted(steps(replay(lines, leave_out=[{"system": "Git commit messages"}]))) == [0, 1, 2]


def test_every_recorded_agent_is_replayed() -> None:
    assert {path.stem for path in DATA.glob("*.jsonl")} == {*EXPECTED}
