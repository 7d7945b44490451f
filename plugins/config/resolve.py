"""Every write to the configuration of a run, in order. The checks read the result and write nothing.

:func:`verl_turnkey.plugins.config.machine.settle` runs before all of these, since the checks of values read its
choices; values are checked before the first write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_turnkey.plugins.config import checkpoint_files
from verl_turnkey.plugins.config.leaves import make_absolute
from verl_turnkey.plugins.config.recipe_files import rule_words
from verl_turnkey.plugins.config.schema import turnkey_config

LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
VERLS_CRITIC = "~/models/deepseek-llm-7b-chat"
CRITIC_TOKENS, VERLS_TOKENS = "critic.ppo_infer_max_token_len_per_gpu", 32768
"""the limit of the critic's micro-batches that verl reads but does not list in its files, and its default"""
FOLDERS = ("trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.default_local_dir")
KEEP, DEPRECATED = ("max_actor_ckpt_to_keep", "max_critic_ckpt_to_keep"), "remove_previous_ckpt_in_save"


@dataclass(frozen=True)
class Change:
    """A change of the configuration, for the run's header; ``id``: like that of a rule."""

    id: str
    message: str

    def __str__(self) -> str:
        return f"{self.message} [{self.id}]"


def change(id: str, /, **values: object) -> Change:
    """The change of that id; ``values``: of the fields of its words."""
    return Change(id, rule_words(id, **values))


def absolute_paths(config: DictConfig) -> Change | None:
    """Make paths absolute that are relative to the driver's working directory: workers have a different one."""
    turnkey_config(config)
    changed = make_absolute(config, Path.cwd())
    if not changed:
        return None
    return change("paths-made-absolute", changed=", ".join(changed), cwd=Path.cwd())


def home_folders(config: DictConfig, _use_critic: bool) -> Change | None:
    """Expand ``~`` in the folders that verl writes to: verl does not."""
    settings = []
    for key in FOLDERS:
        folder = OmegaConf.select(config, key)
        if isinstance(folder, str) and folder.startswith("~"):
            OmegaConf.update(config, key, expanded := str(Path(folder).expanduser()))
            settings.append(f"{key}={expanded}")
    return change("home-folder-expanded", settings=", ".join(settings)) if settings else None


def critic_model(config: DictConfig, use_critic: bool) -> Change | None:
    """Use the actor's model if verl's default is missing: verl's error would be about repository names."""
    critic, actor = config.critic.model, config.actor_rollout_ref.model
    if not use_critic or critic.path != VERLS_CRITIC or Path(critic.path).expanduser().is_dir():
        return None
    with open_dict(config):
        critic.path = actor.path
        critic.trust_remote_code = actor.trust_remote_code
    return change("critic-model-defaulted", path=actor.path)


def critic_tokens(config: DictConfig, use_critic: bool) -> Change | None:
    """Copy the limit of the critic's micro-batches to the key that verl reads, which its files do not list."""
    limit = config.critic.ppo_max_token_len_per_gpu
    if not use_critic or limit in (None, VERLS_TOKENS) or OmegaConf.select(config, CRITIC_TOKENS) is not None:
        return None
    OmegaConf.update(config, CRITIC_TOKENS, limit, force_add=True)
    return change("critic-tokens-copied", limit=limit)


def bypass_settings(config: DictConfig, _use_critic: bool) -> Change | None:
    """Copy the settings of verl's loss ``bypass_mode`` to where it reads them; the V1 trainers keep them elsewhere.

    Existing settings there stay.
    """
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    if policy_loss.get("loss_mode") != "bypass_mode" or policy_loss.get("rollout_correction") is not None:
        return None
    with open_dict(policy_loss):
        policy_loss.rollout_correction = config.algorithm.get("rollout_correction") or {}
    return change("bypass-settings-copied")


def resumed_checkpoint(config: DictConfig, use_critic: bool, remembers: bool | None = None) -> Change | None:
    """With ``resume_mode=auto``: resume from the newest complete checkpoint, if the newest one is damaged.

    ``remembers``: whether the method stores a file in checkpoints; None: as its parameters say.
    """
    selected = checkpoint_files.newest_whole(config, use_critic=use_critic, remembers=remembers)
    if selected is None or selected.fault is None or selected.folder is None:
        return None
    with open_dict(config):
        config.trainer.resume_mode, config.trainer.resume_from_path = "resume_path", str(selected.folder)
    return change("resumes-from-older-checkpoint", fault=selected.fault, folder=selected.folder)


def kept_checkpoints(config: DictConfig, _use_critic: bool) -> Change | None:
    """Raise verl's limits to one above ``whole_checkpoints``: verl deletes the oldest before it writes the next one."""
    trainer, complete = config.trainer, turnkey_config(config).stop.whole_checkpoints
    previous = bool(trainer.get(DEPRECATED))  # verl's former name for a limit of 1
    few = [key for key in KEEP if previous or (trainer.get(key) or complete + 1) <= complete]
    if trainer.save_freq <= 0 or not few:
        return None
    limits = f"trainer.{DEPRECATED}=true" if previous else " and ".join(f"trainer.{k}={trainer[k]}" for k in few)
    with open_dict(trainer):
        for key in few:
            trainer[key] = complete + 1
        trainer[DEPRECATED] = False
    return change("max-checkpoints-raised", limits=limits, limit=complete + 1, complete=complete)


def log_segment(config: DictConfig, segment: str, validation_tasks: int | None) -> None:
    """Name this start of a logged run, the same in all processes; the header is printed afterwards."""
    with open_dict(config):
        config.turnkey.log.segment = segment
        config.turnkey.log.validation_tasks = validation_tasks


def agent_loop(config: DictConfig, _use_critic: bool) -> Change | None:
    """With ``turnkey.agent.run`` the agent plays; its prompts are the conversation that it leads."""
    agent = config.actor_rollout_ref.rollout.agent
    if not OmegaConf.select(config, "turnkey.agent.run") or agent.default_agent_loop != "turnkey_env":
        return None
    with open_dict(config):
        agent.default_agent_loop = "turnkey_agent"
        config.turnkey.rollout.prompt = "conversation"
    return change("agent-selected")


def evaluated_opponent(config: DictConfig) -> None:
    """An evaluation plays as validation does: the opponents of training are not asked."""
    if (opponent := OmegaConf.select(config, "turnkey.val_opponent")) is not None:
        OmegaConf.update(config, "turnkey.opponent", opponent, merge=False)


OF_OUR_TRAINERS: tuple[Callable[[DictConfig, bool], Change | None], ...] = (
    agent_loop,
    home_folders,
    critic_model,
    critic_tokens,
    bypass_settings,
    resumed_checkpoint,
    kept_checkpoints,
)
"""in this order, after :func:`absolute_paths`; :func:`log_segment` follows once all checks have passed"""
