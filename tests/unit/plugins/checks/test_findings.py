"""All findings at once, each with the id by which it can be ignored."""

import ast
import asyncio
import json
import re
import threading
import warnings
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from string import Formatter
from typing import Any
from unittest.mock import AsyncMock

import pandas as pd
import pytest
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.checks import findings, probe, resources
from verl_turnkey.plugins.checks.findings import Refusal, RuleWarning, collecting, grouped, id_of, refuse, warn
from verl_turnkey.plugins.checks.resources import check_log_folder
from verl_turnkey.plugins.checks.rules import check_ignored, rules
from verl_turnkey.plugins.checks.run import CheckedRun
from verl_turnkey.plugins.checks.update import check_migrated
from verl_turnkey.plugins.checks.values import check_ranges
from verl_turnkey.plugins.config import resolve
from verl_turnkey.plugins.config.checkpoint_files import TRACKER
from verl_turnkey.plugins.config.recipe_files import rule_texts
from verl_turnkey.plugins.config.schema import EnvConfig, RolloutConfig, TurnkeyConfig, turnkey_config
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.log.writer import write_segment

CHECKS = Path(findings.__file__).parent


def config(*ignored: str) -> DictConfig:
    return OmegaConf.create({"turnkey": {"ignore": list(ignored)}})


def first(value: int) -> int:
    if value < 0:
        refuse("no-tasks", key=value)
    return value


def second(value: int) -> None:
    if value < 0:
        refuse("mini-batches-episodes", number=value, episodes=3)


def broken() -> None:
    raise TypeError("of what was refused before")


def run(*checks: tuple[Any, ...]) -> list[Any]:
    """What the checks, each with its arguments, return."""
    with collecting(config()) as collected:
        return [collected.run(*check) for check in checks]


def test_one_refusal_is_raised_as_it_is() -> None:
    assert run((first, 3)) == [3]
    with pytest.raises(Refusal, match=r"data\.-1 contains no tasks") as caught:
        run((first, 3), (first, -1))
    assert caught.value.id == "no-tasks"


def test_all_refusals_are_in_one_error_with_their_ids() -> None:
    with pytest.raises(ConfigError) as caught:
        run((first, -1), (broken,), (second, -2))  # the second may only follow from what was refused
    assert str(caught.value).splitlines() == [
        "2 errors in this launch line:",
        "1. data.-1 contains no tasks: write some with `turnkey tasks` [no-tasks]",
        "2. turnkey.update.mini_batches=-2 for 3 episodes of an update (data.train_batch_size x "
        "actor_rollout_ref.rollout.n): lower it to 3 [mini-batches-episodes]",
    ]


def test_an_ignored_refusal_is_a_warning_and_the_check_goes_on() -> None:
    with pytest.warns(RuleWarning, match=r"ignored: data\.-1"), collecting(config("no-tasks")) as findings:
        assert findings.run(first, -1) == -1


def test_an_ignored_warning_is_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with collecting(config("verl-version")):
            warn("verl-version", warning="untested")
    with pytest.warns(RuleWarning, match="untested"), collecting(config()):
        warn("verl-version", warning="untested")


def test_warnings_of_one_rule_are_one() -> None:
    def of(*fields: tuple[str, str]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warn("verl-version", warning="untested")
            for setting, instead in fields:
                warn("key-without-effect", setting=setting, instead=instead)
        return grouped([warning.message for warning in caught])[1:]

    [text] = of(("a=1", "x"), ("b=2", "x"), ("b=2", "x"))
    assert (
        text
        == f"{rule_texts()['key-without-effect']['words'].format(setting='a=1, b=2', instead='x')} [key-without-effect]"
    )
    [text] = of(("a=1", "x"), ("b=2", "y"))
    assert [part.partition(" ")[0] for part in text.split("; ")] == ["a=1", "b=2"]
    assert text.count("[key-without-effect]") == 1


def test_a_check_that_cannot_go_on_after_what_was_ignored_says_so() -> None:
    with warnings.catch_warnings(record=True) as caught, collecting(config("no-tasks")) as findings:
        warnings.simplefilter("always")
        findings.run(first, -1)
        findings.run(broken)
    assert [warning.message.id for warning in caught] == ["no-tasks", "check-incomplete"]


@pytest.mark.parametrize("ignored", [(), ("no-tasks",)])
def test_an_error_of_a_check_itself_is_not_hidden(ignored: tuple[str, ...]) -> None:
    with pytest.raises(TypeError), collecting(config(*ignored)) as findings:
        findings.run(broken)


@pytest.mark.parametrize("ignored", ["data-file-empty", "critic-model-defaulted", "range:turnkey.credit.gamma"])
def test_what_cannot_be_ignored_says_so(ignored: str) -> None:
    with pytest.raises(ConfigError, match="cannot be ignored"):
        check_ignored(config(ignored))


@pytest.mark.parametrize(
    ("ignored", "suggestion"),
    [
        ("no-task", "no-tasks"),
        ("nonsense", "turnkey check --rules"),
        ("range:algorithm.gama", "range:algorithm.gamma"),
        ("range:trainer.nothing", "turnkey check --rules"),
    ],
)
def test_an_unknown_id_is_refused(ignored: str, suggestion: str) -> None:
    with pytest.raises(ConfigError, match=suggestion):
        check_ignored(config(ignored))


def test_what_can_be_ignored_is() -> None:
    line = config("no-tasks", "verl-version", "range:algorithm.gamma", "range:trainer.own")
    check_ignored(OmegaConf.merge(line, {"trainer": {"own": "text"}}))


def test_without_a_collection_a_refusal_is_raised_at_once() -> None:
    with pytest.raises(Refusal):
        first(-1)


CALLS = {"needs_our_trainer": {"mode"}, "needs_our_loop": {"loop"}, "needs_name": {"name", "choices"}}
CALLS |= {name: set[str]() for name in ["refuse", "warn", "refusal", "change", "rule_words", "needs_on", "needs_off"]}
"""functions with the id of a rule as the first argument, and the fields of its words that they fill in themselves"""


def test_each_rule_has_one_condition_which_gives_the_fields_of_its_words() -> None:
    ids = Counter[str]()
    for path in [*CHECKS.glob("*.py"), Path(resolve.__file__)]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = ast.unparse(node.func).removeprefix("run.")
            assert function not in ("warnings.warn", "ConfigError") or path.name == "findings.py"
            if function in CALLS and isinstance(node.args[0], ast.Constant):
                id = ast.literal_eval(node.args[0])
                ids[id] += 1
                fields = {field for _, field, _, _ in Formatter().parse(rule_texts()[id]["words"]) if field}
                values = {str(keyword.arg) for keyword in node.keywords} | CALLS[function]
                assert fields <= values, id
                assert values - CALLS[function] <= fields, id
    assert {*ids.values()} == {1}
    assert {*ids} == {id for id, texts in rule_texts().items() if "words" in texts}
    of_errors = {*findings.ID_BY_ERROR.values(), "unknown-turnkey-key"}
    assert {id for id, texts in rule_texts().items() if "words" not in texts} == of_errors
    assert {rule.level for rule in rules().values()} == {"error", "warning", "fatal", "notice"}


def test_a_rule_is_read_from_its_message() -> None:
    rule = rules()["bypass-without-log-probs"]
    assert rule.says.startswith("algorithm.rollout_correction.bypass_mode=true uses the rollout's log-probabilities")
    assert rule.fix == "set actor_rollout_ref.rollout.calculate_log_probs=true"
    assert rules()["allocation-filter-groups"].says.startswith("turnkey.groups.allocation=<allocation> needs the")
    assert rules()["unknown-kl-penalty"].fix == "write one that the message lists"
    assert rules()["range:algorithm.gamma"].fix == "expected a number, 0 or more, 1 at most, or null"
    assert all(rule.says for rule in rules().values())


def test_each_value_out_of_its_range_has_an_id_of_its_own() -> None:
    line = OmegaConf.create({"algorithm": {"gamma": 95, "lam": 7}, "turnkey": {"ignore": ["range:algorithm.lam"]}})
    with pytest.raises(Refusal, match=r"algorithm\.gamma=95") as caught, collecting(line), pytest.warns(match="lam=7"):
        check_ranges(line, use_critic=False)
    assert caught.value.id == "range:algorithm.gamma"


@pytest.mark.parametrize(
    ("error", "id"),
    [
        (ConfigError("turnkey.credit.gamma: expected a number in [0, 1], got 2"), "range:turnkey.credit.gamma"),
        (ConfigError("turnkey.rollout.histori: unknown key; did you mean 'history'?"), "unknown-turnkey-key"),
        (ConfigError("turnkey.credit.gama: gigpo has no such parameter"), "unknown-turnkey-key"),
        (TaskFormatError("no task"), "task-format"),
        (ConfigError("of no rule"), None),
    ],
)
def test_errors_of_others_have_ids(error: Exception, id: str | None) -> None:
    assert id_of(error) == id


def test_the_default_ignores_nothing() -> None:
    assert findings.ignored(OmegaConf.create({})) == frozenset()


WRITES = {"open_dict", "read_write", "OmegaConf.update", "OmegaConf.set_struct", "OmegaConf.set_readonly"}


def test_no_check_writes_to_the_configuration() -> None:
    """``config/resolve.py`` does; the launch lines of the contract tests run on a read-only configuration."""
    for path in CHECKS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in WRITES, f"{path}:{node.lineno}"
            for target in node.targets if isinstance(node, ast.Assign) else []:
                assert not ast.unparse(target).startswith("config."), f"{path}:{node.lineno}"


# --- Whose log a folder holds: another run's is refused, a second attempt of the same run is warned -------------------
NAMES = [f"2026010{day}T030405_00ff" for day in (2, 3)]


def run_with(tmp_path: Path, **trainer: str) -> DictConfig:
    own = {"project_name": "babyai", "experiment_name": "gigpo", "default_local_dir": str(tmp_path / "checkpoints")}
    log = {"trajectories": str(tmp_path / "log")}
    return OmegaConf.create({"trainer": {"resume_mode": "auto", **own, **trainer}, "turnkey": {"log": log}})


def log(tmp_path: Path, name: str = NAMES[0], **trainer: str) -> None:
    config = OmegaConf.to_container(run_with(tmp_path, **trainer))
    write_segment(tmp_path / "log", name, {"resumed_from": 0, "config": config})


def check(config: DictConfig) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_log_folder(CheckedRun(config, turnkey_config(config)))
    return [str(warning.message) for warning in caught]


def save(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / TRACKER).write_text("3")


def test_a_new_folder_and_no_log(tmp_path: Path):
    config = run_with(tmp_path)
    assert check(config) == []
    (tmp_path / "log").mkdir()
    assert check(config) == []
    log(tmp_path, experiment_name="salt")
    config.turnkey.log.trajectories = None
    assert check(config) == []


@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
@pytest.mark.parametrize("resumes", [True, False])
def test_the_log_of_another_run_is_refused(tmp_path: Path, key, resumes):
    log(tmp_path, **{key: "other"})
    if resumes:
        save(tmp_path)
    with pytest.raises(ConfigError, match=rf"trajectories=.*log holds .*trainer\.{key}=other, here .*another folder"):
        check(run_with(tmp_path))


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_run_that_begins_anew_is_warned_of_its_own_log(tmp_path: Path, mode):
    """As one that stopped before its first checkpoint; the latest start says whose log it is."""
    log(tmp_path, experiment_name="salt")
    log(tmp_path, NAMES[1])
    [warning] = check(run_with(tmp_path, resume_mode=mode))
    assert f"trajectories={tmp_path}/log" in warning
    assert f"starts over (trainer.resume_mode={mode})" in warning


def test_a_log_that_was_moved_or_copied_with_its_checkpoints_is_that_of_the_run(tmp_path: Path):
    there = tmp_path / "there"
    config = OmegaConf.to_container(run_with(there))
    write_segment(tmp_path / "log", NAMES[0], {"resumed_from": 0, "config": config})
    [warning] = check(run_with(tmp_path))
    assert "the log of an earlier start of this run" in warning


def test_equal_names_with_checkpoints_elsewhere_are_another_run_unless_it_resumes(tmp_path: Path):
    """Names are often verl's defaults; a run that was moved has the same log with it."""
    log(tmp_path, default_local_dir="/elsewhere")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=/elsewhere, here "):
        check(run_with(tmp_path))
    assert check(run_with(tmp_path, resume_mode="resume_path")) == []
    save(tmp_path)
    assert check(run_with(tmp_path)) == []
    with pytest.raises(ConfigError, match="holds the log of another run"):
        check(run_with(tmp_path, resume_mode="disable"))


@pytest.mark.parametrize("facts", [{}, {"config": None}, {"config": {"trainer": []}}], ids=str)
def test_of_a_start_that_says_nothing_of_itself_a_warning_is_given(tmp_path: Path, facts):
    write_segment(tmp_path / "log", NAMES[0], facts)
    assert len(check(run_with(tmp_path))) == 1


def test_a_login_in_an_address_is_masked_in_the_log_and_compared_so(tmp_path: Path):
    address = "hdfs://me@host/checkpoints"
    log(tmp_path, default_local_dir="hdfs://***@host/checkpoints")
    assert len(check(run_with(tmp_path, default_local_dir=address))) == 1


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("runs/warmm", 404, "no such folder and no such model on the hub; did you mean 'runs/warm'?"),
        ("runs/other", 404, "no such folder and no such model on the hub"),
        ("gpt2", 404, None),
        ("wart", 404, "no such folder and no such model on the hub; did you mean 'wart1'?"),
        ("runs/warmm", 200, None),
        ("runs/warmm", 403, None),  # gated: it is there
        ("runs/warmm", None, "the hub cannot be asked for a model of that name (Connect"),
        ("Qwen/Qwen3-0.6B", None, None),  # no folder here is called Qwen: no question
    ],
)
def test_a_name_of_the_hub_that_is_a_mistyped_folder(tmp_path, monkeypatch, path, status, problem):
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", {404: "RepoNotFound", 403: "GatedRepo"}.get(status, ""))
            self.end_headers()
            self.wfile.write(json.dumps({"id": path, "siblings": []}).encode())

        def log_message(self, *_):
            pass

    monkeypatch.chdir(tmp_path)
    for folder in ("runs/warm", "wart1"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if status else 9
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        came = resources._typed(path)
        server.shutdown()
    assert (came is None) == (problem is None)
    assert (problem or "") in (came or "")


# --- A mini-batch in rows, as verl-agent counts, on a launch line where verl counts tasks -----------------------------
ALFWORLD = EnvConfig(id="turnkey/ALFWorld-v0")


def advice(size: int, loops: tuple[str, ...] = ("turnkey_env",), method: str = "gigpo", **node: object) -> str:
    config = OmegaConf.create(
        {
            "data": {"train_batch_size": 16, "train_files": None},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": size}, "rollout": {"n": 8}},
            "algorithm": {"adv_estimator": method},
        }
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_migrated(CheckedRun(config, TurnkeyConfig(env=ALFWORLD, **node), loops))
    return " ".join(str(warning.message) for warning in caught)


MINI_BATCHES = "set turnkey.update.mini_batches="
PRESET = "+turnkey/preset=gigpo_alfworld_1.5b sets turnkey.update.mini_batches=16"
OF_PRESET = "'turnkey.rewards=[{name: step, weight: 10}]'"
CONVERSATION = {"rollout": RolloutConfig(prompt="conversation")}


@pytest.mark.parametrize(
    ("size", "changes", "words", "unsaid"),
    [
        (
            256,
            {},
            [
                "a batch of 128 episodes x about 33 turns makes 16 mini-batches: ",
                f"{MINI_BATCHES}16",
                f"{PRESET} and",
                OF_PRESET,
            ],
            None,
        ),
        (256, {"rewards": [{"name": "step", "weight": 10}]}, [PRESET], "turnkey.rewards"),
        (256, {"method": "rebn"}, [f"{MINI_BATCHES}16"], "preset"),
        (17, {}, [f"{MINI_BATCHES}248;"], None),
        (64, {}, [f"{MINI_BATCHES}66;"], None),
        (2112, {}, [f"{MINI_BATCHES}2;"], None),
        # A row of several turns is counted once.
        (64, CONVERSATION, [f"a batch of 128 episodes makes 2 mini-batches: {MINI_BATCHES}2;"], None),
        (64, {"loops": ("tool_agent",)}, ["a batch of 128 episodes makes"], None),
    ],
)
def test_a_mini_batch_in_rows_is_told_the_key_and_the_preset(size, changes, words, unsaid):
    text = advice(size, **changes)
    assert all(word in text for word in words), text
    assert unsaid is None or unsaid not in text


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (16, {}),
        (8, {}),
        (4224, {}),  # a whole batch of rows
        (256, {"update": UpdateConfig(mini_batches=4)}),
        (256, {"update": UpdateConfig(order="reverse_turns")}),
        (128, CONVERSATION),
    ],
)
def test_nothing_is_said_where_both_ways_to_count_agree_or_the_number_is_set(size, changes):
    assert advice(size, **changes) == ""


# --- What the probe sees of an environment's columns ------------------------------------------------------------------
class Says:
    """In place of the process: each answer has the next of the ``columns``, and refuses the action if it says so."""

    def __init__(self, columns: list[str]) -> None:
        self.columns, self.t = columns, 0

    async def call(self, method: str, *_: Any) -> Any:
        names = self.columns[self.t].split()
        info = {"admissible": None, "extra": dict.fromkeys(names, 1.0), "invalid": "refused" in names}
        self.t += method != "load"
        return ("a room", info) if method == "start" else ("a room", 0.0, self.t == len(self.columns), False, info)

    async def retire(self, seconds: float) -> None:
        pass


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["role", "score"], {"role", "score"}),  # the state of the only step, and its answer
        (["", "role score"], {"score"}),
        (["role", "role score", "score"], {"role", "score"}),
        (["role", "score", "role score"], {"score"}),
        (["role", "role score", "role"], {"role"}),
        (["role", "refused role", "role score"], {"role", "score"}),
        (["role", "score", "refused", "score"], {"score"}),
        (["role", "refused", "refused"], None),
    ],
)
def test_columns_are_those_that_a_method_gets_on_every_step(monkeypatch: pytest.MonkeyPatch, columns, expected):
    """Of the state before the step and of the answer to it; a batch has a column only if all of its steps have it."""
    monkeypatch.setattr(probe.ProcessWorker, "spawn", AsyncMock(return_value=Says(columns)))
    assert asyncio.run(probe.play(TurnkeyConfig(), Task("own/Says-v0", 3), {"role"}))[2] == expected


@pytest.mark.parametrize(
    ("strategy", "extra", "truth", "lacks"),
    [
        ("probe", {}, None, True),
        ("probe", {"gold_answer": "Paris"}, None, False),
        ("probe", {}, "Paris", False),
        ("probe_gold", {}, "", True),
        ("probe_gold", {"gold_answers": ["Paris"]}, "", False),
        ({"name": "probe", "reward": {"name": "outcome"}}, {}, None, False),
        ("vine", {}, None, False),
        ("independent", {}, None, False),
    ],
)
def test_a_task_without_the_right_answer_that_a_strategy_needs(
    tmp_path: Path, monkeypatch, strategy, extra, truth, lacks
):
    file = f"{tmp_path}/tasks.parquet"
    row = {COLUMN: Task("own/Says-v0", 3).to_json()}
    pd.DataFrame([row if truth is None else {**row, "reward_model": {"ground_truth": truth}}]).to_parquet(file)

    episode = "a room", {"task": "t", "admissible": None, "extra": extra}, {"score"}
    monkeypatch.setattr(probe, "play", AsyncMock(return_value=episode))
    config = OmegaConf.create(
        {"algorithm": {"adv_estimator": "gae"}, "actor_rollout_ref": {"model": {"path": "none/here"}}}
    )
    turnkey = TurnkeyConfig(rollout=RolloutConfig(strategy=strategy))
    if not lacks:
        assert probe.probe(config, turnkey, file) == {"score"}
        return
    with pytest.raises(ConfigError, match="the task has no right answer") as error:
        probe.probe(config, turnkey, file)
    assert f"turnkey.rollout.strategy={strategy} " in str(error.value)


@pytest.mark.parametrize(
    ("variables", "folder", "named"),
    [
        ({}, None, None),
        ({"TMPDIR": "/tmp"}, None, None),
        ({"TMPDIR": f"/{'x' * 60}"}, None, "TMPDIR"),
        ({"TMPDIR": f"/{'x' * 60}", "RAY_TMPDIR": "/tmp"}, None, None),
        ({"RAY_TMPDIR": f"/{'x' * 60}"}, None, "RAY_TMPDIR"),
        ({"RAY_TMPDIR": f"/{'x' * 60}"}, "/tmp", None),
        ({"RAY_TMPDIR": f"/{'x' * 60}", "RAY_ADDRESS": "10.0.0.1:6379"}, None, None),
        ({}, f"/{'x' * 60}", "ray_kwargs.ray_init._temp_dir"),
    ],
)
def test_a_folder_in_which_no_socket_has_room_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], folder: str | None, named: str | None
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    whole = OmegaConf.create({"ray_kwargs": {"ray_init": {} if folder is None else {"_temp_dir": folder}}})
    if named is None:
        resources.check_sockets(whole)
        return
    with pytest.raises(Refusal, match=f"^{re.escape(named)}=/x+ is too long: .* and the limit is 107: set"):
        resources.check_sockets(whole)
