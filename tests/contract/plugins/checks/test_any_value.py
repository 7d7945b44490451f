"""Whatever value a key has: the checks let it pass, or refuse it in a sentence that names the key.

The keys are those that the checks read, recorded while they do.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from contract_tools import Compose
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from verl_turnkey.plugins.checks import driver
from verl_turnkey.plugins.config.recipe_files import leaves

VALUES = (None, "off the rails", -3, [1])
# Those that go through all of verl's keys, and treat them alike: a rule of theirs is tested in test_kinds.py.
GENERAL = ("values.py", "unknown_keys.py")
PLAIN = "turnkey.env.probe=false"
LINES = {
    "gigpo": ("+turnkey=gigpo", PLAIN),
    "critic": (
        "+turnkey=turn_gae",
        PLAIN,
        "critic.enable=true",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=100000",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=acc",
        "trainer.save_freq=5",
    ),
    "separate": (
        "+turnkey=gigpo",
        PLAIN,
        "trainer.v1.trainer_mode=turnkey_separate_async",
        "trainer.v1.separate_async.parameter_sync_step=2",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
        "actor_rollout_ref.model.lora_rank=8",
        "actor_rollout_ref.model.lora.merge=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "ray_kwargs.ray_init.num_cpus=64",
    ),
}
FEWEST = {"gigpo": 200, "critic": 30, "separate": 5}
"""keys that a line has at least, beyond those of the first"""


def checked(config: DictConfig) -> None:
    """As ``main_ppo`` does with a configuration, before Ray."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        driver.validate(config, need_reference_policy(config), need_critic(config), lambda *_: None)


def reads(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> set[str]:
    """The keys that files of ``plugins/checks`` and ``plugins/config`` read during ``run``."""
    keys: set[str] = set()
    get = DictConfig._get_node
    ours = str(Path(driver.__file__).parents[1])

    def recorded(self: DictConfig, key: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while "omegaconf" in frame.f_code.co_filename:
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        if str(file).startswith(ours) and file.name not in GENERAL and frame.f_code.co_name != "leaves":
            names = [*path(self), str(key)]
            if not any(name.isdecimal() for name in names):  # of a list, which is set as a whole
                keys.add(".".join(names))
        return get(self, key, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(DictConfig, "_get_node", recorded)
        run()
    return keys


def path(node: Any) -> Iterator[str]:
    """The names that lead to ``node``."""
    if node is not None and node._key() is not None:
        yield from path(node._get_parent())
        yield str(node._key())


@pytest.mark.parametrize("line", LINES)
def test_any_value_is_answered_by_a_sentence_or_a_start(compose: Compose, monkeypatch: pytest.MonkeyPatch, line: str):
    config = compose(*LINES[line])
    OmegaConf.set_struct(config, False)
    checked(deepcopy(config))
    keys = reads(monkeypatch, lambda: checked(deepcopy(config)))
    if line == "gigpo":
        keys |= {f"turnkey.{key}" for key, _ in leaves(config.turnkey)}
    else:
        first = compose(*LINES["gigpo"])
        keys -= reads(monkeypatch, lambda: checked(first))
    assert len(keys) >= FEWEST[line]
    checked(config)  # after which the checks themselves change nothing more
    problems = [problem_with(config, key, value) for key in sorted(keys) for value in VALUES]
    assert not any(problems), "\n".join(filter(None, problems))


def problem_with(config: DictConfig, key: str, value: Any) -> str | None:
    """What is wrong with the answer to ``key=value``; None: nothing."""
    critic, reference = need_critic(config), need_reference_policy(config)
    # The driver writes with it where a value of `turnkey.agent.run` selects another loop.
    if key.startswith("turnkey.agent"):
        config = deepcopy(config)
    with changed(config, key, value):
        return problem_of(config, f"{key}={value!r}", key, critic, reference)


@contextmanager
def changed(config: DictConfig, key: str, value: Any) -> Iterator[None]:
    """``key=value`` for a while, several times as fast as in a copy."""
    node, names = config, key.split(".")
    while len(names) > 1 and isinstance(below := node._get_node(names[0]), DictConfig) and not below._is_none():
        node, names = below, names[1:]
    content = node.__dict__["_content"]
    before = content.pop(names[0], None)  # else its node would take the value
    OmegaConf.update(config, key, value, merge=False)
    try:
        yield
    finally:
        del content[names[0]]
        if before is not None:
            content[names[0]] = before


def problem_of(config: DictConfig, word: str, key: str, critic: bool, reference: bool) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            driver.validate(config, reference, critic, lambda *_: None)
    except driver.Refused as error:
        return None if key in str(error) else f"{word} is not named: {error}"
    except Exception as error:
        return f"{word}: {type(error).__name__}: {error}"
    return None
