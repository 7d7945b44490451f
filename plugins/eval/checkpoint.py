"""A checkpoint as a folder that vLLM loads: Hugging Face's as it is, verl's after verl's merger."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.eval.result import IDENTITY

WEIGHTS = ("*.safetensors", "*.bin")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NEWEST = "latest_checkpointed_iteration.txt"
MERGED, SOURCE = "model", "source.json"
ADAPTER = "lora_adapter"
"""folder for the LoRA adapter, which verl's merger writes next to the base weights"""
SAMPLED = 1 << 16
"""bytes that are hashed at each of :data:`PLACES` places of a shard"""
PLACES = 64


def weights(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face folder; none if it has no configuration."""
    if not (folder / "config.json").is_file():
        return []
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def locate(checkpoint: Path) -> Path:
    """The folder with the weights or shards of ``checkpoint``; the newest, if it is verl's folder of checkpoints."""
    folder = checkpoint.expanduser().absolute()
    if (newest := folder / NEWEST).is_file():
        folder /= f"global_step_{newest.read_text().strip()}"
    return folder / "actor" if (folder / "actor").is_dir() else folder


def name(checkpoint: Path) -> str:
    """A short name: ``global_step_N``, or the name of the folder."""
    return next((part for part in reversed(locate(checkpoint).parts) if part not in ("actor", "huggingface")), "model")


def downloaded(checkpoint: Path) -> Path:
    """``checkpoint`` itself, or the local copy of a model on the hub, such as Qwen/Qwen3-0.6B.

    Raises:
        ConfigError: no such folder, and the hub does not have the model or cannot be reached.
    """
    if checkpoint.expanduser().exists() or not HUB_NAME.fullmatch(str(checkpoint)):
        return checkpoint
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
        return Path(snapshot_download(str(checkpoint), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"--checkpoint {checkpoint}: no such folder here, and from the hub: {reason}") from None


def find(checkpoint: Path) -> tuple[Path, str | None]:
    """The folder of weights or shards, and the backend of the shards; None for a Hugging Face folder.

    ``checkpoint``: a Hugging Face folder, verl's folder of checkpoints (of which the newest counts), a
    ``global_step_N``, or its ``actor``.

    Raises:
        ConfigError: it is none of these, or has a LoRA adapter next to the weights.
    """
    folder = locate(checkpoint)
    for place in (folder, folder / "huggingface"):
        if weights(place):
            return _whole(place), None
    if any(folder.glob("model_world_size_*_rank_*.pt")):
        return folder, "fsdp"
    if any((folder / place).is_dir() for place in ("dist_ckpt", "model/dist_ckpt")):
        return folder, "megatron"
    raise ConfigError(
        f"--checkpoint {checkpoint}: neither a Hugging Face folder (config.json and *.safetensors) nor a "
        "verl checkpoint (global_step_N with actor/model_world_size_*.pt)"
    )


def resolve(checkpoint: Path, out: Path, trust_remote_code: bool = False) -> Path:
    """The Hugging Face folder of ``checkpoint``; verl's shards are merged into ``<out>/model``, once.

    Raises:
        ConfigError: as :func:`find`, or verl's merger fails.
    """
    folder, backend = find(checkpoint)
    return folder if backend is None else _whole(_merged(folder, backend, out / MERGED, trust_remote_code))


def check_shards(checkpoint: Path, out: Path) -> None:
    """Check that ``out`` holds no evaluation of other weights, before shards are merged, which takes minutes.

    Other shards that look alike here are detected later, by the hash of the merged weights.

    Raises:
        ConfigError: ``out`` holds an evaluation of other shards, or of a server; or as :func:`find`.
    """
    folder, backend = find(checkpoint)
    if backend is None or not (out / IDENTITY).is_file():
        return
    model = json.loads((out / IDENTITY).read_text(encoding="utf-8")).get("model", {})
    other = f"the model {model['name']} of a server" if "name" in model else None
    if other is None and (record := out / MERGED / SOURCE).is_file():
        before = json.loads(record.read_text())
        if before["sampled"] != _sampled(folder):
            other = f"the shards in {before['folder']}"
    if other is not None:
        raise ConfigError(
            f"{out} holds another evaluation, of {other}, not of {folder}\n"
            "Give another --out, or --new to delete that one"
        )


def _shards(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and "optim" not in path.name)


def _sampled(folder: Path) -> list[list[Any]]:
    """Name, size and a hash of some pieces of each shard; other shards may, rarely, have the same."""
    samples: list[list[Any]] = []
    for path in _shards(folder):
        size, digest = path.stat().st_size, hashlib.sha256()
        with path.open("rb") as file:
            for place in range(PLACES):
                file.seek(place * max(0, size - SAMPLED) // (PLACES - 1))
                digest.update(file.read(SAMPLED))
        samples.append([str(path.relative_to(folder)), size, digest.hexdigest()])
    return samples


def _whole(folder: Path) -> Path:
    """``folder``, if it has no LoRA adapter: vLLM would load the weights without it."""
    for adapter in (folder, folder / ADAPTER):
        if (adapter / "adapter_config.json").is_file():
            base, merged = ("BASE" if adapter == folder else str(folder)), f"{folder}-with-adapter"
            raise ConfigError(
                f"{adapter} is a LoRA adapter, which would be left out. Merge it into the weights with peft, and give "
                f"--checkpoint {merged}:\n"
                "  from peft import PeftModel\n"
                "  from transformers import AutoModelForCausalLM, AutoTokenizer\n"
                f"  model = AutoModelForCausalLM.from_pretrained({base!r}, dtype='auto')\n"
                f"  model = PeftModel.from_pretrained(model, {str(adapter)!r}).merge_and_unload()\n"
                f"  model.save_pretrained({merged!r})\n"
                f"  AutoTokenizer.from_pretrained({base!r}).save_pretrained({merged!r})"
            )
    return folder


def _merged(folder: Path, backend: str, target: Path, trust_remote_code: bool) -> Path:
    """Merge the shards, unless ``target`` is already the result of these shards."""
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in _shards(folder)]
    record = target / SOURCE
    if weights(target) and record.is_file() and json.loads(record.read_text())["files"] == files:
        return target
    source = {"folder": str(folder), "files": files, "sampled": _sampled(folder)}
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    command = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", backend]
    command += ["--local_dir", str(folder), "--target_dir", str(part)]
    command += ["--trust-remote-code"] if trust_remote_code else []
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ))
    if done.returncode or not weights(part):
        raise ConfigError(f"verl's merger cannot merge {folder}:\n{done.stdout[-3000:]}")
    (part / SOURCE).write_text(json.dumps(source))
    shutil.rmtree(target, ignore_errors=True)
    part.replace(target)
    return target
