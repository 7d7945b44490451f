"""What the driver refuses of MCP servers; the lines of recipe/rules.yaml have the other rules."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import agent_loop
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.config.agent import McpConfig
from verl_turnkey.plugins.config.schema import RolloutConfig, TurnkeyConfig

PAD = {"pad": {"command": "sh"}}


def check(servers: Any = PAD, shared: tuple[str, ...] = (), **rollout: Any) -> None:
    rollout = {"action_format": "tools", **rollout}
    turnkey = TurnkeyConfig(mcp=McpConfig(servers, [*shared]), rollout=RolloutConfig(**rollout))
    agent_loop.check_mcp(Run(OmegaConf.create({}), turnkey))


def test_what_works_passes() -> None:
    check(None, action_format="plain")
    check()
    check({"web": {"url": "http://host/mcp"}}, ("web",), strategy="tree")


def test_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_loop, "find_spec", lambda name: None if name == "mcp" else importlib.util.find_spec(name))
    with pytest.raises(ConfigError, match=r'needs the package mcp: pip install "verl-turnkey\[mcp\]"'):
        check()


def test_shared_names_must_be_those_of_servers() -> None:
    with pytest.raises(ConfigError, match=r"turnkey\.mcp\.shared names 'pat'; turnkey\.mcp\.servers has pad"):
        check(PAD, ("pat",))


def test_forks_need_servers_without_state() -> None:
    both = {**PAD, "web": {"url": "http://host/mcp"}}
    with pytest.raises(ConfigError, match=r"strategy=tree forks episodes, .* MCP server web: set turnkey\.mcp\.shared"):
        check(both, ("pad",), strategy="tree")


@pytest.mark.parametrize("number", [0, -1])
def test_a_bound_is_positive(number: int) -> None:
    with pytest.raises(ConfigError, match="message_bytes"):
        McpConfig(message_bytes=number)
