"""The user's files of a run: found by the roles of fields, hashed, compared between starts."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.plugins.config import roles
from verl_turnkey.plugins.config.leaves import sources
from verl_turnkey.plugins.log.sources import (
    COPIES,
    MOST_BYTES,
    changes,
    copies,
    digests,
    keep_copies,
    record,
    without_secrets,
)
from verl_turnkey.plugins.log.writer import sha256


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every kind of file that a line may name."""
    monkeypatch.chdir(tmp_path)
    names = ("env.py", "server.py", "prompt.txt", "paid.py", "tools.yaml", "agent/main.py", "agent/sub/tool.py")
    hidden = tuple(f"agent/{part}/x.py" for part in (".venv", "lib/site-packages", "__pycache__", "node_modules"))
    for name in (*names, *hidden, "mylab/__init__.py", "mylab/envs/maze.py", "mylab/util.py", "mylab/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    servers = {"pad": {"command": "python", "args": ["server.py"]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return tmp_path


PACKAGE = ["mylab/__init__.py", "mylab/util.py", "mylab/envs/maze.py"]
ROLLOUT = "actor_rollout_ref.rollout.multi_turn"


@pytest.mark.parametrize(
    ("key", "value", "names"),
    [
        ("turnkey.modules", ["env.py"], ["env.py"]),
        ("turnkey.modules", ["mylab.envs.maze", "env.py"], [*PACKAGE, "env.py"]),
        ("turnkey.modules", ["json", "verl_turnkey.envs", "nowhere.at_all"], []),
        ("turnkey.agent.run", "mylab.envs.maze:play", PACKAGE),
        ("turnkey.agent.run", "env.py:play", ["env.py"]),
        ("turnkey.agent.run", ["python", "{here}/agent/main.py"], ["main.py"]),
        ("turnkey.agent.readable", ["agent"], ["agent/main.py", "agent/sub/tool.py"]),
        ("turnkey.mcp.servers", "mcp.json", ["mcp.json", "server.py"]),
        ("turnkey.rollout.template", "prompt.txt", ["prompt.txt"]),
        ("turnkey.rollout.template", "default", []),
        ("turnkey.rollout.action_format", "json", []),
        ("turnkey.rewards", [{"name": "mylab.util:paid"}, {"name": "step"}], PACKAGE),
        ("turnkey.env.kwargs", {"data": "mylab/notes.txt", "label": "prompt.txt"}, ["notes.txt"]),
        (f"{ROLLOUT}.tool_config_path", "tools.yaml", ["tools.yaml"]),
        ("reward.custom_reward_function.path", "paid.py", ["paid.py"]),
        ("actor_rollout_ref.model.external_lib", "mylab.util", PACKAGE),
        ("turnkey.agent.cwd", "agent", []),
    ],
)
def test_the_files_of_each_field(here: Path, key: str, value: Any, names: list[str]) -> None:
    config: dict[str, Any] = {}
    node = config
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = json.loads(json.dumps(value).replace("{here}", str(here)))
    assert [*sources(config)] == ([key] if names else [])
    assert list(sources(config).get(key, {})) == names
    assert all(isinstance(path, Path) and path.is_file() for path in sources(config).get(key, {}).values())


def test_two_files_of_one_name_are_both_there(here: Path) -> None:
    files = sources({"turnkey": {"modules": ["env.py", "agent/env.py"]}})["turnkey.modules"]
    assert list(files) == ["env.py"]
    (here / "agent" / "env.py").touch()
    files = sources({"turnkey": {"modules": ["env.py", "agent/env.py"]}})["turnkey.modules"]
    assert list(files.values()) == [Path("env.py"), Path("agent/env.py")]


def test_a_record_has_hashes_and_versions(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_prompts(path: Path) -> str:
        if path.name == "prompt.txt":
            raise RuntimeError
        return sha256(path)

    monkeypatch.setattr("verl_turnkey.plugins.log.sources.sha256", refuse_prompts)
    files = {name: here / name for name in ("env.py", "gone.py", "agent", "prompt.txt")}
    digest = hashlib.sha256(b"# env.py\n").hexdigest()
    facts = record({"turnkey.modules": {**files, "acme": "1.2"}})
    assert facts == {
        "turnkey.modules": {"env.py": {"path": str(here / "env.py"), "sha256": digest}, "acme": {"version": "1.2"}}
    }
    assert digests(facts) == {"env.py": digest[:12], "acme": "1.2"}


def test_of_absolute_paths_in_a_command_only_python_files_count(here: Path) -> None:
    command = ["bwrap", "--ro-bind", "/", "/", "python", f"{here}/env.py", f"{here}/agent", f"{here}/prompt.txt"]
    assert sources({"turnkey": {"agent": {"run": command}}}) == {"turnkey.agent.run": {"env.py": here / "env.py"}}


def test_a_folder_in_the_arguments_of_a_server_is_not_searched(here: Path) -> None:
    servers = {"files": {"command": "npx", "args": ["server-filesystem", str(here / "agent"), "/"]}}
    assert sources({"turnkey": {"mcp": {"servers": servers}}}) == {}


def test_of_a_large_folder_the_first_files_are_on_record(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles, "MOST_FILES", 2)
    for number in range(3):
        (here / "agent" / f"{number}.py").touch()
    (here / "agent" / "00.py").symlink_to("nowhere")
    files = sources({"turnkey": {"agent": {"readable": ["agent"]}}})["turnkey.agent.readable"]
    assert list(files) == ["agent/0.py", "agent/1.py"]


def test_an_installed_package_is_on_record_by_its_version(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "site-packages" / "acme_lib").mkdir(parents=True)
    (here / "site-packages" / "acme_lib" / "__init__.py").touch()
    metadata = here / "site-packages" / "acme-1.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.2\n")
    (metadata / "top_level.txt").write_text("acme_lib\n")
    monkeypatch.syspath_prepend(str(here / "site-packages"))
    assert sources({"turnkey": {"modules": ["acme_lib.envs"]}}) == {"turnkey.modules": {"acme": "1.2"}}


def test_a_package_is_what_python_would_import(here: Path) -> None:
    for name in ("mylab.py", "env/notes.py", "plain/part.py", "yaml/x.py"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    modules = {name: list(sources({"turnkey": {"modules": [name]}})["turnkey.modules"]) for name in ("env", "plain")}
    assert modules == {"env": ["env.py"], "plain": ["plain/part.py"]}
    assert list(sources({"turnkey": {"modules": ["mylab"]}})["turnkey.modules"]) == PACKAGE
    [(name, version)] = sources({"turnkey": {"modules": ["yaml"]}})["turnkey.modules"].items()
    assert (name, type(version)) == ("PyYAML", str)


def test_changes_between_starts() -> None:
    def start(step: int, **hashes: str) -> dict[str, Any]:
        files = {name: {"path": f"/{name}", "sha256": digest * 64} for name, digest in hashes.items()}
        return {"resumed_from": step, "sources": {"turnkey.modules": files}}

    starts = [start(0, env="a", old="b"), {"resumed_from": 3}, start(5, env="c", old="b"), start(8, env="c", new="d")]
    assert digests(starts[0]["sources"]) == {"env": "a" * 12, "old": "b" * 12}
    assert [tuple(row.values()) for row in changes(starts)] == [
        (3, 5, "env", "a" * 12, "c" * 12),
        (4, 8, "new", None, "d" * 12),
        (4, 8, "old", "b" * 12, None),
    ]


# --- copies -----------------------------------------------------------------------------------------------------------
def test_small_text_files_are_copied_under_their_hashes(here: Path) -> None:
    (here / "large.py").write_text("#" * (64 << 10) + "\n")
    (here / "weights.bin").write_bytes(b"\x00")
    (here / "picture.py").write_text("DATA = '" + "A" * 60_000 + "'")
    (here / "latin.txt").write_bytes("ä".encode("latin1"))
    names = ("env.py", "prompt.txt", "tools.yaml", "large.py", "weights.bin", "latin.txt", "picture.py")
    facts = record({"turnkey.modules": {name: here / name for name in names}})
    (here / "prompt.txt").write_text("edited since")
    keep_copies(facts, here / "log")
    kept = copies(facts, here / "log")
    assert {name: path.read_text() for name, path in kept.items()} == {
        "env.py": "# env.py\n",
        "tools.yaml": "# tools.yaml\n",
    }
    assert (here / "log" / COPIES).stat().st_mode & 0o777 == 0o700


def test_all_copies_of_a_log_have_a_bound(here: Path) -> None:
    for number in range(40):
        (here / f"{number}.txt").write_text(f"{number:02}" + "word " * 12_000)
    for begin in (0, 20):  # two starts
        facts = record({"turnkey.modules": {str(n): here / f"{n}.txt" for n in range(begin, begin + 20)}})
        keep_copies(facts, here / "log")
    sizes = [path.stat().st_size for path in (here / "log" / COPIES).iterdir()]
    assert len(sizes) == MOST_BYTES // 60_002


def test_no_name_leads_out_of_the_folder(here: Path) -> None:
    (here / "log" / COPIES).mkdir(parents=True)
    (here / "secret.py").write_text("outside")
    digest = "a" * 64
    (here / "log" / COPIES / f"{digest}.py").symlink_to(here / "secret.py")
    hostile = {
        "../../secret.py": {"path": "../../secret.py", "sha256": "../../secret"},
        "link.py": {"path": "link.py", "sha256": digest},
        "/etc/passwd": {"path": "/etc/passwd", "sha256": digest},
    }
    assert copies({"turnkey.modules": hostile}, here / "log") == {}
    (here / "env.py").rename(here / "a\nb.py")
    facts = record({"turnkey.modules": {"../../a.py": here / "a\nb.py"}})
    keep_copies(facts, here / "log")
    assert [path.parent for path in copies(facts, here / "log").values()] == [here / "log" / COPIES]


@pytest.mark.parametrize(
    ("text", "ending", "copy"),
    [
        ('API_KEY = "abc-123"\ncall(abc-123)', ".py", 'API_KEY = "***"\ncall(***)'),
        ("headers = {'api_key': 'k1', \"x\": 1}", ".py", "headers = {'api_key': '***', \"x\": 1}"),
        ('os.environ["WANDB_API_KEY"] = "q7"', ".py", 'os.environ["WANDB_API_KEY"] = "***"'),
        ('def f(api_key: str = "q7"): ...', ".py", 'def f(api_key: str = "***"): ...'),
        ("password = (\n    'q7')", ".py", "password = (\n    '***')"),
        ('os.getenv("API_KEY", "q7")', ".py", 'os.getenv("API_KEY", "***")'),
        ("{api_key: q7, x: 1}", ".yaml", "{api_key: ***, x: 1}"),
        ("token:\n  q7", ".yaml", "token:\n  ***"),
        ('{"headers": {"X": "q7"}}', ".json", '{"headers": {"X": "***"}}'),
        ("password: hunter2 # mine\nname: b", ".yaml", "password: ***\nname: b"),
        ('{"access_token": "t"}', ".json", '{"access_token": "***"}'),
        ("https://me:pw@host/x", ".txt", "https://***@host/x"),
        ("def play(token: str, tokens=8):", ".py", "def play(token: str, tokens=8):"),
    ],
)
def test_a_copy_has_no_secrets(text: str, ending: str, copy: str) -> None:
    assert without_secrets(text, ending) == copy


def test_the_configuration_of_servers_is_not_copied(here: Path) -> None:
    facts = record(sources({"turnkey": {"mcp": {"servers": "mcp.json"}}}))
    keep_copies(facts, here / "log")
    assert [*copies(facts, here / "log")] == ["server.py"]
