"""A checkpoint as a folder that vLLM loads: one of Hugging Face as it is, one of verl's merged by verl's merger."""

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
from verl_turnkey.plugins.eval.samples import IDENTITY

WEIGHTS = ("*.safetensors", "*.bin")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NEWEST = "latest_checkpointed_iteration.txt"
MERGED, SOURCE = "model", "source.json"
ADAPTER = "lora_adapter"
"""where verl's merger writes what LoRA has learnt, beside the weights that it started from"""
SAMPLED = 1 << 16
"""bytes of a shard, at each of :data:`PLACES` places"""
PLACES = 64


def weights(folder: Path) -> list[Path]:
    """The files with weights of a Hugging Face folder; none if it has no configuration."""
    if not (folder / "config.json").is_file():
        return []
    return next((files for pattern in WEIGHTS if (files := sorted(folder.glob(pattern)))), [])


def locate(checkpoint: Path) -> Path:
    """The folder with the weights or shards of ``checkpoint``; of all checkpoints of verl's that of the newest."""
    folder = checkpoint.expanduser().absolute()
    if (newest := folder / NEWEST).is_file():
        folder /= f"global_step_{newest.read_text().strip()}"
    return folder / "actor" if (folder / "actor").is_dir() else folder


def name(checkpoint: Path) -> str:
    """A short name: ``global_step_N``, or that of the folder."""
    return next((part for part in reversed(locate(checkpoint).parts) if part not in ("actor", "huggingface")), "model")


def downloaded(checkpoint: Path) -> Path:
    """``checkpoint``, or where it is not a folder but a name on the hub, such as Qwen/Qwen3-0.6B: its local copy.

    Raises:
        ConfigError: there is no such folder, and the hub has no such model or cannot be reached.
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
    """The folder behind ``checkpoint`` and the backend of its shards; None: it is one of Hugging Face.

    ``checkpoint``: a Hugging Face folder; or of verl's the folder with all checkpoints (the newest counts), one
    ``global_step_N``, or its ``actor``.

    Raises:
        ConfigError: it is none of these, or has a LoRA adapter beside the weights.
    """
    folder = locate(checkpoint)
    for place in (folder, folder / "huggingface"):
        if weights(place):
            return _whole(place), None
    if (backend := _backend(folder)) is None:
        raise ConfigError(
            f"--checkpoint {checkpoint}: neither a Hugging Face folder (config.json and *.safetensors) nor a "
            "verl checkpoint (global_step_N with actor/model_world_size_*.pt)"
        )
    return folder, backend


def resolve(checkpoint: Path, out: Path, trust_remote_code: bool = False) -> Path:
    """The Hugging Face folder behind ``checkpoint``; shards of verl are merged into ``<out>/model``, once.

    Raises:
        ConfigError: as :func:`find`, or verl's merger fails.
    """
    folder, backend = find(checkpoint)
    return folder if backend is None else _whole(_merged(folder, backend, out / MERGED, trust_remote_code))


def check_shards(checkpoint: Path, out: Path) -> None:
    """Refuse other shards than those whose evaluation is in ``out``, before they are merged, which takes minutes.

    Where nothing tells yet that they are others, the hash of the merged weights does later.

    Raises:
        ConfigError: an evaluation of other shards, or of a server, is in ``out``; or as :func:`find`.
    """
    folder, backend = find(checkpoint)
    if backend is None or not (out / IDENTITY).is_file():
        return
    model = json.loads((out / IDENTITY).read_text(encoding="utf-8")).get("model", {})
    there = f"the model {model['name']} of a server" if "name" in model else None
    if there is None and (record := out / MERGED / SOURCE).is_file():
        before = json.loads(record.read_text())
        if before["sampled"] != _sampled(folder):
            there = f"the shards in {before['folder']}"
    if there is not None:
        raise ConfigError(
            f"{out} holds another evaluation, of {there}, not of {folder}\n"
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
    """``folder``, if its weights are all there is: vLLM would load them without an adapter that lies beside them."""
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


def _backend(folder: Path) -> str | None:
    if any(folder.glob("model_world_size_*_rank_*.pt")):
        return "fsdp"
    return "megatron" if any((folder / place).is_dir() for place in ("dist_ckpt", "model/dist_ckpt")) else None


def _merged(folder: Path, backend: str, target: Path, trust_remote_code: bool) -> Path:
    """Merge unless ``target`` is what these very shards came to."""
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
