"""Whatever value a key has: the checks let it pass, or refuse it in a sentence that names the key.

The keys are those that the checks read, recorded while they do.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import verl
from contract_tools import Compose
from launch_lines import TABLE
from omegaconf import DictConfig, OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy

from verl_turnkey.plugins.checks import driver
from verl_turnkey.plugins.checks.keys import FORMER, READ_BY_KEY, UNLISTED, verls_keys
from verl_turnkey.plugins.config.foreign_keys import foreign
from verl_turnkey.plugins.config.recipe_files import leaves

VALUES = (None, "off the rails", -3, [1])
# Those that go through all of verl's keys, and treat them alike: a rule of theirs is tested in test_kinds.py.
GENERAL = ("values.py",)
LINES = {name: line.split() for name, line in TABLE["any_value"].items()}
FEWEST = {"gigpo": 200, "critic": 30, "separate": 5}
"""keys that a line sets, or has beyond those of the first: so many at least"""


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


@pytest.mark.timeout(1800)  # a thousand checks of a whole configuration
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
        own = {word.lstrip("+").partition("=")[0] for word in LINES[line]}
        keys -= reads(monkeypatch, lambda: checked(first)) - own
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


# --- keys that nobody reads -------------------------------------------------------------------------------------------


SOURCE = Path(verl.__file__).parent
# The trainers of V1 and what they call; recipes and the former trainer have keys of their own.
READERS = ("trainer/main_ppo.py", "trainer/ppo/*.py", "trainer/ppo/v1/**/*.py", "utils/**/*.py", "workers/**/*.py")
READERS += ("experimental/agent_loop/*.py", "experimental/reward_loop/**/*.py")
_READ = re.compile(
    r"\bconfig((?:\.[a-z_0-9]+(?![a-z_0-9(]))*)\.get\(\s*[\"']([a-z_0-9]+)[\"']|\bconfig((?:\.[a-z_0-9]+)+)"
)
METHODS = {"get", "items", "keys", "pop", "update", "copy", "values"}


def keys_read() -> set[str]:
    """What the source reads of a whole configuration: ``config.data.get("seed")``, ``config.trainer.nnodes``."""
    read = set()
    for pattern in READERS:
        for path in SOURCE.glob(pattern):
            for node, name, plain in _READ.findall(path.read_text(encoding="utf-8")):
                parts = [*(node or plain).split("."), name] if name else plain.split(".")
                read.add(".".join(part for part in parts if part and part not in METHODS))
    return read


def test_what_verl_reads_is_known():
    read = {key for key in keys_read() if key.rpartition(".")[0] in READ_BY_KEY}
    assert len(read) >= 60
    assert read - verls_keys() - UNLISTED == set()


def test_what_verls_dataset_reads_is_known():
    text = (SOURCE / "utils/dataset/rl_dataset.py").read_text(encoding="utf-8")
    read = {f"data.{name}" for name in re.findall(r"\bconfig\.get\(\s*\"([a-z_]+)\"", text)}
    assert len(read) >= 15
    assert read - verls_keys() <= UNLISTED


@pytest.mark.parametrize("key", sorted({*UNLISTED, *FORMER}))
def test_the_tables_hold_no_key_of_verls_files(key):
    assert key not in verls_keys()


def test_no_key_of_verls_is_taken_for_another_frameworks():
    assert [key for key in verls_keys() if foreign(key)] == []
