"""``turnkey train``: makes a complete launch line of verl for an environment and a model.

The line states every choice, so that it can be copied into a script and extended there.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any, cast

import gymnasium
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs import make
from verl_turnkey.envs.catalog import ADAPTERS, by_short_name
from verl_turnkey.envs.registry import unknown
from verl_turnkey.envs.tasks import HELD_OUT_SPLITS, Task, split_seeds, write_parquet
from verl_turnkey.envs.user_modules import environments_of, import_installed, import_modules
from verl_turnkey.plugins.cli.run_folder import metrics_of_start
from verl_turnkey.plugins.config import command_line, presets
from verl_turnkey.plugins.config.machine import gpu_here, is_small, model_config
from verl_turnkey.plugins.config.overrides import override, read, values
from verl_turnkey.plugins.config.recipe_files import config_dir

TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
"""of a micro-batch of the update; of log-probabilities, too, unless verl's other keys say something else"""
# Sizes for a first run: on one node with GPUs; on a CPU, with a language model or one of a few million parameters.
SIZES: dict[str, dict[str, Any]] = {
    "gpu": {
        "data.train_batch_size": 16,
        "data.max_prompt_length": 2048,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.6,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.model.use_remove_padding": True,
        TOKENS: 16384,  # at most, see LOGITS_SHARE
        "actor_rollout_ref.actor.optim.lr": 1e-6,
    },
    "cpu": {
        "data.train_batch_size": 4,
        "data.max_prompt_length": 512,
        "data.max_response_length": 32,
        "actor_rollout_ref.rollout.n": 4,
        TOKENS: 2048,
        "actor_rollout_ref.actor.optim.lr": 1e-5,
    },
}
SIZES["cpu_small"] = {**SIZES["cpu"], TOKENS: 8192, "actor_rollout_ref.actor.optim.lr": 1e-4}
ENV_VARS = "ray_kwargs.ray_init.runtime_env.env_vars"
LOGGER_FOLDERS = {"tensorboard": "TENSORBOARD_DIR", "wandb": "WANDB_DIR"}
"""loggers of verl's that write to the current folder unless a variable names another"""
KEEP_TWO = {
    **dict.fromkeys(("trainer.max_actor_ckpt_to_keep", "trainer.max_critic_ckpt_to_keep"), 2),
    "turnkey.stop.whole_checkpoints": 1,
}
"""the newest complete checkpoint and its successor; with a limit of 1 verl, too, needs space for both"""
MODULES = "turnkey.modules"
TURNS = 16
"""whole turns that a conversation has room for"""
LOGITS_SHARE = 1 / 8
"""most of a GPU's memory for the float32 logits of a micro-batch, unless a single row takes more"""
GPU_BYTES = 80e9
"""assumed where no GPU is visible"""
VOCABULARY = 262_144
"""assumed for a model that is not on this machine"""


@dataclass(frozen=True)
class Played:
    """The environment that ENVIRONMENT names, or the agent of ``turnkey.agent.run``."""

    id: str
    """empty: an agent of the user's own plays"""
    recipe: str | None = None
    """name of the group ``turnkey/env`` that suits it"""
    agent: str | None = None
    """a short name of that agent"""
    module: Path | None = None
    """the user's file that registers it"""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """of the recipe and the command line; a task's own override them"""
    chosen: frozenset[str] = frozenset()
    """names of those of the command line"""

    def held_out(self, split: str) -> Mapping[str, str]:
        """The arguments of the tasks of ``split`` (val, test); none where the command line chose the tasks."""
        arguments = HELD_OUT_SPLITS.get(self.id, {}).get(split, {})
        return {} if self.chosen & arguments.keys() else arguments

    @property
    def name(self) -> str:
        """For folders and verl's metrics."""
        return self.recipe or self.agent or self.id.rsplit("/", 1)[-1]


def resolve(environment: str, further: Sequence[str] = ()) -> Played:
    """An environment by a short name (babyai), a gymnasium id, or a file of one's own (my_env.py).

    A file that registers several environments is followed by the one that is meant: ``my_env.py:my/Env-v0``.
    ``further`` overrides may hold arguments of the environment (``turnkey.env.kwargs.size=4``), modules, and the id of
    another environment for the recipe (``turnkey.env.id=turnkey/NumberLine-v0``).

    Raises:
        UnknownEnvironmentError, ConfigError, ModuleImportError: there is no such environment, or not one in the file.
    """
    import_modules(_modules(further), kinds=("envs",))
    played = _named(environment)
    node = OmegaConf.create({"kwargs": dict(played.kwargs)})
    chosen: set[str] = set()
    for word in further:
        if re.match(r"\+{0,2}turnkey\.env\.kwargs[.=]", word):
            key, value = read(word)
            OmegaConf.update(node, key.removeprefix("turnkey.env."), value, force_add=True)
            chosen |= {key.removeprefix("turnkey.env.kwargs").lstrip(".").partition(".")[0]}
            chosen |= set(value) if isinstance(value, Mapping) else set()
    kwargs: Any = OmegaConf.to_container(node.kwargs)
    id = (values(further, "turnkey.env.id") or [None])[-1] or played.id
    return replace(played, id=id, kwargs=kwargs, chosen=frozenset(chosen))


def played(environment: str, words: Sequence[str]) -> Played:
    """What the overrides ``words`` play: their agent where ``environment`` is empty, else :func:`resolve`."""
    agent = None if environment else agent_of(words)
    return agent or resolve(environment, words)


def agent_of(words: Sequence[str]) -> Played | None:
    """The agent that plays with the overrides ``words`` (``turnkey.agent.run=...``, ``+turnkey/agent=pi``), if any."""
    runs, recipes = values(words, "turnkey.agent.run"), values(words, "turnkey/agent")
    if not runs:
        return Played("", agent=str(recipes[-1])) if recipes else None
    program = runs[-1] if isinstance(runs[-1], str) else str(runs[-1][0])
    return Played("", agent=Path(program.partition(":")[0]).name.removesuffix(".py"))


def environment(name: str, modules: Sequence[str] = ()) -> Played:
    """As :func:`resolve`, for a command that makes no launch line: a gymnasium id has no recipe then.

    ``modules`` of ``--module`` are imported first, and of ``turnkey.env.kwargs`` there are those of a short name.
    """
    import_modules(modules, "--module", ("envs",))
    played = _named(name)
    return Played(name) if played.id == name else played


def _modules(further: Sequence[str]) -> list[str]:
    """``turnkey.modules`` of the overrides."""
    return (values(further, MODULES) or [None])[-1] or []


def _named(environment: str) -> Played:
    if file := re.fullmatch(r"(.+\.py)(?::(.*))?", environment):
        return _of_file(Path(file[1]).expanduser().absolute(), file[2] or "")
    import_installed(("envs",))
    if environment in gymnasium.registry:
        adapter = next((adapter for adapter in ADAPTERS if adapter.id == environment), None)
    elif (adapter := by_short_name(environment)) is None:
        raise unknown(environment)
    recipe = adapter.recipe if adapter else None
    kwargs = _recipe(recipe)["env"].get("kwargs") or {}
    return Played(adapter.id if adapter else environment, recipe, kwargs=kwargs)


def _of_file(module: Path, chosen: str) -> Played:
    """The environment ``chosen`` of the user's file; empty: its only one."""
    import_modules([str(module)], "ENVIRONMENT")
    ids = environments_of(str(module))
    if chosen in gymnasium.registry or (len(ids) == 1 and not chosen):
        return Played(chosen or ids[0], module=module)
    if not ids:
        raise ConfigError(f"{module} registers no environment: call gymnasium.register(ID, entry_point=...) in it")
    if chosen:
        hint = did_you_mean(chosen, ids) or "."
        raise ConfigError(f"{module} registers no {chosen!r}{hint} It has {', '.join(ids)}")
    names = " or ".join(f"{module.name}:{env_id}" for env_id in ids)
    raise ConfigError(f"{module} registers {len(ids)} environments: name one, as {names}")


def _recipe(name: str | None) -> dict[str, Any]:
    """The recipe ``turnkey/env=name``; of None an empty one."""
    if name is None:
        return {"env": {}}
    file = config_dir() / "turnkey" / "env" / f"{name}.yaml"
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))


def write_tasks(played: Played, folder: Path, train: int, val: int, seed: int = 0) -> bool:
    """Write the tasks unless both files exist; returns whether it wrote them.

    Arguments in existing tasks are meant, and win over the recipe's.
    """
    from verl_turnkey.plugins.checks.data import first_task

    files = {split: folder / f"{split}.parquet" for split in ("train", "val")}
    if all(file.is_file() for file in files.values()):
        for file in files.values():
            first = first_task(str(file))
            if first.env_id != played.id:
                raise ConfigError(
                    f"{file} holds tasks of {first.env_id!r}, not of {played.id!r}: choose another --tasks"
                )
            lacking = {key: value for key, value in played.held_out(file.stem).items() if key not in first.kwargs}
            if lacking:
                arguments = " ".join(override(f"turnkey.env.kwargs.{key}", value) for key, value in lacking.items())
                raise ConfigError(
                    f"the tasks in {file} lack the arguments of their split, {arguments}: "
                    "choose another --tasks, or set them on the line"
                )
            for key in sorted(played.chosen & first.kwargs.keys()):
                if first.kwargs[key] != played.kwargs.get(key):
                    problem = f"{file} holds tasks with {key}={first.kwargs[key]!r}, which override"
                    setting = override(f"turnkey.env.kwargs.{key}", played.kwargs.get(key))
                    raise ConfigError(f"{problem} {setting}: choose another --tasks, or leave it out")
        return False
    for file, seeds in zip(files.values(), split_seeds(train, val, seed), strict=True):
        own = played.held_out(file.stem)  # others would override turnkey.env.kwargs on the command line
        make(played.id, {**played.kwargs, **own}).close()
        write_parquet(file, [Task(played.id, seed, own) for seed in seeds], played.name, file.stem)
    return True


def overrides(
    played: Played,
    *,
    model: str,
    method: str,
    device: str,
    gpus: int,
    steps: int,
    tasks: Path,
    out: Path,
    sizes: str | None = None,
    further: Sequence[str] = (),
) -> list[list[str]]:
    """The overrides of the launch line, one list per line as it is shown; ``further`` come last and win.

    ``sizes``: of :data:`SIZES`; None: those of ``device`` and ``model``.
    """
    chosen = {**SIZES[sizes or ("cpu_small" if device == "cpu" and is_small(model) else device)]}
    user_keys = {entry.lstrip("+~").partition("=")[0] for entry in further}
    published = _preset(further)
    user_keys |= {key for key in published if not key.startswith("trainer.")}  # --steps sets how long to train
    batches = [chosen["data.train_batch_size"], *values(further, "data.train_batch_size")]
    chosen["actor_rollout_ref.actor.ppo_mini_batch_size"] = batches[-1]
    if _prompt(played, further) == "conversation":  # which grows by turns and observations
        turn = chosen["data.max_response_length"]
        user_keys |= {"turnkey.rollout.max_tokens_per_turn"} if values(further, "turnkey/agent") else set()
        chosen |= {"data.max_response_length": TURNS * turn, "turnkey.rollout.max_tokens_per_turn": turn}
    lengths = {key: chosen[key] for key in ("data.max_prompt_length", "data.max_response_length")}
    row = [(values(further, key) or [published.get(key, own)])[-1] for key, own in lengths.items()]
    longest = sum(number for number in row if isinstance(number, int))  # another type is refused below
    if device == "gpu":
        chosen["trainer.n_gpus_per_node"] = gpus
        memory = gpu.memory if (gpu := gpu_here()) else GPU_BYTES
        room = int(LOGITS_SHARE * memory / 4 / model_config(model).get("vocab_size", VOCABULARY)) // 1024 * 1024
        chosen[TOKENS] = min(chosen[TOKENS], room)
    chosen[TOKENS] = max(chosen[TOKENS], longest)
    if not user_keys & KEEP_TWO.keys():
        chosen |= KEEP_TWO
    chosen |= {
        "trainer.total_training_steps": steps,
        "trainer.total_epochs": 100_000,  # the number of steps is the limit
        "trainer.test_freq": max(1, min(10, steps)),
        "trainer.save_freq": min(25, -(-steps // 4) if device == "cpu" else steps),
        "trainer.logger": ["console", "file"],  # the file in a folder per start: verl writes it anew
        f"+{ENV_VARS}.VERL_FILE_LOGGER_ROOT": metrics_of_start(out / "metrics"),
        "trainer.project_name": played.name,
        "trainer.experiment_name": method,
        "trainer.default_local_dir": out / "checkpoints",
        "turnkey.log.trajectories": out / "turnkey_log",
        "hydra.run.dir": out / "hydra",
    }
    logger = values(further, "trainer.logger")[-1:]  # one name, or a list of them
    chosen |= {f"+{ENV_VARS}.{key}": out / name for name, key in LOGGER_FOLDERS.items() if name in str(logger)}
    switches = [f"+turnkey={method}"]
    if not played.agent:
        switches += [f"+turnkey/env={played.recipe}"] if played.recipe else [override("turnkey.env.id", played.id)]
    switches += ["+turnkey/device=cpu"] if device == "cpu" else []
    lines = [switches]
    if played.module:
        modules = dict.fromkeys([str(played.module), *_modules(further)])
        lines += [[override(MODULES, [*modules])]]
        further = [word for word in further if word.lstrip("+").partition("=")[0] != MODULES]
    # verl reads these as patterns, in which brackets have to be escaped.
    lines += [[override(f"data.{split}_files", escape(f"{tasks / split}.parquet")) for split in ("train", "val")]]
    lines += [[override("actor_rollout_ref.model.path", model)]]
    lines += [[override(key, value)] for key, value in chosen.items() if key.lstrip("+") not in user_keys]
    lines += [[entry] for entry in further]
    command_line.check([entry for line in lines for entry in line])
    return lines


def _preset(further: Sequence[str]) -> dict[str, Any]:
    """What a preset among the overrides sets: values on the line would replace its own."""
    chosen = [presets.read(name) for name in values(further, "turnkey/preset") if name in presets.names()]
    return {setting.key: setting.value for preset in chosen for setting in preset.settings}


def _prompt(played: Played, further: Sequence[str]) -> str:
    """``turnkey.rollout.prompt`` of the launch line."""
    if played.agent:
        return "conversation"
    of_recipe = _recipe(played.recipe).get("rollout", {}).get("prompt", "template")
    return str([of_recipe, *values(further, "turnkey.rollout.prompt")][-1])


def command(lines: Sequence[Sequence[str]]) -> list[str]:
    """The command that runs the line, in the interpreter of this program."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(entry for line in lines for entry in line)]


def shell_line(lines: Sequence[Sequence[str]]) -> str:
    """The launch line, quoted for a shell."""
    return " \\\n    ".join(["python -m verl.trainer.main_ppo", *(shlex.join(line) for line in lines)])


def device_here() -> tuple[str, int]:
    """``gpu`` and their number, or ``cpu`` where there is none."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ("gpu", gpus) if gpus else ("cpu", 0)
