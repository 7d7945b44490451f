"""The page "From your API or simulator to an environment": its code and its commands run, in the order of the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import gymnasium
import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_turnkey.envs import make
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.cli.main import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "own-environment.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(text.replace("\\\n", " ")) for language, text in BLOCKS if language == "bash"]


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
    check, tasks, evaluate, train, warm, check_tools = COMMANDS
    assert run(check).splitlines()[-1] == "all good"
    run(tasks)
    assert len(pd.read_parquet("data/train.parquet")) == 64
    printed = run(train)
    assert f"turnkey.modules=[{folder}/parcels.py]" in printed.replace("'", "").replace('"', "")
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
