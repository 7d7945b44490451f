"""What a launch line says, before Hydra reads it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from typer.testing import CliRunner
from write_tables import COMBINED, names

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config import machine, presets
from verl_turnkey.plugins.config.command_line import check, program, refuse
from verl_turnkey.plugins.config.leaves import every
from verl_turnkey.plugins.config.overrides import override, read, values
from verl_turnkey.plugins.config.resolve import absolute_paths
from verl_turnkey.plugins.config.roles import Leaf

LINES = yaml.safe_load((Path(__file__).parents[3] / "data" / "command_lines.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("line", LINES["refused"])
def test_refused(line):
    with pytest.raises(ConfigError) as error:
        check(line.split())
    for word in LINES["refused"][line]:
        assert word in str(error.value)


OF_METHODS = [f"+turnkey={name} algorithm.adv_estimator={name}" for name in names() if name != "base"]


@pytest.mark.parametrize("line", [*LINES["passes"], *OF_METHODS])
def test_passes(line):
    check(line.split())


def test_all_keys_of_another_framework_are_named_at_once():
    keys = ["algorithm.gigpo.mode=mean_norm", "env.max_steps=50", "env.alfworld.eval_dataset=eval_in_distribution"]
    with pytest.raises(ConfigError) as error:
        check(["+turnkey=gigpo", "algorithm.adv_estimator=gigpo", *keys])
    _, *rows = str(error.value).partition("\nWhat else differs")[0].splitlines()
    assert [row.split(": ")[0].strip() for row in rows] == keys
    assert "turnkey.env.kwargs" in rows[2]


def test_the_choices_of_a_method_stand_after_what_is_wrong():
    with pytest.raises(ConfigError) as error:
        check(["+turnkey=gigop"])
    first, choices = str(error.value).splitlines()
    assert first.endswith("did you mean 'gigpo'?")
    assert choices == f"choices: {', '.join(sorted([*names(), *COMBINED]))}"


def test_refuse_ends_with_the_message_alone_or_shows_everything(monkeypatch, capsys):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as exit:
        refuse(["+turnky=gigpo"])
    assert exit.value.code == 1
    assert (
        capsys.readouterr().err == "verl-turnkey: +turnky=gigpo: there is no 'turnky'; did you mean +turnkey=gigpo?\n"
    )
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ConfigError):
        refuse(["+turnky=gigpo"])


def test_the_version_is_printed():
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.output) == (0, f"verl-turnkey {version('verl-turnkey')}\n")


def test_turnkey_train_refuses_what_the_run_would():
    played = launch.Played("turnkey/MiniGrid-v0", recipe="babyai")
    sizes: dict[str, Any] = {"device": "cpu", "gpus": 1, "steps": 1, "tasks": Path("t"), "out": Path("o")}
    launch.overrides(played, model="m", method="gigpo", **sizes)
    with pytest.raises(ConfigError, match=r"no method 'grpo'; here, grpo is grpo_steps: \+turnkey=grpo_steps"):
        launch.overrides(played, model="m", method="grpo", **sizes)


def test_turnkey_train_leaves_to_a_preset_what_it_sets():
    sizes: dict[str, Any] = {"device": "gpu", "gpus": 8, "steps": 7, "tasks": Path("t"), "out": Path("o")}
    played = launch.Played("turnkey/Search-v0", recipe="search")
    further = ["+turnkey/preset=gigpo_search_7b", "actor_rollout_ref.actor.optim.lr=2e-6"]
    lines = launch.overrides(played, model="m", method="gigpo", further=further, **sizes)
    words = [word for line in lines for word in line]
    keys = {word.lstrip("+").partition("=")[0] for word in words}
    own = {"actor_rollout_ref.rollout.gpu_memory_utilization", "trainer.total_training_steps", "trainer.test_freq"}
    assert own <= keys
    preset = {setting.key for setting in presets.read("gigpo_search_7b").settings}
    assert (keys & preset) - own == {"actor_rollout_ref.actor.optim.lr", "trainer.total_epochs", "trainer.save_freq"}
    assert "turnkey.rollout.max_tokens_per_turn" not in keys
    assert "trainer.total_training_steps=7" in words


@pytest.mark.parametrize(
    ("file", "name"),
    [
        (
            "/opt/verl/verl/experimental/one_step_off_policy/main_ppo.py",
            "verl.experimental.one_step_off_policy.main_ppo",
        ),
        ("/opt/verl/trainer/main_ppo.py", "verl.trainer.main_ppo"),
        ("/home/me/train.py", ""),
        (None, ""),
    ],
)
def test_the_main_program_by_its_file(monkeypatch, file, name):
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__spec__=None, __file__=file))
    assert program() == name


def test_programs_with_trainers_of_their_own_are_named():
    own = "verl.experimental.fully_async_policy.fully_async_main"
    with pytest.raises(ConfigError, match=rf"turnkey\.groups\.keep=0\.5: {own}.*turnkey_separate_async"):
        check(["algorithm.adv_estimator=grpo", "turnkey.groups.keep=0.5"], own)
    check(["algorithm.adv_estimator=grpo"], own)
    for name in ("verl.trainer.main_ppo", "mine.main", ""):
        check(["+turnkey=gigpo"], name)


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["+turnkey=gigpoo"], "did you mean 'gigpo'"),
        (["+turnkey=gigpo", "turnkey.credit.gamm=1"], "did you mean 'gamma'"),
        (["+turnkey=gigpo", "turnkey.credit.gamma=1"], None),
        (["+turnkey=mine"], None),
        (["+turnkey/env=ours"], None),
    ],
)
def test_misspellings_beside_own_configuration_files_are_told_from_own_choices(tmp_path, words, refused):
    (tmp_path / "my.yaml").write_text("hydra: {searchpath: [pkg://verl.trainer.config]}\ndefaults: [ppo_trainer]\n")
    for name in ("turnkey/mine.yaml", "turnkey/env/ours.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("")
    for options in (["--config-path", str(tmp_path)], [f"--config-path={tmp_path}"], ["-cp", str(tmp_path)]):
        if refused is None:
            check([*options, *words])
        else:
            with pytest.raises(ConfigError, match=refused):
                check([*options, *words])
    (tmp_path / "my.yaml").write_text("hydra: {searchpath: [file:///elsewhere]}\n")  # whose groups are not known here
    if words == ["+turnkey=gigpoo"]:
        check(["--config-path", str(tmp_path), *words])


# --- What is written as an override is what Hydra reads back ----------------------------------------------------------
HARD = "=(){}[],'\" &#;!~$\\:*?%|<>`éß日.-+@/ab01\n\t"
TEXTS = st.one_of(
    st.text(st.one_of(st.sampled_from(HARD), st.characters(codec="utf-8", exclude_characters="\0")), max_size=12),
    st.sampled_from(["null", "true", "False", "nan", "-1", "1e5", "${a}", r"\${a}", "a,b", "glob(*)", ""]),
)
PLAIN = st.one_of(TEXTS, st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False))
VALUES = st.one_of(PLAIN, st.lists(PLAIN, max_size=3), st.lists(st.lists(PLAIN, max_size=2), max_size=2))


def as_a_run_sees_it(word: str) -> Any:
    tree: Any = OmegaConf.to_container(OmegaConf.create({"value": read(word)[1]}), resolve=True)
    return tree["value"]


@given(VALUES)
@example("ends with \\")
@example("""both ' and " and \\' and \\\\" """)
@example(r"\\${a}")
def test_hydra_reads_back_what_was_meant(value):
    word = override("+a.key", value)
    assert read(word)[0] == "a.key"
    assert as_a_run_sees_it(word) == value
    assert type(as_a_run_sees_it(word)) is type(value)


@given(TEXTS)
def test_a_path_is_its_text(text):
    path = Path("/", text)
    assert as_a_run_sees_it(override("key", [path])) == [str(path)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("/data/runs-1.2/a_b", "/data/runs-1.2/a_b"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("a b", '"a b"'),
        ("true", '"true"'),
        (True, "true"),
        (1e-6, "1e-6"),
        (["console", "file"], "[console,file]"),
        (["/a,b/env.py"], '["/a,b/env.py"]'),
    ],
)
def test_quotes_only_where_they_are_needed(value, text):
    assert override("key", value) == f"key={text}"


def test_what_hydra_cannot_read_is_named():
    with pytest.raises(ConfigError, match=r"key=\[a: Hydra cannot read this override"):
        read("key=[a")


def test_the_values_of_a_key_in_their_order():
    assert values(["a.b=1", "++a.b='x y'", "a.bc=3", "--config-name=a.b"], "a.b") == [1, "x y"]


def test_turnkey_train_writes_no_path_that_hydra_reads_otherwise():
    folder = Path("/home/é (x), [y] {z}='q' \"d\" & #;!~/it")
    played = launch.Played("turnkey/MiniGrid-v0", module=folder / "a,b.py")
    lines = launch.overrides(
        played, model=str(folder), method="gigpo", device="cpu", gpus=1, steps=1, tasks=folder, out=folder
    )
    (words,) = [[word for line in lines for word in line]]
    assert as_a_run_sees_it(next(w for w in words if w.startswith("turnkey.modules="))) == [str(folder / "a,b.py")]
    for key in ("actor_rollout_ref.model.path", "trainer.default_local_dir", "hydra.run.dir"):
        assert values(words, key)[-1].startswith(str(folder))


def test_overrides_of_the_user_are_read_as_hydra_reads_them():
    further = ["turnkey.env.kwargs.level='a b'", "+turnkey.env.kwargs.more={size: 3}", "turnkey.env.kwargs.more.size=4"]
    kwargs = launch.resolve("turnkey/FrozenLake-v0", further).kwargs
    assert {"level": "a b", "more": {"size": 4}}.items() <= kwargs.items()


# --- A configuration is composed for the words alone, whatever the arguments of the program are -----------------------
CODE = """
import sys
from verl_turnkey.plugins.config.composing import composed
config = composed(["+turnkey=gigpo"])
print(config.algorithm.adv_estimator, sys.argv[1:])
"""


def test_arguments_of_the_program_are_no_launch_line():
    arguments = ["+turnkey=nosuch", "turnkey.rollout.max_turn=3"]
    done = subprocess.run([sys.executable, "-c", CODE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"gigpo {arguments}"


# --- What a field of the configuration is: every one says it, and paths are made absolute by it -----------------------
OWN = {"name": "mine.py:reward", "file": "part one"}


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        (OWN, {**OWN, "name": "{here}/mine.py:reward"}),
        ({"name": "arena", "compare": "mine.py:better"}, {"name": "arena", "compare": "{here}/mine.py:better"}),
        ({"name": "verl", "path": "mine.py"}, {"name": "verl", "path": "{here}/mine.py"}),
        ({"name": "judge", "cache": "kept"}, {"name": "judge", "cache": "{here}/kept"}),
        ({"name": "contrastive", "file": "b.json"}, {"name": "contrastive", "file": "{here}/b.json"}),
        ({"name": "arena", "compare": "package.module:better"}, None),
        ({"name": "verl", "path": "file:///there/mine.py"}, None),
        ({"name": "judge", "cache": "s3://kept"}, None),
    ],
)
def test_those_of_a_component_stay_right_in_other_folders(tmp_path, monkeypatch, entry, expected):
    """Of the episode's rewards, and of the one by which a strategy judges answers."""
    monkeypatch.chdir(tmp_path)
    strategy = {"name": "probe", "reward": entry}
    config = OmegaConf.create({"turnkey": {"rewards": [{"name": "step"}, entry], "rollout": {"strategy": strategy}}})
    change = absolute_paths(config)
    assert (change is None) == (expected is None)
    there = {key: value.format(here=tmp_path) for key, value in (expected or entry).items()}
    assert OmegaConf.to_container(config.turnkey) == {
        "rewards": [{"name": "step"}, there],
        "rollout": {"strategy": {"name": "probe", "reward": there}},
    }


def test_every_field_says_what_it_is():
    """A new field is annotated, as ``Played[...]``; without a use no list that loops over fields would know of it."""
    lacking = [key for key, leaf in every().items() if leaf.use is None]
    assert not lacking, f"say what these decide, with the words of plugins/config/roles.py: {', '.join(lacking)}"
    assert len(every()) > 130
    assert Leaf.of("turnkey.x", int | None).use is None


PAD = {"command": "python", "args": ["serve.py", "gone.py"], "cwd": None}


@pytest.mark.parametrize(
    ("key", "value", "absolute"),
    [
        ("turnkey.mcp.servers", "mcp.json", "{here}/mcp.json"),
        ("turnkey.mcp.servers", {"pad": PAD}, {"pad": {**PAD, "args": ["{here}/serve.py", "gone.py"]}}),
        ("turnkey.mcp.servers", {"pad": {**PAD, "cwd": "x"}}, {"pad": {**PAD, "cwd": "{here}/x"}}),
        ("turnkey.agent.readable", ["tools", "/usr/lib"], ["{here}/tools", "/usr/lib"]),
        ("turnkey.agent.run", "serve.py:play", "{here}/serve.py:play"),
        ("turnkey.agent.run", ["python", "serve.py"], ["python", "serve.py"]),
        ("turnkey.prm.path", "model", "{here}/model"),
        ("turnkey.prm.path", "some/name", "some/name"),
        ("turnkey.teacher.source", {"name": "serve.py:text"}, {"name": "{here}/serve.py:text"}),
        ("turnkey.rollout.template", "default", "default"),
        ("turnkey.rollout.template", "serve.py", "{here}/serve.py"),
        ("turnkey.rollout.examples", [{"observation": "serve.py", "action": "x"}], None),
        ("turnkey.env.kwargs", {"data": "model", "name": "model"}, {"data": "{here}/model", "name": "model"}),
        ("turnkey.log.trajectories", "~/log", "{home}/log"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "serve.py", "{here}/serve.py"),
        ("actor_rollout_ref.rollout.multi_turn.tool_config_path", "of/verl.yaml", "of/verl.yaml"),
    ],
)
def test_paths_are_absolute_for_workers_elsewhere(tmp_path, monkeypatch, key, value, absolute):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/somewhere")
    (tmp_path / "model").mkdir()
    for name in ("serve.py", "default"):
        (tmp_path / name).touch()
    config = OmegaConf.create({})
    OmegaConf.update(config, key, value)
    absolute_paths(config)
    expected = json.dumps(absolute or value).replace("{here}", str(tmp_path)).replace("{home}", "/somewhere")
    left = OmegaConf.select(config, key)
    assert (OmegaConf.to_container(left) if OmegaConf.is_config(left) else left) == json.loads(expected)


@pytest.mark.parametrize("path", ["off the rails", "a/b", "/not/here", "s3://bucket/model"])
def test_a_model_that_is_not_here_has_no_folder(path: str):
    assert machine.model_folder(path) is None
