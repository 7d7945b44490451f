"""What the agent loops of one worker process share, and what the trainer calls in such a process."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from functools import cached_property
from time import monotonic
from typing import Any
from uuid import uuid4
from weakref import WeakValueDictionary

from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.hosting.pool import HostPool
from verl_turnkey.envs.mcp_servers.tools import Servers
from verl_turnkey.envs.prompting.actions import CALLS, INSTRUCTIONS, ControlTokens
from verl_turnkey.envs.prompting.prompts import Examples, load_template
from verl_turnkey.envs.rewards import Groups, compose
from verl_turnkey.envs.user_modules import import_modules, load_function
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    credit_modify,
    credit_params,
    estimator_of,
    load_examples,
    reward_entries,
    turnkey_config,
)
from verl_turnkey.plugins.log.writer import Counts
from verl_turnkey.plugins.notices import Failures, InvalidActions
from verl_turnkey.plugins.rollout.action_reader import ACT, action_reader, check_tool_template
from verl_turnkey.plugins.rollout.branching import Allowance
from verl_turnkey.plugins.rollout.strategies import Strategy, most_clones, read_strategy
from verl_turnkey.plugins.rollout.token_spans import check_spaces
from verl_turnkey.plugins.rollout.trajectory_log import TrajectoryLog
from verl_turnkey.plugins.rollout.turn_answer import endpoint_of
from verl_turnkey.plugins.rollout.turn_tail import TurnTail, learn
from verl_turnkey.plugins.teacher.sources import reads_observations
from verl_turnkey.plugins.verl_api import builders, ledger

FINISH_SECONDS = 10.0
"""seconds to wait for the trajectory log at the end of training"""


class WorkerProcess:
    """What all loops of one worker process share; built before the first rollout."""

    def __init__(self, config: DictConfig) -> None:
        self.turnkey: TurnkeyConfig = turnkey_config(config)
        rollout = self.turnkey.rollout
        # Read once: most are interpolations, which cost a millisecond each, and every episode has a loop of its own.
        verl_rollout = config.actor_rollout_ref.rollout
        self.prompt_length: int = verl_rollout.prompt_length
        self.response_length: int = verl_rollout.response_length
        whole = self.prompt_length + self.response_length
        # How many tokens a prompt and an answer may have together.
        self.room = min(whole, verl_rollout.max_model_len or whole)
        self.log_probs: bool = verl_rollout.calculate_log_probs
        self.tool_format: str = verl_rollout.multi_turn.format
        self.template = load_template(rollout.template)
        self._examples = load_examples(rollout.examples)
        self.summarize = load_function(rollout.summary, "turnkey.rollout.summary", "turns") if rollout.summary else None
        import_modules(self.turnkey.modules)  # they may hold reward components
        self.rewards = compose(reward_entries(config, self.turnkey))
        self.opponents = [endpoint_of(self.turnkey.opponent_of(validation)) for validation in (False, True)]
        self.groups = Groups()
        self._selected = selected = read_strategy(rollout.strategy)
        self.strategy: Strategy | None = None if selected is None else selected[1]
        # All rollouts of a group play in one process, at the same time.
        total = getattr(self.strategy, "trajectories", None)
        self._branches: int | None = None if total is None else max(0, total - verl_rollout.n)
        self._allowances: WeakValueDictionary[str, Allowance] = WeakValueDictionary()
        self.failures = Failures()
        self.failed_branches = Failures("branch", "branches")
        self.invalid_actions = InvalidActions(rollout.action_format, INSTRUCTIONS.get(rollout.action_format))
        self.log = TrajectoryLog(config, self.turnkey.log)
        self.times: deque[dict[str, float]] = deque(maxlen=10_000)  # seconds of the episodes since the last `measure`
        self._config = config
        self._control: ControlTokens | None = None
        self._tail: TurnTail | None = None

    @cached_property
    def pool(self) -> HostPool:
        """The environment hosts, which start with the first use: a user's own loops may need none."""
        import ray

        env, selected, at_once = self.turnkey.env, self._selected, self.turnkey.rollout.branches_at_once
        verl_rollout = self._config.actor_rollout_ref.rollout
        nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) > 0 for node in ray.nodes())
        return HostPool(
            hosts=env.hosts,
            # Hosts are shared by the rollouts of one worker, under its id: its episodes end with its process.
            namespace_tag=ray.get_runtime_context().get_actor_id() or uuid4().hex,
            places=env.instances_per_host,
            calls=env.calls_per_host,
            # verl deals the workers out to the nodes in turn; those of a node share its CPUs and memory.
            sharers=-(-verl_rollout.agent.num_workers // max(1, nodes)),
            restarts=env.restarts,
            step_timeout=env.step_timeout,
            reset_timeout=env.reset_timeout,
            modules=self.turnkey.modules,
            clones=0 if selected is None else most_clones(*selected, verl_rollout.n, at_once),
        )

    @cached_property
    def mcp_servers(self) -> Servers | None:
        """The MCP servers, whose sessions all episodes of this process open here; None: none are configured."""
        env = self.turnkey.env
        return self.turnkey.mcp.opened(env.reset_timeout, env.step_timeout)

    @property
    def readings(self) -> list[Any]:
        """References to what the hosts measured; empty before the first host starts."""
        return self.pool.measure() if "pool" in vars(self) else []

    def allowance(self, group: str) -> Allowance:
        """What trained branches are left to a group, as long as one of its rollouts plays."""
        return self._allowances.setdefault(group, Allowance(self._branches))

    def examples(self, instruction: str) -> Examples:
        """The example turns; ``instruction`` says how to write an action."""
        rollout = self.turnkey.rollout
        conversation = rollout.prompt == "conversation"
        return Examples(self._examples, rollout.action_format, self.template, instruction, conversation)

    def control_tokens(self, tokenizer: Any) -> ControlTokens:
        """The model's control tokens, computed once."""
        self._control = self._control or ControlTokens(tokenizer)
        return self._control

    def turn_tail(self, builder: Any, tokenizer: Any, tools: list[dict[str, Any]] | None) -> TurnTail | None:
        """How the model's turns end, computed once; None with template prompts.

        Raises:
            ConfigError: the model's template, or verl's builder for it, cannot hold a conversation.
        """
        if self._tail is None and self.turnkey.rollout.prompt == "conversation":
            self._tail = learn(builder, tokenizer, tools, self.turnkey.rollout.observation_role)
        return self._tail


_process: WorkerProcess | None = None
# What the method reads of records; set when the first loop of the process starts:
keep_texts = False  # whether records contain the observation's text
before: Collection[str] = ()  # columns of the state before a step, without ``extra.``


def recorded(config: DictConfig, turnkey: TurnkeyConfig) -> tuple[bool, Collection[str]]:
    """What method and teacher read of records: whether observations as text, and which columns of the state before a
    step."""
    spec = estimator_of(config)
    texts = getattr(credit_params(config, turnkey), "compares_texts", False) or reads_observations(turnkey.teacher)
    return texts, () if spec is None else spec.names_before(credit_modify(config, turnkey))


def shared(config: DictConfig) -> WorkerProcess:
    """What the loops of this process share. ``config``: verl's whole configuration, which says all that they need."""
    global _process, keep_texts, before
    if _process is None:
        _process = WorkerProcess(config)
        keep_texts, before = recorded(config, _process.turnkey)
    return _process


def prepare(worker: Any) -> None:
    """Run inside an agent-loop worker before training: a setting that cannot work stops the run here.

    Raises:
        RuntimeError: the plugin is not loaded in this worker.
        ConfigError: the tokenizer loses spaces; or the action is a tool call, and the model's chat template shows no
            tools, or the parser does not suit the tokenizer; or prompts are a conversation, which the template or
            verl's builder cannot append to, or which exceeds the model's positions.
    """
    ledger.verify(("agent_loop",), ("turnkey_env",))
    if not hasattr(worker, "tokenizer") or not hasattr(worker, "config"):  # a worker of a user's own manager
        return
    loop = worker.config.actor_rollout_ref.rollout.agent.default_agent_loop
    if loop == "turnkey_agent":  # whose codec learns the model's turns itself
        _check_positions(worker)
        check_spaces(worker.tokenizer)
        return
    if loop != "turnkey_env" and turnkey_config(worker.config).rollout.prompt != "conversation":
        return
    process = shared(worker.config)
    if loop == "turnkey_env":
        _ = process.pool  # the hosts start now, not with the first episode
    check_spaces(worker.tokenizer)
    fmt = process.turnkey.rollout.action_format
    tools = [ACT] if fmt in CALLS else None  # it stands for those of environments: only their episodes know them
    if tools:
        action_reader(fmt, process.tool_format, worker.tokenizer)  # its parser suits the tokenizer, or it raises
        check_tool_template(worker.tokenizer, fmt, **worker.config.data.get("apply_chat_template_kwargs", {}))
    builder = builders.builder_of(worker.config, worker.tokenizer, worker.processor, builders.model_type(worker))
    if process.turnkey.rollout.prompt == "conversation":
        _check_positions(worker)
        process.turn_tail(builder, worker.tokenizer, tools)


def _check_positions(worker: Any) -> None:
    """Checked here because the driver cannot always read the model's positions; the server would refuse too late."""
    from verl.workers.rollout.utils import get_max_position_embeddings

    rollout = worker.config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    room = rollout.max_model_len or get_max_position_embeddings(worker.model_config.hf_config)
    if longest > room:
        raise ConfigError(
            f"a conversation may have {longest} tokens (data.max_prompt_length={rollout.prompt_length} and "
            f"data.max_response_length={rollout.response_length}), and "
            f"the model takes {room}: lower the one or the other"
        )


def latest_failures(worker: Any) -> list[str]:
    """Run inside an agent-loop worker: why episodes failed there, the latest reason of each kind."""
    return [] if _process is None else list(_process.failures.latest.values())


def measure(worker: Any) -> tuple[list[Any], list[dict[str, float]]]:
    """Run inside an agent-loop worker: references to the readings of its hosts (``EnvHost.measure``), and times."""
    if _process is None:
        return [], []
    times = list(_process.times)
    _process.times.clear()
    return _process.readings, times


def log_counts(worker: Any) -> Counts:
    """Run inside an agent-loop worker: what its part of the log came to so far."""
    tables = None if _process is None else _process.log.tables
    return Counts() if tables is None else tables.counts


def finish(worker: Any) -> int:
    """Run inside an agent-loop worker after training: write what the log still holds before the process ends.

    Returns the number of episodes that ``turnkey.log.otlp`` did not get.
    """
    begun = monotonic()
    drain(FINISH_SECONDS)
    return 0 if _process is None else _process.log.unsent(begun + FINISH_SECONDS - monotonic())


def drain(seconds: float) -> bool:
    """Wait until what this process logged is on the disk or lost; False: it took longer than ``seconds``."""
    return _process is None or _process.log.drain(seconds)
