"""What the probe says of an environment of several roles before anything is played."""

import asyncio
import contextlib
import re
from typing import Any
from unittest.mock import AsyncMock

import kuhn
import pytest
from judge_server import JudgeServer
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import EnvRunner
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks import probe
from verl_turnkey.plugins.checks.findings import Refusal, collecting, id_of
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig
from verl_turnkey.plugins.rollout.strategies import read_strategy

KUHN = Task("tests/Kuhn-v0", 3)


class Here:
    """In place of the process: its calls, in this one."""

    def __init__(self) -> None:
        self.runner = EnvRunner(())

    async def call(self, method: str, arguments: tuple[Any, ...], *_: Any) -> Any:
        return getattr(self.runner, method)(*arguments)

    async def retire(self, seconds: float) -> None:
        self.runner.close()


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.ProcessWorker, "spawn", AsyncMock(side_effect=lambda *_: Here()))


@pytest.mark.parametrize(
    ("system", "message"),
    [
        (None, None),
        ("One text for all.", None),
        ({"first": "a", "second": "b"}, None),
        (
            {"first": "a", "third": "b"},
            r"has a text for 'first', 'third', and the environment has the role 'second', too: add one",
        ),
    ],
)
def test_a_role_needs_a_system_text_where_roles_have_one(system, message):
    turnkey = TurnkeyConfig(rollout=RolloutConfig(system=system))
    if message is None:
        asyncio.run(probe.play(turnkey, KUHN))
        return
    with pytest.raises(Refusal, match=message) as error:
        asyncio.run(probe.play(turnkey, KUHN))
    assert error.value.id == "role-without-system"


def test_several_roles_are_played_with_any_prompt():
    for rollout in (RolloutConfig(), RolloutConfig(prompt="conversation"), RolloutConfig(summary="own:short")):
        _, info, _ = asyncio.run(probe.play(TurnkeyConfig(rollout=rollout), KUHN))
        assert info["roles"] == kuhn.ROLES


def test_a_wrong_role_is_an_error_before_the_run():
    with pytest.raises(EnvironmentFailure, match=r"must say whose move it is, not 'third'"):
        asyncio.run(probe.play(TurnkeyConfig(), Task("tests/Kuhn-v0", 3, {"wrong": "role"})))


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"adv_estimator": "gigpo"}, None),
        ({"adv_estimator": "marshal"}, None),
        ({"adv_estimator": "siblings"}, None),
        (
            {"adv_estimator": "grpo"},
            r"adv_estimator=grpo treats the rewards of all roles \(first, second\).*\+turnkey=marshal",
        ),
        ({"adv_estimator": "tree"}, r"adv_estimator=tree treats"),
        ({"adv_estimator": "gigpo", "filter_groups": {"enable": True}}, r"filter_groups\.enable=true treats.*=false"),
    ],
)
def test_what_mixes_the_roles_is_warned_about(recwarn, algorithm, message):
    config = OmegaConf.create({"algorithm": algorithm})
    with collecting(config):
        probe._warn_of_mixed_roles(config, kuhn.ROLES)
    if message is None:
        assert not recwarn.list
        return
    (warning,) = recwarn.list
    assert id_of(warning.message) == "roles-mixed"
    assert re.search(message, str(warning.message))


def test_branches_of_several_roles_are_measured_and_not_trained():
    """What a branch pays a role that does not move in it again would be lost."""
    for fine in ("independent", {"name": "vine"}, {"name": "siblings"}):
        probe._refuse_branches(read_strategy(fine), kuhn.ROLES)
    with pytest.raises(Refusal, match=r"strategy=tree trains branches, .* \(first, second\)") as error:
        probe._refuse_branches(read_strategy({"name": "tree"}), kuhn.ROLES)
    assert error.value.id == "roles-branches"


FIXED = {"url": "http://127.0.0.1:9/v1", "model": "m"}


@pytest.mark.parametrize(
    ("env_id", "info", "turnkey", "rules"),
    [
        ("tests/Kuhn-v0", {"roles": kuhn.ROLES, "admissible": ["check"]}, {"opponent": "random"}, []),
        ("tests/Kuhn-v0", {"roles": kuhn.ROLES, "admissible": None}, {"val_opponent": "random"}, ["opponent-random"]),
        ("tests/Kuhn-v0", {"roles": kuhn.ROLES, "images": [1]}, {"opponent": FIXED}, ["opponent-images"]),
        ("own/Alone-v0", {"admissible": ["go"]}, {"opponent": "random"}, ["opponent-without-roles"]),
        ("own/Alone-v0", {"admissible": ["go"]}, {"opponent": "self"}, []),
    ],
)
def test_an_opponent_needs_a_role_and_legal_actions(env_id, info, turnkey, rules):
    config = OmegaConf.create({"turnkey": {}})
    with contextlib.suppress(ConfigError), collecting(config) as findings:
        probe._check_opponents(config, TurnkeyConfig(**turnkey), Task(env_id, 1), info)
    assert [id_of(error) for error in findings.errors] == rules
    assert all(next(iter(turnkey)) in str(error) for error in findings.errors)


def test_a_model_is_asked_once_before_the_run():
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"response_length": 5}}})
    with JudgeServer(lambda _: "ready") as server:
        turnkey = TurnkeyConfig(opponent={"url": server.url, "model": "m", "backoff": 9.0})
        probe._check_opponents(config, turnkey, KUHN, {"roles": kuhn.ROLES, "admissible": None})
        assert [question["max_tokens"] for question in server.questions] == [5]
        server.replies = [(500, {}, "broken")]
        with pytest.raises(Refusal, match=r"turnkey.opponent: the opponent at http.*500.*broken.*start that") as error:
            probe._check_opponents(config, turnkey, KUHN, {"roles": kuhn.ROLES, "admissible": None})
        assert (error.value.id, server.calls) == ("opponent-unanswered", 2)


def test_training_against_another_mixes_no_roles(monkeypatch: pytest.MonkeyPatch):
    """One role is trained, so that any method and any strategy will do."""
    config = OmegaConf.create({"algorithm": {"adv_estimator": "grpo"}})
    monkeypatch.setattr(probe, "first_task", lambda _: KUHN)
    monkeypatch.setattr(probe, "measure", lambda *_: None)
    ids = []
    monkeypatch.setattr(probe, "warn", lambda id, **_: ids.append(id))
    monkeypatch.setattr(probe, "refuse", lambda id, **_: ids.append(id))
    for opponent, expected in (("self", ["roles-mixed", "roles-branches"]), ("random", [])):
        ids.clear()
        turnkey = TurnkeyConfig(opponent=opponent, rollout=RolloutConfig(strategy={"name": "tree"}))
        probe.probe(config, turnkey, "tasks.parquet")
        assert ids == expected
