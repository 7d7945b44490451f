"""Kinds and ranges of values of verl's keys, which verl itself checks late or never.

A kind is mapping, list, text, truth value, number or null, and that of a key is the kind of verl's own default: checks
compute with values of these kinds, as verl does. The table of ranges holds the keys that launch scripts set most.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.plugins.checks.findings import refuse_with
from verl_turnkey.plugins.checks.limits import COUNTS
from verl_turnkey.plugins.config.command_line import CommandLine
from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.recipe_files import beside_parameters, config_dir
from verl_turnkey.plugins.config.resolve import CRITIC_TOKENS

STOCK = "_generated_ppo_trainer.yaml"
"""verl's own values in one file"""
_SETTING = re.compile(r"(?<![\w.+])([a-z]\w*(?:\.\w+)+)=([^\s,;:()]+)")
"""``key=value`` in a message"""
EXPECTED = {
    "mapping": "a mapping of keys",
    "list": "a list",
    "text": "a text",
    "truth": "true or false",
    "number": "a number",
    "path": "a path",
}
# Other kinds that verl accepts: a number may be the degree of what a truth value turns on, a name may be a number.
BESIDES: Mapping[str, tuple[str, ...]] = {
    "mapping": (),
    "list": ("text",),
    "text": ("list", "truth", "number"),
    "truth": ("number",),
    "number": ("truth",),
    "path": (),
}
MODEL, TURNS = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn"
# Kinds of keys whose default is null or too general.
KINDS = {
    "critic.enable": "truth",
    **dict.fromkeys((f"trainer.max_{role}_ckpt_to_keep" for role in ("actor", "critic")), "number"),
    **dict.fromkeys((f"trainer.{what}_data_dir" for what in ("rollout", "validation")), "path"),
    **dict.fromkeys(("data.custom_cls.path", "reward.custom_reward_function.path"), "path"),
    **dict.fromkeys((f"{MODEL}.{key}" for key in ("path", "tokenizer_path", "hf_config_path")), "path"),
    **dict.fromkeys((f"{MODEL}.lora_adapter_path", "critic.model.path"), "path"),
    **dict.fromkeys((f"{TURNS}.{what}_path" for what in ("tool_config", "function_tool")), "path"),
    **dict.fromkeys((f"actor_rollout_ref.actor.{engine}" for engine in ("megatron", "veomni")), "mapping"),
    "actor_rollout_ref.actor.policy_loss.rollout_correction": "mapping",
}


@dataclass(frozen=True)
class Mismatch:
    """A value of another kind than verl's default."""

    key: str
    value: Any
    expected: str
    kind: str

    @property
    def works(self) -> bool:
        """Whether verl may accept it: null for many keys, a list of files for a file."""
        return self.kind == "null" or self.kind in BESIDES[self.expected]


def mismatches(config: DictConfig) -> Iterator[Mismatch]:
    """The mismatches of all of verl's keys except those that interpolate another key."""
    yield from _mismatches(config, _kinds(), "")


def _mismatches(config: DictConfig, kinds: Mapping[str, Any], prefix: str) -> Iterator[Mismatch]:
    for name, expected in kinds.items():
        node: Any = config._get_node(name, validate_access=False)
        if node is None or node._is_missing() or node._is_interpolation():
            continue
        kind = "null" if node._is_none() else _kind(node)
        if kind == "mapping" and isinstance(expected, Mapping):
            yield from _mismatches(node, expected, f"{prefix}{name}.")
            continue
        expected_kind = "mapping" if isinstance(expected, Mapping) else expected
        if kind not in (expected_kind, {"path": "text"}.get(expected_kind)) and not (
            kind == "null" and f"{prefix}{name}" in KINDS
        ):
            yield Mismatch(f"{prefix}{name}", config[name], expected_kind, kind)


def _kind(value: Any) -> str:
    if isinstance(value, DictConfig | Mapping):
        return "mapping"
    if isinstance(value, ListConfig | list | tuple):
        return "list"
    plain = value._value() if OmegaConf.is_config(value) or hasattr(value, "_value") else value
    if isinstance(plain, bool):
        return "truth"
    if is_number(plain):
        return "number"
    return "text" if isinstance(plain, str | PurePath) else "other"


def is_number(value: Any) -> bool:
    """Whether it is a finite number; true and false are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@cache
def _defaults() -> Any:
    """verl's own values; none if this verl has no such file."""
    file = verls_config_dir() / STOCK
    return OmegaConf.load(file) if file.is_file() else OmegaConf.create()


def unset(config: DictConfig, key: str) -> bool:
    """Whether ``key`` has verl's default, and neither the launch line, by a parent too, nor a file of it sets it."""
    line, default = CommandLine(sys.argv[1:]), value_at(_defaults(), key)
    if default is None or value_at(config, key) != default or line.own_files:
        return False
    return not any(f"{key}.".startswith(f"{o.key}.") or _sets(o.key, o.value, key) for o in line.overrides)


@cache
def _sets(group: str, choice: str, key: str) -> bool:
    """Whether the file of a choice in one of our config groups, or a file that it builds on, sets ``key``."""
    file = config_dir() / group / f"{choice}.yaml"
    if group.split("/")[0] != "turnkey" or not file.is_file():
        return False
    node: Any = OmegaConf.to_container(OmegaConf.load(file))
    bases = [base for base in node.get("defaults", ()) if base != "_self_"]
    for name in key.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node is not None or any(_sets(group, base, key) for base in bases)


def with_origins(text: str, config: DictConfig) -> str:
    """The message ``text``, with each value that nobody set marked as verl's default where it is first mentioned."""
    named: set[str] = set()

    def noted(match: re.Match[str]) -> str:
        key, value = match.groups()
        if key in named or not unset(config, key) or str(value_at(config, key)).lower() != value.lower():
            return match[0]
        named.add(key)
        return f"{match[0]} (not set: verl's default)"

    return _SETTING.sub(noted, text)


@cache
def _kinds() -> dict[str, Any]:
    """The kind of each of verl's keys, nested like them, without those that are null by default."""
    kinds = _kinds_below(_defaults())
    for key, kind in KINDS.items():
        *parents, name = key.split(".")
        node = kinds
        for parent in parents:
            node = node.setdefault(parent, {})
        if not isinstance(node.get(name), dict):
            node[name] = kind
    return kinds


def _kinds_below(defaults: Any) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for name in defaults:
        try:
            value = None if OmegaConf.is_missing(defaults, name) else defaults[name]
        except OmegaConfBaseException:  # an interpolation of a missing key
            continue
        if value is not None:
            kinds[str(name)] = _kinds_below(value) if isinstance(value, DictConfig) else _kind(value)
    return kinds


def value_at(config: DictConfig, key: str, absent: Any = None) -> Any:
    """The value of ``key``; ``absent`` where there is none, its parent is of another kind, or it cannot be resolved."""
    try:
        return OmegaConf.select(config, key, default=absent)
    except Exception:  # of a resolver too
        return absent


def unreadable(config: DictConfig, error: Exception, line: str) -> str:
    """A message for an ``error`` of a check that could not process a value; ``line``: where in the source."""
    base = beside_parameters("base")
    mismatched = [
        f"{other.key}={'null' if other.value is None else other.value} (expected {EXPECTED[other.expected]})"
        for other in mismatches(config)
        if base.get(other.key, other) != other.value
    ]
    if mismatched:
        return f"{', '.join(mismatched)}: verl's default has another type, and a check fails on it: {short_text(error)}"
    text = f"{short_text(error)} ({line})"
    return f"a check cannot read the configuration: {text}. HYDRA_FULL_ERROR=1 shows all of the error"


def short_text(error: BaseException) -> str:
    """The error's class, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Range:
    """The numbers that a key accepts."""

    key: str
    low: float
    high: float = math.inf
    above: bool = False
    """``low`` itself is out of range"""
    whole: bool = False
    null: bool = True
    """null is a value, too"""
    note: str = ""
    read_with: str = ""
    """the key without which nothing reads this one"""

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.null
        if not is_number(value) or (self.whole and value != math.floor(value)):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    @property
    def expected(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        bounds = low if self.high == math.inf else f"{low}, {self.high:g} at most"
        return f"{kind}, {bounds}{', or null' if self.null else ''}{self.note}"


NEVER = "; -1: never"
RANGES = (
    *(Range(f"{role}.optim.lr", 0, 1, null=False) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.weight_decay", 0, 1) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.clip_grad", 0, above=True) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.lr_warmup_steps_ratio", 0, 1) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.lr_warmup_steps", -1, whole=True) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.min_lr_ratio", 0, 1) for role in (ACTOR, CRITIC)),
    Range(f"{ACTOR}.ppo_max_token_len_per_gpu", 1, whole=True, read_with=f"{ACTOR}.use_dynamic_bsz"),
    Range(f"{CRITIC}.ppo_max_token_len_per_gpu", 1, whole=True),
    Range(CRITIC_TOKENS, 1, whole=True),
    *(Range(f"{ACTOR}.clip_ratio{side}", 0) for side in ("", "_low", "_high")),
    Range(f"{ACTOR}.clip_ratio_c", 1, above=True),
    Range(f"{ACTOR}.kl_loss_coef", 0, read_with=f"{ACTOR}.use_kl_loss"),
    Range(f"{CRITIC}.cliprange_value", 0, above=True),
    Range("actor_rollout_ref.model.lora_rank", 0, whole=True),
    Range("actor_rollout_ref.model.lora_alpha", 0, above=True, read_with="actor_rollout_ref.model.lora_rank"),
    Range(f"{ROLLOUT}.gpu_memory_utilization", 0, 1, above=True),
    Range(f"{ROLLOUT}.temperature", 0, above=True, null=False, note="; at 0 every advantage meets a gradient of 0"),
    Range(f"{ROLLOUT}.val_kwargs.temperature", 0),
    *(Range(f"{ROLLOUT}.{at}top_p", 0, 1, above=True) for at in ("", "val_kwargs.")),
    *(Range(f"{ROLLOUT}.{at}top_k", -1, whole=True) for at in ("", "val_kwargs.")),
    *(Range(f"{ROLLOUT}.max_num_{what}", 1, whole=True) for what in ("batched_tokens", "seqs")),
    Range(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", 1, whole=True, read_with=f"{ROLLOUT}.log_prob_use_dynamic_bsz"),
    *(Range(f"algorithm.{name}", 0, 1) for name in ("gamma", "lam")),
    Range("algorithm.kl_ctrl.kl_coef", 0, read_with="algorithm.use_kl_in_reward"),
    *(Range(f"trainer.{what}_freq", -1, whole=True, null=False, note=NEVER) for what in ("save", "test")),
    Range("trainer.critic_warmup", 0, whole=True),
    Range("trainer.total_training_steps", 1, whole=True),
    Range("ray_kwargs.ray_init.num_cpus", 1, whole=True),
    Range("ray_kwargs.ray_init.num_gpus", 0),
)


_ABSENT = object()
TEMPERATURE = f"{ROLLOUT}.temperature"
"""of training alone"""
OTHERWISE = ("algorithm.rollout_correction.",)
"""where verl accepts a text with two numbers, and checks it itself"""
TRUTHS = {**dict.fromkeys(("true", "on", "yes", "y"), "true"), **dict.fromkeys(("false", "off", "no", "n"), "false")}
"""what may be meant by a text in place of a truth value"""


def check_ranges(config: DictConfig, *, use_critic: bool) -> None:
    """Refuse values of another kind than verl's default, and numbers out of range, all at once."""
    for key, text in [*_out_of_range(config), *_of_another_kind(config)]:
        if use_critic or not key.startswith("critic."):
            refuse_with(f"range:{key}", text)


def _out_of_range(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Key and message of each."""
    untrained = TEMPERATURE if OmegaConf.select(config, "trainer.val_only") is True else None
    for row in RANGES:
        value = value_at(config, row.key, _ABSENT)
        read = row.key != untrained and (not row.read_with or value_at(config, row.read_with))
        if value is not _ABSENT and not row.fits(value) and (read or not is_number(value)):
            yield row.key, f"{row.key}={value}: expected {row.expected}{_meant(value)}"


def _of_another_kind(config: DictConfig) -> Iterator[tuple[str, str]]:
    in_table = {row.key for row in RANGES} | {*COUNTS}
    for mismatch in mismatches(config):
        if mismatch.works or mismatch.key in in_table or mismatch.key.startswith(OTHERWISE):
            continue
        hint = _meant(mismatch.value) if mismatch.expected == "number" else ""
        if mismatch.expected == "truth":
            text = str(mismatch.value).strip().lower()
            meant = f"; did you mean {TRUTHS[text]}?" if text in TRUTHS else ""
            hint = f", and any text is true for verl{meant}"
        yield mismatch.key, f"{mismatch.key}={mismatch.value}: expected {EXPECTED[mismatch.expected]}{hint}"


def _meant(value: Any) -> str:
    """A suggestion for a text that is nearly a number."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)-e(\d+)\s*", value)):
        return f"; did you mean {match[1]}e-{match[2]}?"
    return "; without quotes?" if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d.]*(e-?\d+)?", value) else ""
