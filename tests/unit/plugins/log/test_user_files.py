"""The user's files of a run: found by the roles of fields, hashed, copied without secrets, compared between starts."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.plugins.config.leaves import sources
from verl_turnkey.plugins.log.masking import masked_file
from verl_turnkey.plugins.log.sources import MOST_BYTES, changes, digests, record

SECRET = "Zx81-hunter-2"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every kind of file that a line may name."""
    monkeypatch.chdir(tmp_path)
    names = ("env.py", "server.py", "prompt.txt", "paid.py", "tools.yaml", "agent/main.py", "agent/sub/tool.py")
    hidden = ("agent/.venv/x.py", "agent/lib/site-packages/y.py")
    for name in (*names, *hidden, "mylab/__init__.py", "mylab/envs/maze.py", "mylab/util.py", "mylab/notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    servers = {"pad": {"command": "python", "args": ["server.py"], "env": {"ANY": SECRET}}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": servers}))
    return tmp_path


PACKAGE = ["mylab/__init__.py", "mylab/envs/maze.py", "mylab/util.py"]
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
    assert all(path.is_file() for path in sources(config).get(key, {}).values())


def test_two_files_of_one_name_are_both_there(here: Path) -> None:
    files = sources({"turnkey": {"modules": ["env.py", "agent/env.py"]}})["turnkey.modules"]
    assert list(files) == ["env.py"]
    (here / "agent" / "env.py").touch()
    files = sources({"turnkey": {"modules": ["env.py", "agent/env.py"]}})["turnkey.modules"]
    assert list(files.values()) == [Path("env.py"), Path("agent/env.py")]


def test_a_record_has_hashes_and_copies_of_what_is_small_and_text(here: Path) -> None:
    (here / "large.py").write_bytes(b"#" * (MOST_BYTES + 1))
    (here / "weights.bin").write_bytes(b"\0")
    (here / "latin.txt").write_bytes(b"\xe4")
    names = ("env.py", "mcp.json", "large.py", "weights.bin", "latin.txt", "gone.py")
    facts = record(here / "log", {"turnkey.mcp.servers": {name: here / name for name in names}})["turnkey.mcp.servers"]
    assert [*facts] == [*names[:-1]]
    for name, fact in facts.items():
        assert (fact["path"], fact["sha256"]) == (
            str(here / name),
            hashlib.sha256((here / name).read_bytes()).hexdigest(),
        )
    assert [name for name, fact in facts.items() if fact["copy"]] == ["env.py", "mcp.json"]
    assert (here / "log" / facts["env.py"]["copy"]).read_text() == "# env.py\n"
    assert SECRET not in (here / "log" / facts["mcp.json"]["copy"]).read_text()
    assert (here / "log" / "code").stat().st_mode & 0o777 == 0o700
    (here / "env.py").write_text("# edited\n")
    edited = record(here / "log", {"turnkey.modules": {"env.py": here / "env.py"}})["turnkey.modules"]["env.py"]
    assert edited["copy"] != facts["env.py"]["copy"]
    assert len(list((here / "log" / "code").iterdir())) == 3


def test_a_copy_that_cannot_be_written_costs_the_copy(here: Path) -> None:
    (here / "log").write_text("a file where a folder should be")
    [fact] = record(here / "log", {"turnkey.modules": {"env.py": here / "env.py"}})["turnkey.modules"].values()
    assert fact["copy"] is None
    assert len(fact["sha256"]) == 64


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", f'API_KEY = "{SECRET}"'),
        ("a.py", f"api_key: str | None = '{SECRET}'"),
        ("a.py", f'os.environ["API_KEY"] = "{SECRET}"'),
        ("a.py", f'key = os.environ.get("API_KEY", "{SECRET}")'),
        ("a.py", f'call(headers={{"Authorization": f"{SECRET}"}})'),
        ("a.py", f'password = """{SECRET}"""'),
        ("a.py", f'url = "https://me:{SECRET}@host/x"'),
        ("a.sh", f"export API_KEY={SECRET}"),
        ("a.toml", f'password = "{SECRET}"'),
        ("a.jsonl", f'{{"password": "{SECRET}"}}'),
        ("a.yaml", f"tools:\n- config: {{api_key: {SECRET}}}"),
        ("a.yaml", f"# old --password {SECRET}\ntools: []"),
        ("a.json", json.dumps({"mcpServers": {"pad": {"url": "u", "headers": {"X": SECRET}}}})),
        ("a.json", json.dumps({"mcpServers": {"pad": {"args": ["--api-key", SECRET]}}})),
        ("a.py", f"use('{SECRET}')  # the value of a variable"),
    ],
)
def test_no_copy_has_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    if text.startswith("use"):
        monkeypatch.setenv("MY_API_KEY", SECRET)
    (tmp_path / name).write_text(text)
    copy = masked_file(tmp_path / name, "turnkey.mcp.servers")
    assert copy is not None
    assert SECRET not in copy
    assert "***" in copy


def test_code_without_secrets_is_copied_as_it_is(tmp_path: Path) -> None:
    for path in (Path(__file__), Path(os.path.dirname(json.__file__)) / "decoder.py"):
        (tmp_path / path.name).write_text(text := path.read_text().replace(SECRET, "x").split("SECRET =")[0])
        assert masked_file(tmp_path / path.name, "turnkey.modules") == text
    for name, text in (("a.py", "f(token=token, max_tokens=9)\n"), ("a.yaml", "a: 1  # why\nb: [x]\n")):
        (tmp_path / name).write_text(text)
        assert masked_file(tmp_path / name, "turnkey.modules") == text


@pytest.mark.parametrize("name", [".netrc", "id_rsa", "key.pem", "broken.json", "broken.yaml"])
def test_what_is_not_known_is_not_copied(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{machine: [password x")
    assert masked_file(tmp_path / name, "turnkey.agent.readable") is None


def test_changes_between_starts() -> None:
    def start(step: int, **hashes: str) -> dict[str, Any]:
        files = {name: {"path": f"/{name}", "sha256": digest * 64, "copy": None} for name, digest in hashes.items()}
        return {"resumed_from": step, "sources": {"turnkey.modules": files}}

    starts = [start(0, env="a", old="b"), {"resumed_from": 3}, start(5, env="c", old="b"), start(8, env="c", new="d")]
    assert digests(starts[0]["sources"]) == {"env": "a" * 12, "old": "b" * 12}
    assert [tuple(row.values()) for row in changes(starts)] == [
        (3, 5, "env", "a" * 12, "c" * 12),
        (4, 8, "new", None, "d" * 12),
        (4, 8, "old", "b" * 12, None),
    ]
