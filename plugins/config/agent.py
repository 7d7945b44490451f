"""The nodes ``turnkey.agent``, an agent of the user's own, and ``turnkey.mcp``, MCP servers with further tools; and
``turnkey.opponent``, who plays the roles of an environment that the policy does not play."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl_turnkey.advantage.params import ConfigError, check, did_you_mean, parse
from verl_turnkey.envs.errors import SandboxError
from verl_turnkey.envs.http import EndpointConfig
from verl_turnkey.envs.process_tree import Limits
from verl_turnkey.plugins.config.roles import (
    Code,
    CodeOrCommand,
    FileList,
    Folder,
    Hidden,
    HiddenInServers,
    Hosted,
    Played,
    ServersFile,
)

if TYPE_CHECKING:
    from verl_turnkey.envs.agents.sandboxes import Sandbox
    from verl_turnkey.envs.mcp_servers.servers import Server
    from verl_turnkey.envs.mcp_servers.tools import Servers


COLUMNS = ("chain", "depth", "tool_calls", "tool_errors", "seconds_tools")
"""columns ``extra.<name>`` of every turn of an agent: which conversation of the episode it belongs to, the turns before
it there, its calls, how many of them the agent answered with an error, and the seconds until its next request"""
OWN_REWARD = "step"
"""the reward component that is what the agent itself reports"""
ANYWHERE = ("0.0.0.0", "::")
"""values of ``listen`` that are all addresses of a machine"""
STATES = ("history", "observation", "call", "workspace")


@dataclass(frozen=True)
class AgentConfig:
    """Which agent plays the episodes, and what it may do. With ``run`` set the agent loop is ``turnkey_agent``."""

    run: Played[CodeOrCommand[str | list[str] | None]] = None
    """module:function, called with the task and an object that holds base URL, key and client; or a command as a list,
    in which {instruction} and other fields of the task are filled in; or http://host:port/path, a service that runs it;
    null: no agent"""
    env: Played[Hidden[dict[str, str]]] = field(default_factory=dict)
    """environment variables of the agent's process"""
    inherit: Hosted[list[str]] = field(default_factory=list)
    """environment variables, besides harmless ones such as PATH, that a function or a command without a sandbox
    inherits from the training process, and that Harbor tasks may name as ${NAME}"""
    files: Played[Hidden[dict[str, str]]] = field(default_factory=dict)
    """command: files in the agent's HOME, by name, with their text"""
    cwd: Played[Folder[str | None]] = None
    """folder in which all agents work; null: a command has an empty one for each episode"""
    sandbox: Played[Literal["auto", "none", "bwrap", "docker"]] = "auto"
    """what a command or a function runs in; auto: a function has no sandbox, a command docker, with an image and where
    a daemon answers, else bwrap; none: no sandbox"""
    network: Played[Literal["gateway", "host"]] = "gateway"
    """sandbox: gateway lets the agent reach the model and nothing else; host: whatever this machine reaches"""
    image: Played[str | None] = None
    """docker: the image that the command runs in"""
    rootfs: Played[Folder[str | None]] = None
    """bwrap: folder with an unpacked image as the command's root; null: /usr and /etc of this machine, read-only"""
    readable: Played[FileList[list[str]]] = field(default_factory=list)
    """bwrap: further files and folders of this machine that the agent sees, read-only, such as its own code"""
    memory_gb: Played[float | None] = None
    """GiB of memory for each process of an episode, and for all together; null: no limit"""
    processes: Played[int | None] = None
    """processes that an episode may have at a time, including its sandbox's; null: no limit"""
    disk_gb: Played[float | None] = None
    """GiB of each file that an episode writes, and by which its folders may grow; null: no limit"""
    fresh_process: Hosted[bool] = False
    """function: a new process for each episode; a sandboxed one always gets one, and so does a command"""
    in_process: Hosted[bool] = False
    """call the function in the agent-loop worker: no process to start, but a busy loop of one episode stops all"""
    timeout: Played[float] = 1800.0
    """seconds that an episode may take; waiting for its place does not count"""
    grace: Hosted[float] = 5.0
    """seconds that calls of the model may still run after the agent has ended"""
    at_once: Hosted[int | Literal["auto"]] = "auto"
    """agents that run at the same time in an agent-loop worker, further ones wait; auto: 64"""
    listen: Hosted[str] = "127.0.0.1"
    """address at which the worker's HTTP server listens; agents on other machines need one that they reach"""
    reward: Played[Literal["result", "exit_code", "none"]] = "result"
    """the reward; result: what the agent returns, or posts to /reward; exit_code: 1 if the command ends with status 0;
    none: turnkey.rewards alone"""
    reward_key: Played[str] = "reward"
    """the reward in the reward.json of a Harbor task, where it holds several numbers"""
    state: Hosted[Code[str]] = "history"
    """key of the state before a turn; history: all messages so far; observation: the new messages; call: the last
    calls with their results; workspace: the files of the episode's folder (agent.workspace); or module:function. A key
    that the agent posts to /state overrides it"""
    thinking: Played[Literal["keep", "as_sent"]] = "keep"
    """keep: the model still sees its past thoughts, which many agents do not send back; as_sent: it sees what the agent
    sends, and each turn with thoughts is a row of its own"""
    unsupported: Played[Literal["refuse", "ignore"]] = "refuse"
    """parameters of requests that would change the policy, such as constrained decoding; refuse: an error; ignore:
    answered without them, and counted"""
    model: Played[str] = "policy"
    """name of the model for agents; calls of other models are answered and not trained, unless all are"""
    models: Played[dict[str, Any] | None] = None
    """other models by the name that requests use, each a mapping: url of an OpenAI-compatible server, model (its
    name there; default: the same), key_env (variable with the API key), timeout; null: the policy answers any name"""
    leave_out: Played[list[dict[str, Any]]] = field(default_factory=list)
    """other calls that are answered but not trained, such as those for titles: a list of {no_tools: true}, {system:
    part of its system text}, {model: name}, or several of these keys"""

    discarded: Played[Literal["train", "mask"]] = "train"
    """replies that the agent did not use, such as rejected samples; train: like others; mask: left out. Used are
    those that a later request continues or contains, and the last one of the episode and of each role"""

    def __post_init__(self) -> None:
        check(self.timeout > 0, "timeout", "positive seconds", self.timeout)
        check(self.memory_gb is None or self.memory_gb >= 0.1, "memory_gb", "null, or 0.1 or more", self.memory_gb)
        for name in ("processes", "disk_gb"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "null or a positive number", value)
        check(self.grace >= 0, "grace", "seconds, zero or more", self.grace)
        check(self.at_once == "auto" or self.at_once > 0, "at_once", "auto or a positive integer", self.at_once)
        check(
            self.state in STATES or ":" in self.state,
            "state",
            f"{', '.join(STATES)} or module:function",
            self.state,
            did_you_mean(self.state, STATES),
        )
        for rule in self.leave_out:
            kinds = {"no_tools": bool, "system": str, "model": str}
            valid = bool(rule) and all(isinstance(rule[key], kinds.get(key, ())) and rule[key] != "" for key in rule)
            check(valid, "leave_out", "mappings of no_tools: true or false, system: text, model: name", rule)
        check(bool(self.run) or self.run is None, "run", "null, module:function or a command", self.run)

    def endpoints(self) -> dict[str, EndpointConfig]:
        """``models`` by name.

        Raises:
            ConfigError: an entry has another form, or the policy's name.
        """
        known, endpoints = ("url", "model", "key_env", "timeout"), {}
        for name, entry in (self.models or {}).items():
            where = f"turnkey.agent.models.{name}"
            own = name == self.model or name.startswith(f"{self.model}/")
            check(not own, where, f"another name than the policy's, {self.model}", name)
            check(isinstance(entry, Mapping) and "url" in entry, where, f"a mapping of {', '.join(known)}", entry)
            for key in entry:
                check(key in known, where, f"keys of {', '.join(known)}", key, did_you_mean(str(key), known))
            texts = all(isinstance(entry.get(key), str | None) for key in known[:3])
            check(texts, where, "texts as url, model and key_env", dict(entry))
            seconds = entry.get("timeout", 600.0)
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            check(number, where, "a number as timeout", seconds)
            try:
                model = entry.get("model") or name
                endpoints[name] = EndpointConfig(entry["url"], model, entry.get("key_env"), timeout=seconds)
            except ConfigError as error:
                raise ConfigError(f"{where}.{error}") from None
        return endpoints

    @property
    def limits(self) -> Limits:
        """What the processes of an episode may use."""
        memory, disk = (int((size or 0) * 2**30) for size in (self.memory_gb, self.disk_gb))
        return Limits(memory, self.processes or 0, disk)

    @property
    def places(self) -> int:
        """Agents that run at the same time in a worker."""
        return 64 if self.at_once == "auto" else self.at_once


def sandbox_of(agent: AgentConfig) -> Sandbox:
    """What an agent runs in.

    Raises:
        SandboxError: it cannot be used on this machine, or not for a function.
    """
    from verl_turnkey.envs.agents.sandboxes import choose

    name = agent.sandbox
    if isinstance(agent.run, str):
        name = "none" if name == "auto" else name
        if name == "docker" or (name == "bwrap" and agent.rootfs is not None):
            of_commands = "sandbox=docker" if name == "docker" else f"rootfs={agent.rootfs}"
            raise SandboxError(f"turnkey.agent.{of_commands} is for commands; a function runs in this machine's Python")
    rootfs = None if agent.rootfs is None else Path(agent.rootfs)
    readable = [Path(path).expanduser().absolute() for path in agent.readable]
    return choose(
        name,
        image=agent.image,
        rootfs=rootfs,
        readable=readable,
        network=agent.network,
        inherit=agent.inherit,
        limits=agent.limits,
    )


@dataclass(frozen=True)
class McpConfig:
    """Servers, which each episode has for itself, and which of their tools are shown."""

    servers: Played[HiddenInServers[ServersFile[str | dict[str, Any] | None]]] = None
    """file with mcpServers as MCP clients have it, or what is under that key: a command with args and env, or a url, by
    name; null: none"""
    shared: Played[list[str]] = field(default_factory=list)
    """servers that keep no state: all episodes of an agent-loop worker share one session with each"""
    tools: Played[list[str] | None] = None
    """names of the tools that are shown; null: all"""
    message_bytes: Hosted[int] = 4194304
    """bytes that a server may write for one call; more fails its episode"""

    def __post_init__(self) -> None:
        check(self.message_bytes > 0, "message_bytes", "positive bytes", self.message_bytes)

    def read(self) -> Sequence[Server]:
        """The servers; empty without any.

        Raises:
            ValueError: the file cannot be read, an entry is not a server, or ``shared`` names none of them.
        """
        if self.servers is None:
            return ()
        from verl_turnkey.envs.mcp_servers.servers import read_servers

        servers = read_servers(self.servers)
        names = [server.name for server in servers]
        if unknown := sorted(set(self.shared) - set(names)):
            raise ValueError(f"turnkey.mcp.shared names {unknown[0]!r}; turnkey.mcp.servers has {', '.join(names)}")
        return servers

    def opened(self, start_timeout: float, call_timeout: float) -> Servers | None:
        """The servers for the episodes of a process; None without any. Raises ``ValueError`` as :meth:`read`."""
        from verl_turnkey.envs.mcp_servers.tools import Servers

        servers = self.read()
        if not servers:
            return None
        return Servers(servers, self.shared, self.tools, self.message_bytes, start_timeout, call_timeout)


SELF, RANDOM = "self", "random"
"""opponents by name: the policy itself, and one that takes a random legal action"""


@dataclass(frozen=True)
class OpponentConfig(EndpointConfig):
    """Address of a fixed model that plays the other roles."""

    timeout: float = 120.0
    """seconds that one attempt may take"""
    cache_size: int = 0
    """answers kept in memory; none, since every turn is a sample of its own"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(bool(self.model), "model", "the name of the model on the server", self.model)
        check(self.cache is None and not self.cache_size, "cache", "null: each turn is another sample", self.cache)

    def __str__(self) -> str:
        return f"{self.model} at {self.url}"

    def limit(self, tokens: int) -> dict[str, int]:
        """The field of a request that lets the model write at most ``tokens``, unless ``params`` limits it."""
        return {} if {"max_tokens", "max_completion_tokens"} & {*self.params} else {"max_tokens": tokens}


def read_opponent(value: str | Mapping[str, Any], key: str) -> str | OpponentConfig:
    """The opponent that ``key=value`` describes.

    Raises:
        ConfigError: names the key.
    """
    if not isinstance(value, str):
        return parse(OpponentConfig, dict(value), key)
    if value not in (SELF, RANDOM):
        expected = f"{SELF}, {RANDOM} or {{url: http://host:8000/v1, model: NAME}}"
        raise ConfigError(f"{key}: expected {expected}, got {value!r}{did_you_mean(value, (SELF, RANDOM))}")
    return value
