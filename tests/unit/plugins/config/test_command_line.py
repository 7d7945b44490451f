"""What a launch line says, before Hydra reads it."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner
from write_tables import COMBINED, names

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.command_line import check, program, refuse
from verl_turnkey.plugins.config.presets import read

# line -> words of the message
REFUSED = {
    "+turnky=gigpo": ["'turnky'", "+turnkey=gigpo"],
    "+Turnkey=gigpo": ["'Turnkey'", "+turnkey=gigpo"],
    "turnky=gigpo": ["'turnky'", "+turnkey=gigpo"],
    "+verl_turnkey=gigpo": ["'verl_turnkey'", "+turnkey=gigpo"],
    "+trunkey/env=babyai": ["'trunkey'", "+turnkey/env=babyai"],
    "+turnkey=gigpo turnky.credit.gamma=0.9": ["'turnky'", "did you mean turnkey.credit.gamma=0.9"],
    "turnkey=gigpo": ["+turnkey=gigpo"],
    "++turnkey=gigpo": ["+turnkey=gigpo", "one plus"],
    "+turnkey=gigop": ["'gigop'", "'gigpo'", "choices: a_grae, base, ", ", gigpo, "],
    "+turnkey=grpo": ["grpo is grpo_steps here", "+turnkey=base algorithm.adv_estimator=grpo"],
    "+turnkey=gtpo": ["no method 'gtpo'; gtpo is turn_norm here: +turnkey=turn_norm (`turnkey list methods gtpo`"],
    "+turnkey=igpo": ["is information_gain with the strategy", "turnkey.rollout.strategy=probe_gold"],
    "+turnkey=vineppo": ["progress with the strategy vine", "turnkey.credit.alpha=0"],
    "+turnkey=mt-grpo": ["turnkey.credit.rule=mt_grpo"],
    "+turnkey=empg": ["empg is the modifier empg here", "'turnkey.credit.modify=[empg]'"],
    "+turnkey=portool": ["is not here, the closest is tree"],
    "+turnkey=gigpo +turnkey/loss=sorl": ["no loss 'sorl'; sorl is the loss st_ppo here", "+turnkey/loss=st_ppo"],
    "+turnkey=rloo": ["'rloo'", "+turnkey=base algorithm.adv_estimator=rloo"],
    "+turnkey=gigpo +turnkey/env=babyi": ["+turnkey/env=babyi", "'babyai'", "turnkey.env.id", "choices: alfworld"],
    "+turnkey=gigpo +turnkey/modifier=rlds": ["there is no modifier 'rlds'", "'rlsd'"],
    "+turnkey/modifier=rlsd +turnkey=gigpo": ["write +turnkey=gigpo before +turnkey/modifier=rlsd"],
    "+turnkey=gigpo +turnkey/modifier=rlsd turnkey.credit.modify=[empg]": [
        "turnkey.credit.modify=[empg] replaces the modifier of +turnkey/modifier=rlsd",
        "list them all in turnkey.credit.modify",
    ],
    "+turnkey=gigpo +turnkey/loss=turn_ration": ["there is no loss 'turn_ration'", "'turn_ratio'"],
    "+turnkey=gigpo +turnkey/enviroment=babyai": ["'turnkey/enviroment'", "'turnkey/env'"],
    "+turnkey=[gigpo,hgpo]": ["+turnkey=[gigpo,hgpo]", "one choice at a time"],
    "+turnkey=gigpo +turnkey=hgpo": ["+turnkey=gigpo and +turnkey=hgpo", "one method at a time"],
    "+turnkey/env=babyai +turnkey=gigpo": ["write +turnkey=gigpo before +turnkey/env=babyai"],
    "+turnkey/loss=psft +turnkey=gigpo": ["write +turnkey=gigpo before +turnkey/loss=psft"],
    "+turnkey/preset=gigpo_webshop_7b +turnkey=gigpo": ["write +turnkey=gigpo before +turnkey/preset=gigpo_webshop_7b"],
    "+turnkey=gigpo +turnkey/preset=gigpo_webshop_7b +turnkey/env=webshop": [
        "write +turnkey/env=webshop before +turnkey/preset=gigpo_webshop_7b"
    ],
    "+turnkey=hdpo +turnkey/preset=hdpo_tools_8b +turnkey/loss=hdpo": ["write +turnkey/loss=hdpo before"],
    "+turnkey=gigpo +turnkey/preset=gigpo_webshop_8b": ["there is no preset 'gigpo_webshop_8b'", "'gigpo_webshop_7b'"],
    "+turnkey=gigpo algorithm.adv_estimator=grpo": [
        "drop algorithm.adv_estimator=grpo to train gigpo",
        "+turnkey=base algorithm.adv_estimator=grpo to train grpo",
    ],
    "algorithm.adv_estimator=rebn +turnkey=gigpo": ["drop algorithm.adv_estimator=rebn", "+turnkey=rebn to train rebn"],
    "+turnkey=gigpo algorithm.gigpo.mode=mean_norm": ["algorithm.gigpo.mode", "turnkey.credit.norm"],
    "+turnkey=gigpo +algorithm.gigpo.enable_similarity=true": ["turnkey.credit.similarity"],
    "+turnkey=gigpo +actor_rollout_ref.actor.invalid_action_penalty_coef=0.1": [
        "turnkey.rollout.invalid_action_penalty"
    ],
    "+turnkey=gigpo env.max_steps=50": ["turnkey.rollout.max_turns"],
    "+turnkey=gigpo env.resources_per_worker.num_cpus=0.1": ["turnkey.env.hosts"],
    "+turnkey=gigpo +agent_proxy.max_turn=5": ["turnkey.rollout.max_turns"],
    "+turnkey=gigpo turnkey.rollout.histori=3": ["turnkey.rollout.histori: unknown key", "'history'"],
    "+turnkey=gigpo turnkey.rollout.max_steps=3": ["turnkey.rollout.max_steps", "'max_turns'"],
    "+turnkey=gigpo turnkey.enviroment.id=x": ["turnkey.enviroment", "Known keys: agent, credit, env,"],
    "+turnkey=gigpo turnkey.credit.gama=0.9": ["turnkey.credit.gama", "'gamma'"],
    "+turnkey=gigpo turnkey.credit.mode=mean": ["turnkey.credit.mode", "'norm'"],
    "+turnkey=gigpo turnkey.credit.weights=code": ["turnkey.credit.weights: gigpo has no such parameter; hgpo has it"],
    "+turnkey=gigpo +turnkey.env=frozenlake": ["+turnkey.env=frozenlake", "write +turnkey/env=frozenlake"],
    "+turnkey=gigpo ++turnkey.preset=gigpo_webshop_7b": ["write +turnkey/preset=gigpo_webshop_7b"],
    "+turnkey=gigpo max_turns=4": ["max_turns=4: turnkey.rollout.max_turns"],
    "+turnkey=gigpo turnkey.rollout=null": ["turnkey.rollout=null drops", "turnkey.rollout.<key>"],
    "+turnkey=gigpo turnkey.device=cpu": ["write +turnkey/device=cpu"],
    "+turnkey=gigpo +turnkey/env=babyai +turnkey/env=babyai": ["one environment at a time"],
    "+turnkey=gigpo turnkey.env.kwargs.size=4": ["'size'", "needs a plus: +turnkey.env.kwargs.size=4"],
    "+turnkey=gigpo +turnkey/env=babyai turnkey.env.kwargs.levl=x": ["'levl'; did you mean 'level'?"],
    "+turnkey=gigpo --config-name=ppo_trainer trainer.nnodes=1": [
        "--config-name=ppo_trainer stands between overrides",
        "before +turnkey=gigpo or after trainer.nnodes=1",
    ],
    "+turnkey=gigpo -cn ppo_trainer --config-dir=x trainer.nnodes=1": ["write -cn, --config-dir=x before"],
    "+turnkey=gigpo +turnkey/loss=psft turnkey.loss.tau=1": ["turnkey.loss.tau: psft has no such parameter"],
}

LINES_THAT_PASS = [
    "",
    "data.train_batch_size=4 algorithm.adv_estimator=grpo +my.key=1 ~trainer.logger",
    "+env.seed=3 +trainer.turn=1 +turn.key=2 tunnel=3",  # nothing of ours: none of our business
    *(f"+turnkey={name} algorithm.adv_estimator={name}" for name in names() if name != "base"),
    "+turnkey=gigpo algorithm.adv_estimator=turnkey/gigpo",
    "+turnkey=gigpo +turnkey/env=alfworld +turnkey/preset=gigpo_alfworld_1.5b +turnkey/device=cpu trainer.test_freq=1",
    "+turnkey=gigpo algorithm.adv_estimator=grpo algorithm.adv_estimator=gigpo",  # Hydra takes the last
    "+turnkey=base algorithm.adv_estimator=grpo",
    "+turnkey=gigpo +turnkey/loss=sdar +turnkey/modifier=rlsd turnkey.teacher.source=gold_answer",
    "+turnkey/device=cpu +turnkey=gigpo +turnkey/env=babyai +turnkey/loss=psft",
    "+turnkey=gigpo +turnkey.env.kwargs.anything=1 turnkey.rewards=[{name:step}] +turnkey.env.kwargs.more=2",
    "+turnkey=hgpo turnkey.credit.weights=code +turnkey/loss=turn_ratio turnkey.loss.ratio=product",
    "+turnkey=gigpo +turnkey/env=babyai turnkey.env.kwargs.level=x ++turnkey.env.kwargs.more=1",
    "+turnkey=gigpo +turnkey/env=alfworld +turnkey/preset=gigpo_alfworld_7b turnkey.env.kwargs.split=train",
    "+turnkey=gigpo +turnkey.env.kwargs={size:4} turnkey.env.kwargs.size=5 turnkey.env={id:x}",
    "+turnkey=gigpo +max_turns=4",
    "+turnkey=gigpo turnkey.rollout.summary=null turnkey.rollout.stop=null",
    "--config-name=ppo_trainer +turnkey=gigpo trainer.nnodes=1",
    "+turnkey=gigpo trainer.nnodes=1 --config-name=ppo_trainer",
    # groups and keys of the user's own files
    "--config-name=mine +turnkey=gigpo turnkey.env.kwargs.mine=1",
    "--config-name=mine turnkey=hgpo turnkey.mine=1",
    "+turnkey=mine hydra.searchpath=[file:///recipes]",
    "turnkey.credit.gamma=0.9",
    "+turnkey=gigpo turnkey.credit.modify=[{name:a_grae,alpha:0.5}]",
]


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line):
    with pytest.raises(ConfigError) as error:
        check(line.split())
    for word in REFUSED[line]:
        assert word in str(error.value)


@pytest.mark.parametrize("line", LINES_THAT_PASS)
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


def test_refuse_ends_with_the_message_alone(monkeypatch, capsys):
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(SystemExit) as exit:
        refuse(["+turnky=gigpo"])
    assert exit.value.code == 1
    assert (
        capsys.readouterr().err == "verl-turnkey: +turnky=gigpo: there is no 'turnky'; did you mean +turnkey=gigpo?\n"
    )


def test_refuse_shows_everything_when_asked(monkeypatch):
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
    with pytest.raises(ConfigError, match=r"no method 'grpo'; grpo is grpo_steps here: \+turnkey=grpo_steps"):
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
    preset = {setting.key for setting in read("gigpo_search_7b").settings}
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
