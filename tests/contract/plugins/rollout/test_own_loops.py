"""The agent loops of the page on records and of examples/loops, as a user copies them; only the model is a script."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract_tools import Compose
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, DictConfigWrap, ToolListWrap
from verl.tools.function_tool import FUNCTION_TOOL_REGISTRY, function_tool, get_function_tool
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.advantage import validate_record
from verl_turnkey.loops import EpisodeRecorder, drain_log
from verl_turnkey.plugins.rollout import worker as loop_worker
from verl_turnkey.plugins.view.reading import read

MODULES = {"GuessLoop": "my_loop", "GuessTalk": "my_talk", "RecordedTools": "my_tools"}
ROOT = Path(__file__).parents[4]
GRPO_STEPS = ("+turnkey=grpo_steps",)


UNPARSED = {"unparsed_rate": 1 / 3}
DIES = "(dies)"
"""in the place of a turn"""


class Script:
    """The client of the language model server: says one text after the other."""

    def __init__(self, tokenizer: Any, turns: list[str]) -> None:
        self.tokenizer, self.turns = tokenizer, turns
        self.prompts: list[list[int]] = []

    async def generate(self, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        self.prompts.append(list(prompt_ids))
        turn = len(self.prompts)
        if self.turns[turn - 1] == DIES:
            raise TimeoutError("the server is gone")
        ids = [*self.tokenizer.encode(self.turns[turn - 1]), self.tokenizer.eos_token_id]
        versions = {"min_global_steps": turn, "max_global_steps": turn}
        return TokenOutput(token_ids=ids, log_probs=[-float(turn)] * len(ids), extra_fields=versions)


Play = Callable[..., tuple[list[AgentLoopOutput], Script]]


@pytest.fixture
def play(compose: Compose, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    """``play(name, turns, response_length)``: the rows of an episode that looks for 8, and the script."""
    for module in MODULES.values():
        (tmp_path / f"{module}.py").write_text((ROOT / f"examples/loops/{module}.py").read_text(encoding="utf-8"))
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    for variable in ("_process", "keep_texts", "before"):  # as in a new worker process
        monkeypatch.setattr(loop_worker, variable, None if variable == "_process" else getattr(loop_worker, variable))

    def run(
        name: str, turns: list[str], response_length: int = 200, line: tuple[str, ...] = GRPO_STEPS, **options: Any
    ) -> tuple[list[AgentLoopOutput], Script]:
        config = compose(*line, f"data.max_response_length={response_length}")
        script = Script(tokenizer, turns)
        row = {"extra_info": {"index": 7}, "uid": "u", "session_id": 0, "global_steps": 3}
        row["raw_prompt"] = [{"role": "user", "content": "Walk 6 steps."}]

        async def episode() -> list[AgentLoopOutput]:
            loop = getattr(importlib.import_module(MODULES[name]), name)(
                trainer_config=DictConfigWrap(config=config),
                server_manager=script,
                tokenizer=tokenizer,
                processor=None,
                hf_model_type="qwen3",
                dataset_cls=RLHFDataset,
                data_config=DictConfigWrap(config.data),
                **options,
            )
            outputs = await loop.run({"temperature": 1.0}, **row)
            return outputs if isinstance(outputs, list) else [outputs]

        outputs = asyncio.run(episode())
        for i, output in enumerate(outputs):
            validate_record(output.extra_fields["turnkey"], f"row {i}")
        return outputs, script

    return run


def steps(outputs: list[AgentLoopOutput]) -> list[dict[str, Any]]:
    return [step for output in outputs for step in output.extra_fields["turnkey"]["steps"]]


def test_the_first_has_a_row_for_each_step(play: Play) -> None:
    outputs, script = play("GuessLoop", ["5", "five", "8"])
    assert [output.prompt_ids for output in outputs] == script.prompts
    records = steps(outputs)
    assert [(step["action"], step["reward"], step["success"]) for step in records] == [
        ("5", 0.0, True),
        (None, 0.0, True),
        ("8", 1.0, True),
    ]


def test_the_second_has_one_row(play: Play, tokenizer: Any) -> None:
    outputs, script = play("GuessTalk", ["5", "five", "8"])
    (row,) = outputs
    assert row.prompt_ids == script.prompts[0]
    assert row.prompt_ids + row.response_ids[: -len("8") - 1] == script.prompts[-1]
    own = [i for i, trained in zip(row.response_ids, row.response_mask, strict=True) if trained]
    assert tokenizer.decode(own, skip_special_tokens=True) == "5five8"
    whole = tokenizer.decode(row.prompt_ids + row.response_ids)
    assert whole.count("<|im_start|>") == 6
    assert "Higher.<|im_end|>" in whole
    assert {p for p, trained in zip(row.response_logprobs, row.response_mask, strict=True) if not trained} == {0.0}
    assert [(step["action"], step["version"], step["success"]) for step in steps(outputs)] == [
        ("5", 1, True),
        (None, 2, True),
        ("8", 3, True),
    ]
    assert (row.extra_fields["min_global_steps"], row.extra_fields["max_global_steps"]) == (1, 3)
    info = row.extra_fields["reward_extra_info"]
    assert info == {"acc": 1, "failed": 0, "env_return": 1, "episode_length": 3, "invalid_rate": 1 / 3, **UNPARSED}


def test_a_conversation_that_outgrows_the_budget_goes_on_in_another_row(play: Play) -> None:
    outputs, script = play("GuessTalk", ["5", "five", "9", "7", "6", "1"], response_length=130)
    assert [output.extra_fields["turnkey_break"] for output in outputs] == ["first", "budget"]
    assert all(len(output.response_ids) <= 130 for output in outputs)
    assert outputs[1].prompt_ids in script.prompts
    assert steps(outputs)[-1]["truncated"]


def test_a_failed_episode_has_one_masked_row_with_the_fields_of_all_others(play: Play) -> None:
    played, _ = play("GuessLoop", ["8"])
    (row,), _ = play("GuessLoop", ["5", DIES])
    assert row.extra_fields["turnkey"] == {"version": 3, "failed": "TimeoutError('the server is gone')", "steps": []}
    assert (row.response_mask, row.reward_score) == ([0], 0.0)
    assert row.as_dict().keys() == played[0].as_dict().keys()
    assert row.extra_fields.keys() >= {"reward_extra_info", "min_global_steps", "max_global_steps", "turnkey_break"}
    info, of_played = (output.extra_fields["reward_extra_info"] for output in (row, played[0]))
    assert (info["failed"], info.keys()) == (1.0, of_played.keys())


def test_the_episodes_of_a_users_loop_are_in_the_tables_of_the_log(play: Play, tmp_path: Path) -> None:
    log = ("+turnkey=grpo_steps", f"turnkey.log.trajectories={tmp_path}/log")
    play("GuessTalk", ["5", "five", "8"], line=log)
    assert drain_log()
    (episode,) = read(tmp_path / "log", "episodes").to_dict("records")
    assert (episode["episode"], episode["success"], episode["turns"], episode["env_return"]) == ("u_0", True, 3, 1.0)
    assert (episode["weights_min"], episode["weights_max"], episode["composed_return"]) == (1, 3, 1.0)
    turns = read(tmp_path / "log", "turns").sort_values("turn")
    assert turns["action"].fillna("none").tolist() == ["5", "none", "8"]
    assert turns["anchor"].isna().all()
    assert list(zip(turns["row"], turns["turn_in_row"], strict=True)) == [(0, 0), (0, 1), (0, 2)]
    texts = read(tmp_path / "log", "texts").sort_values("turn")
    assert texts["response"].tolist() == ["5", "five", "8"]
    assert texts["observation"].tolist()[:2] == ["Higher.", "A number, please."]


def test_the_log_has_the_turns_before_a_failure(play: Play, tmp_path: Path) -> None:
    play("GuessLoop", ["5", DIES], line=("+turnkey=grpo_steps", f"turnkey.log.trajectories={tmp_path}/log"))
    assert drain_log()
    (episode,) = read(tmp_path / "log", "episodes").to_dict("records")
    assert (episode["failed_kind"], episode["turns"]) == ("TimeoutError", 1)
    assert read(tmp_path / "log", "turns")["anchor"].tolist() == ["8 1 20"]
    assert loop_worker.latest_failures(None) == ["TimeoutError('the server is gone')"]


@pytest.mark.parametrize("similarity", ["null", "0.9"])
def test_records_have_the_observation_if_the_method_compares_texts(play: Play, similarity: str) -> None:
    outputs, _ = play("GuessLoop", ["8"], line=("+turnkey=gigpo", f"++turnkey.credit.similarity={similarity}"))
    (step,) = steps(outputs)
    text = "Find the number between 1 and 20. Guess. Answer with a number."
    assert step["extra"] == ({} if similarity == "null" else {"text": text})


def test_an_episode_without_a_turn_is_no_success(compose: Compose, tokenizer: Any, monkeypatch) -> None:
    monkeypatch.setattr(loop_worker, "_process", None)
    episode = EpisodeRecorder(compose("+turnkey=grpo_steps"), tokenizer, {})
    with pytest.raises(ValueError, match="call failed"):
        episode.rows()


@pytest.fixture
def walk() -> Iterator[ToolListWrap]:
    """A tool of verl's that pays for each step."""

    @function_tool
    def walk(steps: int) -> tuple[str, float]:
        """Walk along the corridor.

        Args:
            steps: how many steps
        """
        return f"You walked {steps} steps.", steps / 6

    yield ToolListWrap([get_function_tool("walk")])
    del FUNCTION_TOOL_REGISTRY["walk"]


def test_verls_tool_loop_with_a_record(play: Play, tokenizer: Any, walk: ToolListWrap) -> None:
    def call(steps: int) -> str:
        return f'<tool_call>\n{{"name": "walk", "arguments": {{"steps": {steps}}}}}\n</tool_call>'

    (row,), script = play("RecordedTools", [call(2), call(4), "I am there."], 400, tools=walk)
    assert len(script.prompts) == 3
    record = steps([row])
    assert [step["reward"] for step in record] == pytest.approx([2 / 6, 4 / 6, 0.0])
    assert [step["action"] for step in record] == [
        '[["walk", "{\\"steps\\": 2}"]]',
        '[["walk", "{\\"steps\\": 4}"]]',
        None,
    ]
    assert [step["terminated"] for step in record] == [False, False, True]
    assert all(step["success"] for step in record)
    assert len({step["anchor"] for step in record}) == 3
    assert "You walked 2 steps." in record[1]["anchor"]
    assert row.reward_score == pytest.approx(1.0)
    turns = "".join(map(str, row.response_mask)).replace("0", " ").split()
    assert len(turns) == 3  # a run of ones for each step


def test_a_tool_loop_whose_turn_is_cut_has_a_step_for_each_run_of_ones(play: Play, walk: ToolListWrap) -> None:
    (row,), _ = play("RecordedTools", ["word " * 40], 20, tools=walk)
    assert [step["action"] for step in steps([row])] == [None]
    assert not steps([row])[0]["success"]
