"""The ``turnkey:`` node as dataclasses.

The same dataclasses are parsed in the driver before Ray starts, in the trainer and in every agent-loop worker; the
parameters in the recipe files are written from them (``tools/write_tables.py``): one definition, one default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_turnkey.advantage import EstimatorSpec, Modification, estimators, parse_modify
from verl_turnkey.advantage.params import ConfigError, check, did_you_mean, parse, raise_all
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.prompting.actions import CALLS, FORMATS
from verl_turnkey.envs.prompting.prompts import KEY, LINE, LINE_FIELDS, SUMMARY_REQUEST, ExampleTurn, check_fields
from verl_turnkey.plugins.config.agent import SELF, AgentConfig, McpConfig, OpponentConfig, read_opponent
from verl_turnkey.plugins.config.presets import PresetConfig
from verl_turnkey.plugins.config.roles import (
    Apart,
    Code,
    ComponentFiles,
    EnvironmentFiles,
    File,
    Hosted,
    Modules,
    Played,
    TemplateFile,
    Trained,
)
from verl_turnkey.plugins.config.scorers import MutualInformationConfig, PrmConfig, TeacherConfig
from verl_turnkey.plugins.config.training import GroupsConfig, LogConfig, StopConfig, UpdateConfig

if TYPE_CHECKING:
    from verl_turnkey.losses import LossSpec


def load_examples(value: str | Sequence[Any]) -> tuple[ExampleTurn, ...]:
    """The turns of ``turnkey.rollout.examples``: a list of mappings, or the path of a YAML, JSON or JSONL file of one.

    Raises:
        ConfigError: there is no such file, or an entry is not a turn; names it.
    """
    entries: Any = value
    where = KEY
    if isinstance(value, str):
        import yaml

        path = Path(value).expanduser()
        where = f"{KEY}={value}"
        try:
            text = read_text(path)
            lines = [line for line in text.split("\n") if line.strip()]
            entries = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigError(f"{where}: a list of turns cannot be read from this file: {error}") from None
    if not isinstance(entries, Sequence) or isinstance(entries, str | Mapping):
        raise ConfigError(f"{where}: expected a list of turns, each with observation and action, got {entries!r}")
    return tuple(parse(ExampleTurn, entry, f"{where}[{n}]") for n, entry in enumerate(entries))


#: Key under ``turnkey.credit`` that is not a parameter of the method: the modifiers of its credit.
MODIFY = "modify"


@dataclass(frozen=True)
class EnvConfig:
    """Which environment runs the episodes, and where."""

    id: Played[str | None] = None
    """gymnasium id; null: every task of the data names its own"""
    kwargs: Played[EnvironmentFiles[dict[str, Any]]] = field(default_factory=dict)
    """arguments of the environment; the task's own override them"""
    hosts: Hosted[int | Literal["auto"]] = "auto"
    """environment hosts per agent-loop worker; auto: one for every four of the worker's CPUs, 1 to 4"""
    instances_per_host: Hosted[int | Literal["auto"]] = "auto"
    """concurrent episodes per host, further ones wait; auto: as many as fit into its share of half the free memory"""
    calls_per_host: Hosted[int | Literal["auto"]] = "auto"
    """environment calls that run at once in a host; auto: four for each of its CPUs, at least 8"""
    restarts: Hosted[int] = 100
    """processes of running episodes that a host may lose in ten minutes before it is replaced"""
    step_timeout: Hosted[float] = 30.0
    """seconds one environment step may take"""
    reset_timeout: Hosted[float] = 120.0
    """seconds one environment start and reset may take"""
    patience: Apart[float] = 300.0
    """seconds for which a batch that failed as a whole, or a validation that mostly failed, is repeated"""
    probe: Apart[bool] = True
    """play the first task for a few steps, in the driver before Ray starts and then on every node"""

    def __post_init__(self) -> None:
        for name in ("hosts", "instances_per_host", "calls_per_host"):
            value = getattr(self, name)
            check(value == "auto" or value > 0, name, "auto or a positive integer", value)
        check(self.restarts >= 0, "restarts", "zero or more", self.restarts)
        check(self.step_timeout > 0, "step_timeout", "positive seconds", self.step_timeout)
        check(self.reset_timeout > 0, "reset_timeout", "positive seconds", self.reset_timeout)
        check(self.patience >= 0, "patience", "seconds, zero or more", self.patience)


@dataclass(frozen=True)
class RolloutConfig:
    """How an episode becomes rows."""

    layout: Trained[Literal["steps", "merged"]] = "merged"
    """merged: one row for consecutive steps wherever a prompt extends the step before it (a template's never do);
    steps: a row per step"""
    prompt: Played[Literal["template", "conversation"]] = "template"
    """template: each prompt is rendered from the last turns; conversation: each prompt is the previous one, the
    model's turn and the new observation"""
    observation_role: Played[Literal["auto", "user", "tool"]] = "auto"
    """conversation: role of the messages with observations; auto: tool after a tool call where the chat template has
    such messages, else user"""
    thinking: Played[Literal["keep", "drop"]] = "keep"
    """conversation: drop removes thoughts from past turns; each step with thoughts is then a row of its own"""
    when_full: Played[Literal["end", "drop_oldest", "summarize"]] = "end"
    """conversation without room for a turn: end truncates the episode, drop_oldest continues in a new row without its
    first turns, summarize continues in one with the model's own summary, which it writes in a trained turn"""
    summary_request: Played[str] = SUMMARY_REQUEST
    """the message that asks for that summary"""
    history: Played[int] = 2
    """template: past turns shown in a prompt; fewer if they do not fit into data.max_prompt_length"""
    history_line: Played[str] = LINE
    """format of a past turn in a prompt, with {step}, {observation} and {action}"""
    keep_thinking: Played[bool] = False
    """show past turns with the model's whole response instead of the action alone"""
    summary: Played[Code[str | None]] = None
    """module:function that writes {summary} from the turns that are no longer shown; null: none"""
    max_turns: Played[int] = 50
    """model turns before an episode is truncated"""
    max_tokens_per_turn: Played[int | None] = None
    """tokens the model may write per turn; null: data.max_response_length"""
    invalid_action_penalty: Trained[float] = 0.1
    """subtracted from the step's own advantage, in its unit, when the action did not parse or apply"""
    action_format: Played[Code[str]] = "plain"
    """format of the action in the model's response: plain, tags, hiper, boxed, json (a call of the one tool act), tools
    (calls of the environment's tools) or module:function"""
    template: Played[TemplateFile[str]] = "default"
    """prompt template: a shipped name or the path of a text file"""
    system: Played[str | dict[str, str] | None] = None
    """system message, or one for each role by its name; null: none"""
    skill: Played[str | None] = None
    """column of the data, or key of its extra_info, whose text every prompt shows after the task; null: none"""
    examples: Played[File[list[Any] | str]] = field(default_factory=list)
    """example turns before the episode's own, each with observation and action (or response), or a YAML, JSON or JSONL
    file with them"""
    anchor: Trained[Literal["state_key", "observation"]] = "state_key"
    """what identifies a state: the environment's key, or the observation (text and images)"""
    stop: Played[list[str]] = field(default_factory=list)
    """strings that end a turn, in addition to the tokenizer's end of turn"""
    stop_token_ids: Played[list[int]] = field(default_factory=list)
    """token ids that end a turn"""
    strategy: Trained[ComponentFiles[str | dict[str, Any]]] = "independent"
    """when training episodes fork: independent (never), the name of a strategy, or a mapping with its name and
    parameters"""
    branch_tokens: Trained[int | None] = None
    """tokens that the model may write in all branches of an episode; null: any number"""
    branch_steps: Trained[int | None] = None
    """environment steps in all branches of an episode; null: any number"""
    branches_at_once: Trained[int] = 4
    """measured branches of an episode that may run at the same time; further ones wait"""

    def __post_init__(self) -> None:
        check(self.history >= 0, "history", "zero or more", self.history)
        try:
            check_fields(self.history_line, LINE_FIELDS, "action", "history_line")
        except ValueError as error:
            raise ConfigError(f"history_line: {error}") from None
        formats = [*FORMATS, *CALLS]
        check(
            self.action_format in formats or ":" in self.action_format,
            "action_format",
            f"{', '.join(formats)} or module:function{did_you_mean(self.action_format, formats)}",
            self.action_format,
        )
        check(
            self.observation_role != "tool" or self.action_format in CALLS,
            "observation_role",
            f"auto or user with action_format={self.action_format}: only a tool call ({', '.join(CALLS)}) has a tool's "
            "answer",
            self.observation_role,
        )
        load_examples([] if isinstance(self.examples, str) else self.examples)
        check(self.max_turns > 0, "max_turns", "positive", self.max_turns)
        check(all(self.stop), "stop", "a list of strings that are not empty", self.stop)
        check(
            self.invalid_action_penalty >= 0,
            "invalid_action_penalty",
            "zero or more (it is subtracted)",
            self.invalid_action_penalty,
        )
        for name in ("max_tokens_per_turn", "branch_tokens", "branch_steps"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "null or positive", value)
        check(self.branches_at_once > 0, "branches_at_once", "positive", self.branches_at_once)

    def system_of(self, role: Any) -> str | None:
        """The system message of ``role``; None: none.

        Raises:
            ConfigError: there is one for each role, and none for this one.
        """
        if not isinstance(self.system, dict):
            return self.system
        check(role in self.system, "turnkey.rollout.system", f"a text for the role {role!r}", self.system)
        return self.system[role]

    @property
    def rows_hold_turns(self) -> bool:
        """Whether a row may hold several turns: only the prompts of a conversation extend each other."""
        return self.layout == "merged" and self.prompt == "conversation"


@dataclass(frozen=True)
class TurnkeyConfig:
    """The whole node. ``credit`` and ``loss`` are parsed by the estimator's and the loss's own dataclass."""

    credit: Trained[dict[str, Any]] = field(default_factory=lambda: {MODIFY: []})
    """parameters of the method, see its page; modify: a list of modifiers of its credit"""
    loss: Trained[dict[str, Any]] = field(default_factory=dict)
    """parameters of the policy loss; verl's own losses take none here"""
    env: EnvConfig = field(default_factory=EnvConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    mcp: McpConfig = field(default_factory=McpConfig)
    opponent: Played[str | dict[str, Any]] = SELF
    """who plays the other roles of an environment with several; self: the policy; random: a legal action; or a model:
    {url: http://host:8000/v1, model: NAME, api_key_env: VARIABLE}"""
    val_opponent: Played[str | dict[str, Any] | None] = None
    """the same in validation and evaluation; null: as in training"""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    groups: GroupsConfig = field(default_factory=GroupsConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    prm: PrmConfig = field(default_factory=PrmConfig)
    mutual_information: MutualInformationConfig = field(default_factory=MutualInformationConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    log: LogConfig = field(default_factory=LogConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    preset: PresetConfig = field(default_factory=PresetConfig)
    rewards: Played[ComponentFiles[list[dict[str, Any]]]] = field(default_factory=lambda: [{"name": "step"}])
    """reward of a step: a weighted sum of components, each with a name, a weight, a label and its options"""
    modules: Played[Modules[list[str]]] = field(default_factory=list)
    """your own estimators and environments: dotted modules or .py files"""
    ignore: Apart[list[str]] = field(default_factory=list)
    """ids of rules whose refusals become warnings and whose warnings are silenced"""

    def __post_init__(self) -> None:
        for validation in (False, True):
            self.opponent_of(validation)

    @property
    def opponents(self) -> dict[str, str | OpponentConfig]:
        """Key -> opponent, without ``self`` and without a ``val_opponent`` that is the one of training."""
        keys = {"turnkey.opponent": self.opponent_of(False)}
        keys |= {} if self.val_opponent is None else {"turnkey.val_opponent": self.opponent_of(True)}
        return {key: opponent for key, opponent in keys.items() if opponent != SELF}

    def opponent_of(self, validation: bool) -> str | OpponentConfig:
        """Who plays the other roles; ``validation``: in validation and evaluation."""
        if validation and self.val_opponent is not None:
            return read_opponent(self.val_opponent, "val_opponent")
        return read_opponent(self.opponent, "opponent")


def turnkey_config(config: Mapping[str, Any]) -> TurnkeyConfig:
    """Parse the ``turnkey`` node of a whole verl configuration; an absent node means all defaults.

    Raises:
        ConfigError: unknown keys (with the closest match), wrong types or a value out of range.
    """
    return parse(TurnkeyConfig, _plain(config), "turnkey")


def _plain(config: Mapping[str, Any]) -> Any:
    """The ``turnkey`` node as plain Python values."""
    from omegaconf import OmegaConf

    node = config.get("turnkey")
    return (OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node) or {}


def reward_entries(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> list[dict[str, Any]]:
    """``turnkey.rewards``; a component ``verl`` without a path calls verl's ``reward.custom_reward_function``."""
    verls = (config.get("reward") or {}).get("custom_reward_function") or {}
    if not verls.get("path"):
        return turnkey.rewards
    defaults = {"path": verls["path"], "function": verls["name"], "kwargs": dict(verls.get("reward_kwargs") or {})}
    return [{**defaults, **e} if e.get("name") == "verl" and "path" not in e else e for e in turnkey.rewards]


def estimator_of(config: Mapping[str, Any]) -> EstimatorSpec | None:
    """Our estimator that ``algorithm.adv_estimator`` selects, or None for one of verl's own."""
    name = str(getattr(config["algorithm"]["adv_estimator"], "value", config["algorithm"]["adv_estimator"]))
    return estimators().get(name.removeprefix("turnkey/"))


def credit_params(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> Any:
    """The selected estimator's parameters as its own frozen dataclass; None for an estimator of verl's.

    Raises:
        ConfigError: unknown or ill-typed parameter under ``turnkey.credit``.
    """
    spec, values = estimator_of(config), {key: value for key, value in turnkey.credit.items() if key != MODIFY}
    return None if spec is None else _params(spec, values, "credit")


def credit_modify(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> tuple[Modification, ...]:
    """The modifiers of the selected estimator's credit, in order; none for an estimator of verl's.

    Raises:
        ConfigError: an unknown modifier, or an unknown or ill-typed parameter of one, in ``turnkey.credit.modify``.
    """
    spec, modify = estimator_of(config), turnkey.credit.get(MODIFY)
    return () if spec is None else parse_modify(modify, f"turnkey.credit.{MODIFY}", spec.name)


def loss_of(config: Mapping[str, Any]) -> LossSpec | None:
    """Our policy loss that ``actor_rollout_ref.actor.policy_loss.loss_mode`` selects, or None for one of verl's own."""
    name = str(config["actor_rollout_ref"]["actor"]["policy_loss"].get("loss_mode", "vanilla"))
    return _losses().get(name.removeprefix("turnkey/"))


def _losses() -> Mapping[str, LossSpec]:
    from verl_turnkey.losses import losses  # imports torch

    return losses()


def loss_params(config: Mapping[str, Any], turnkey: TurnkeyConfig) -> Any:
    """The selected loss's parameters as its own frozen dataclass; None for a loss of verl's.

    Raises:
        ConfigError: unknown or ill-typed parameter under ``turnkey.loss``.
    """
    spec = loss_of(config)
    return None if spec is None else _params(spec, turnkey.loss, "loss")


def _params(spec: EstimatorSpec | LossSpec, values: dict[str, Any], node: Literal["credit", "loss"]) -> Any:
    known = params_by_name(node)
    unknown = [f"turnkey.{node}.{name}" for name in values if name not in known[spec.name]]
    raise_all([ConfigError(not_a_parameter(key, spec.name, known)) for key in unknown])
    return parse(spec.params, values, f"turnkey.{node}")


def check_parameters(config: Mapping[str, Any], node: Literal["credit", "loss"]) -> None:
    """Check the parameters of the estimator or the loss, even if other keys below ``turnkey`` are wrong.

    Raises:
        ConfigError: unknown or ill-typed parameters.
    """
    plain, spec = _plain(config), estimator_of(config) if node == "credit" else loss_of(config)
    values = plain.get(node) if isinstance(plain, dict) else None
    if spec is not None and isinstance(values, dict):
        _params(spec, {key: value for key, value in values.items() if key != MODIFY}, node)


def params_by_name(node: Literal["credit", "loss"]) -> dict[str, list[str]]:
    """Every estimator (``credit``) or policy loss (``loss``) with the names of its parameters."""
    specs: Mapping[str, Any] = estimators() if node == "credit" else _losses()
    return {name: [entry.name for entry in fields(spec.params) if entry.init] for name, spec in specs.items()}


def not_a_parameter(key: str, chosen: str, known: dict[str, list[str]]) -> str:
    """The message for ``key``, which ``chosen`` does not have: the closest match, or the owners of that parameter."""
    name = key.rpartition(".")[2]
    owners = [other for other, names in known.items() if name in names]
    hint = f"; {', '.join(owners)} {'has' if len(owners) == 1 else 'have'} it" if owners else ""
    hint = did_you_mean(name, known[chosen]) or f"{hint}."
    return f"{key}: {chosen} has no such parameter{hint} Its parameters: {', '.join(sorted(known[chosen]))}"


def closest(name: str, choices: list[str]) -> str:
    """``"; did you mean 'x'?"``, or the list of choices, to end an error with."""
    return did_you_mean(name, choices) or f"; choices: {', '.join(sorted(choices))}"
