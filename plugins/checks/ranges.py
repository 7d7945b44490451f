"""Kinds and ranges of values of verl's keys: what verl takes as it comes, and finds out late or never.

The table holds the keys that launch scripts set most.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.kinds import EXPECTED, is_number, mismatches
from verl_turnkey.plugins.checks.limits import COUNTS, CRITIC_TOKENS

ACTOR, CRITIC, ROLLOUT = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Range:
    """The numbers that a key takes."""

    key: str
    low: float
    high: float = math.inf
    above: bool = False
    """``low`` itself is out of range"""
    whole: bool = False
    null: bool = True
    """null is a value, too"""
    note: str = ""

    def fits(self, value: Any) -> bool:
        if value is None:
            return self.null
        if not is_number(value) or (self.whole and value != math.floor(value)):
            return False
        return (self.low < value if self.above else self.low <= value) and value <= self.high

    @property
    def expected(self) -> str:
        what = "a whole number" if self.whole else "a number"
        low = f"above {self.low:g}" if self.above else f"{self.low:g} or more"
        bounds = low if self.high == math.inf else f"{low}, {self.high:g} at most"
        return f"{what}, {bounds}{', or null' if self.null else ''}{self.note}"


NEVER = "; -1: never"
RANGES = (
    *(Range(f"{role}.optim.lr", 0, 1, null=False) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.weight_decay", 0, 1) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.clip_grad", 0, above=True) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.lr_warmup_steps_ratio", 0, 1) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.lr_warmup_steps", -1, whole=True) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.optim.min_lr_ratio", 0, 1) for role in (ACTOR, CRITIC)),
    *(Range(f"{role}.ppo_max_token_len_per_gpu", 1, whole=True) for role in (ACTOR, CRITIC)),
    Range(CRITIC_TOKENS, 1, whole=True),
    Range(f"{ACTOR}.clip_ratio", 0),
    Range(f"{ACTOR}.clip_ratio_low", 0, 1),
    Range(f"{ACTOR}.clip_ratio_high", 0),
    Range(f"{ACTOR}.clip_ratio_c", 1, above=True),
    Range(f"{ACTOR}.kl_loss_coef", 0),
    Range(f"{CRITIC}.cliprange_value", 0, above=True),
    Range("actor_rollout_ref.model.lora_rank", 0, whole=True),
    Range("actor_rollout_ref.model.lora_alpha", 0, above=True),
    Range(f"{ROLLOUT}.gpu_memory_utilization", 0, 1, above=True),
    Range(f"{ROLLOUT}.temperature", 0, above=True, null=False, note="; at 0 every advantage meets a gradient of 0"),
    Range(f"{ROLLOUT}.val_kwargs.temperature", 0),
    *(Range(f"{ROLLOUT}.{at}top_p", 0, 1, above=True) for at in ("", "val_kwargs.")),
    *(Range(f"{ROLLOUT}.{at}top_k", -1, whole=True) for at in ("", "val_kwargs.")),
    *(Range(f"{ROLLOUT}.max_num_{what}", 1, whole=True) for what in ("batched_tokens", "seqs")),
    Range(f"{ROLLOUT}.log_prob_max_token_len_per_gpu", 1, whole=True),
    Range("algorithm.gamma", 0, 1),
    Range("algorithm.lam", 0, 1),
    Range("algorithm.kl_ctrl.kl_coef", 0),
    *(Range(f"trainer.{what}_freq", -1, whole=True, null=False, note=NEVER) for what in ("save", "test")),
    Range("trainer.critic_warmup", 0, whole=True),
    Range("trainer.total_training_steps", 1, whole=True),
    Range("ray_kwargs.ray_init.num_cpus", 1, whole=True),
    Range("ray_kwargs.ray_init.num_gpus", 0),
)


TEMPERATURE = f"{ROLLOUT}.temperature"
"""of training alone"""
OTHERWISE = ("algorithm.rollout_correction.",)
"""where verl takes a text for two numbers, and checks it itself"""


def check_ranges(config: DictConfig, *, use_critic: bool) -> None:
    """Refuse values of another kind than verl's key has, and numbers out of their range, all at once.

    Raises:
        ConfigError: one line per key, with its value and the expected one.
    """
    idle = () if use_critic else ("critic.",)
    wrong = [text for key, text in (*_out_of_range(config), *_of_another_kind(config)) if not key.startswith(idle)]
    if wrong:
        refuse("value-out-of-range", "\n".join(wrong))


def _out_of_range(config: DictConfig) -> Iterator[tuple[str, str]]:
    """Key and sentence of each."""
    untrained = TEMPERATURE if OmegaConf.select(config, "trainer.val_only") is True else None
    for row in RANGES:
        value = _value(config, row.key)
        if value is not _ABSENT and not row.fits(value) and not (row.key == untrained and is_number(value)):
            yield row.key, f"{row.key}={value}: expected {row.expected}{_meant(value)}"


def _of_another_kind(config: DictConfig) -> Iterator[tuple[str, str]]:
    in_table = {row.key for row in RANGES} | {*COUNTS}
    for mismatch in mismatches(config):
        if mismatch.works or mismatch.key in in_table or mismatch.key.startswith(OTHERWISE):
            continue
        hint = ""
        if mismatch.expected == "truth":
            hint = f", and any text is true for verl{_meant_truth(mismatch.value)}"
        elif mismatch.expected == "number":
            hint = _meant(mismatch.value)
        yield mismatch.key, f"{mismatch.key}={mismatch.value}: expected {EXPECTED[mismatch.expected]}{hint}"


_ABSENT = object()


def _value(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key, default=_ABSENT)
    except Exception:  # an interpolation that leads nowhere, or a parent of another type
        return _ABSENT


def _meant(value: Any) -> str:
    """What a text that is nearly a number may mean."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)-e(\d+)\s*", value)):
        return f"; did you mean {match[1]}e-{match[2]}?"
    return "; without quotes?" if isinstance(value, str) and re.fullmatch(r"[-+]?\d[\d.]*(e-?\d+)?", value) else ""


def _meant_truth(value: Any) -> str:
    words = {"off": "false", "no": "false", "n": "false", "on": "true", "yes": "true", "y": "true"}
    meant = words.get(str(value).strip().lower(), str(value).strip().lower())
    return f"; did you mean {meant}?" if meant in ("true", "false") else ""
