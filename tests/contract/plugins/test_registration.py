"""Every extension point is ours in real verl; a second plugin can take a name but cannot do so unseen."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest
from verl.utils.profiler.performance import GPUMemoryLogger

from verl_turnkey.advantage import estimators
from verl_turnkey.plugins import register
from verl_turnkey.plugins.cli import doctor
from verl_turnkey.plugins.entry import switches
from verl_turnkey.plugins.verl_api import internals, ledger, queue, seams
from verl_turnkey.plugins.verl_api.seams import Seam

PLUGIN = """
from verl.trainer.ppo import core_algos

def somebody_elses(*args, **kwargs):
    raise NotImplementedError

core_algos.ADV_ESTIMATOR_REGISTRY["gigpo"] = somebody_elses
"""


def second_plugin(folder: Path, source: str) -> dict[str, str]:
    """Install another distribution with an entry point for verl; returns the environment that has it."""
    (folder / "other_plugin.py").write_text(textwrap.dedent(source))
    metadata = folder / "other_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nother = other_plugin\n")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def run(command: list[str], env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In ``folder``: entry points load in the order of ``sys.path``, which begins with the working directory."""
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=folder)


TURNKEY = [sys.executable, "-c", "from verl_turnkey.plugins.cli.main import main; main()"]


@pytest.mark.parametrize("program", ["fully_async_policy.fully_async_main", "one_step_off_policy.main_ppo"])
def test_programs_of_verl_with_a_trainer_of_their_own_refuse_the_switch(tmp_path, program):
    command = [sys.executable, "-m", f"verl.experimental.{program}", "+turnkey=gigpo"]
    done = run(command, {**os.environ}, tmp_path)
    assert done.returncode == 1
    assert f"+turnkey=gigpo: verl.experimental.{program} has a trainer of its own" in done.stderr
    assert "turnkey_separate_async" in done.stderr


OTHER_PROGRAM = """
from hydra import compose, initialize_config_module
from verl.trainer.ppo.ray_trainer import RayPPOTrainer


class RayTheirTrainer(RayPPOTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


with initialize_config_module("verl.trainer.config", version_base=None):
    for words in ([], ["+turnkey=gigpo"], ["+turnkey=base", "algorithm.adv_estimator=grpo"]):
        config = compose("ppo_trainer", overrides=words)
        given = dict(tokenizer=None, role_worker_mapping={}, resource_pool_manager=None)
        for start in (lambda: RayTheirTrainer(config=config, **given), lambda: RayTheirTrainer(config, **given)):
            try:
                start()
            except Exception as error:
                print(len(words), type(error).__name__, error)
"""


def test_trainers_of_other_projects_refuse_the_switch(tmp_path):
    (tmp_path / "their_main.py").write_text(OTHER_PROGRAM)
    done = run([sys.executable, "their_main.py"], {**os.environ}, tmp_path)
    lines = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    assert [line.split()[:2] for line in lines] == [
        *[["0", "AssertionError"]] * 2,  # verl's own, of the empty role_worker_mapping
        *[["1", "Refusal"]] * 2,
        *[["2", "Refusal"]] * 2,
    ], done.stderr
    assert all("__main__.RayTheirTrainer" in line and "verl.trainer.main_ppo" in line for line in lines[2:])


def test_every_point_is_registered_in_this_process():
    assert ledger.import_homes() == {}
    points = ledger.points()
    assert {(point.kind, point.name) for point in points} >= {
        ("config", "hydra search path"),
        ("config", "driver validation"),
        ("estimator", "gigpo"),
        ("estimator", "turnkey/gigpo"),
        ("estimator", "grpo_steps"),
        ("trainer", "turnkey_sync"),
        ("trainer", "turnkey_colocate_async"),
        ("trainer", "turnkey_separate_async"),
        ("agent_loop", "turnkey_env"),
        ("agent_loop", "turnkey_agent"),
    }
    assert [point for point in points if point.status != "registered"] == []
    ledger.verify(("config", "estimator", "trainer", "agent_loop"), needed=("gigpo",))


@pytest.mark.parametrize("name", [*estimators(), *(f"turnkey/{name}" for name in estimators())])
def test_verl_finds_our_estimators_under_both_names(name):
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    fn = get_adv_estimator_fn(name)
    assert fn.__qualname__ == f"verl_estimator({name.removeprefix('turnkey/')})"
    with pytest.raises(RuntimeError, match=r"trainer\.v1\.trainer_mode=turnkey_sync"):
        fn(token_level_rewards=None, response_mask=None)


def test_registering_again_changes_nothing():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    before = dict(ADV_ESTIMATOR_REGISTRY)
    register.register_estimators()
    assert before == ADV_ESTIMATOR_REGISTRY


def test_names_taken_by_others_are_shown_and_stay_theirs(tmp_path):
    """One process, since each import of verl takes long: taken before us, and overwritten after us."""
    code = """
    from verl_turnkey.plugins import register
    from verl_turnkey.plugins.verl_api import ledger
    import verl, other_plugin
    assert ledger.import_homes() == {}
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, get_adv_estimator_fn
    from verl.experimental.agent_loop.agent_loop import _agent_loop_registry

    def point(kind, name):
        return next(p for p in ledger.points() if (p.kind, p.name) == (kind, name))

    for attempt in range(2):  # the trainer registers once more at its start
        clash = point("estimator", "gigpo")
        assert clash.status == "clash", clash
        assert "other_plugin.somebody_elses" in clash.detail and "turnkey/gigpo" in clash.detail, clash
        assert ADV_ESTIMATOR_REGISTRY["gigpo"] is other_plugin.somebody_elses
        assert point("estimator", "turnkey/gigpo").status == "registered"
        assert get_adv_estimator_fn("turnkey/gigpo").__qualname__ == "verl_estimator(gigpo)"
        ledger.verify(("estimator",))
        ledger.verify(("estimator",), needed=("turnkey/gigpo",))
        try:
            ledger.verify(("estimator",), needed=("gigpo",))
        except RuntimeError as error:
            assert "estimator gigpo: clash" in str(error) and "turnkey doctor" in str(error), error
        else:
            raise AssertionError("verify accepted a name that is not ours")
        register.register_estimators()

    assert point("agent_loop", "turnkey_env").status == "registered"
    _agent_loop_registry["turnkey_env"] = {"_target_": "other_plugin.Loop"}
    assert point("agent_loop", "turnkey_env").status == "clash"
    assert "overwritten" in point("agent_loop", "turnkey_env").detail
    ADV_ESTIMATOR_REGISTRY["turnkey/grpo_steps"] = other_plugin.somebody_elses
    assert point("estimator", "turnkey/grpo_steps").status == "clash"
    print("all seen")
    """
    done = run([sys.executable, "-c", textwrap.dedent(code)], second_plugin(tmp_path, PLUGIN), tmp_path)
    assert done.stdout.strip().endswith("all seen"), done.stderr


def test_doctor_shows_a_broken_second_plugin(tmp_path):
    env = second_plugin(tmp_path, "def install():\n    raise OSError('the other plugin is broken')\n\ninstall()\n")
    done = run([*TURNKEY, "doctor", "--no-ray"], env, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "in install" in done.stdout
    assert "OSError: the other plugin is broken" in done.stdout
    summary = done.stdout.partition("1 problem found")[2]
    assert "this process: plugin of verl other failed to load" in summary


def test_doctor_is_not_content_with_an_unsupported_verl(monkeypatch, capsys):
    monkeypatch.setattr(internals, "verl_version", lambda: "0.8.0")
    monkeypatch.setattr(doctor, "inspect_process", doctor.Report)  # nothing else is wrong
    assert doctor.run(in_ray=False, address=None) == 1
    summary = " ".join(capsys.readouterr().out.partition("1 problem found")[2].split())
    assert "verl 0.8.0 is outside the supported range" in summary


def test_doctor_sees_that_verl_did_not_load_the_plugin(tmp_path):
    """And does not repair it by looking."""
    done = run([*TURNKEY, "doctor", "--no-ray"], {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "none"}, tmp_path)
    assert done.returncode == 1
    assert "VERL_USE_EXTERNAL_PLUGINS=none" in done.stdout


def test_doctor_is_content_with_a_healthy_installation(tmp_path):
    done = run([*TURNKEY, "doctor"], dict(os.environ), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "extension points in this process" in done.stdout
    assert "extension points in a Ray worker" in done.stdout
    worker = done.stdout.partition("extension points in a Ray worker")[2]
    for name in ("gigpo", "turnkey_separate_async", "turnkey_env", "hydra search path"):
        assert name in worker
    assert "turnkey/gigpo" not in worker, "one row per name"
    assert "all good" in done.stdout
    assert "engine is not available" not in done.stdout + done.stderr
    assert "clash" not in done.stdout
    assert "missing" not in done.stdout


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda seam: seam.name)
def test_verl_is_as_we_expect_it(seam):
    assert seam.moved() is None
    assert seam.why


def test_a_seam_that_moved_is_named():
    good = next(seam for seam in seams.SEAMS if seam.name == "PPOTrainer._compute_advantage")
    now, before = f"{good.name}(self, batch, metrics)", f"{good.name}(self, batch)"
    assert f"{now} was {before}" in str(Seam(good.module, good.name, "self, batch", "x").moved())
    assert Seam(good.module, good.name, "self, batch", "x", older=(now,)).moved() is None
    assert f"{now} was {before} or not there" in str(
        Seam(good.module, good.name, "self, batch", "x", (seams.GONE,)).moved()
    )
    gone = Seam(good.module, "PPOTrainer._compute_advantages", "self", "x")
    assert str(gone.moved()).endswith("is gone")
    assert replace(gone, older=(seams.GONE,)).moved() is None
    assert replace(gone, older=(now,)).moved() is None, "under its older name"
    assert str(Seam("verl.trainer.ppo.v2", "PPOTrainer", "self", "x").moved()).endswith("is gone")


def test_a_module_that_fails_is_named_and_the_others_are_still_compared(tmp_path, monkeypatch, capsys):
    (tmp_path / "halfway.py").write_text("call(one=1, one=2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    broken = Seam("halfway", "call", "", "x")
    monkeypatch.setattr(seams, "SEAMS", (broken, replace(broken, older=(seams.GONE,)), Seam("ast", "no_such", "", "y")))
    assert doctor.run_verl() == 1
    out = "".join(capsys.readouterr().out.split())
    assert ":3of" in out
    assert out.count("SyntaxError:keywordargument") == 2
    assert "ast.no_such" in out
    assert str(broken.moved()).startswith("halfway.call cannot be imported: SyntaxError: ")


def test_what_the_package_imports_from_verl_is_there():
    imported = {(seam.module, seam.name) for seam in seams.imports()}
    assert ("verl.trainer.ppo.v1.trainer_sync", "PPOTrainerSync") in imported
    assert ("verl.trainer.ppo.v1", "trainer_base") in imported, "a module"
    assert [str(what) for what, _ in seams.moved()] == []


class Decorated:
    """verl's decorator hides the name and the parameters of what it decorates."""

    @GPUMemoryLogger(role="actor")
    def update(self, data):
        pass


def test_a_decorator_that_hides_parameters_moves_nothing():
    assert "data" not in inspect.signature(Decorated.update).parameters
    seam = Seam(__name__, "Decorated.update", "self, data", "x")
    assert seam.moved() is None
    assert replace(seam, parameters="self, batch").moved().installed == "Decorated.update(self, data)"


def test_what_the_package_calls_of_the_queue_is_a_seam():
    """``plugins/verl_api/queue.py`` alone imports ``transfer_queue`` (tests/unit/test_import_rules.py)."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(inspect.getsource(queue)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tq"
    }
    assert used >= {"kv_batch_get", "kv_batch_put", "kv_clear", "kv_list"}
    assert used <= {seam.name for seam in seams.SEAMS if seam.module == "transfer_queue"}


def test_doctor_prints_what_moved(monkeypatch, capsys):
    assert doctor.run_verl() == 0
    assert ": 0 of " in capsys.readouterr().out
    moved = Seam("verl.trainer.ppo.v1.trainer_base", "PPOTrainer.fit", "self", "training")
    monkeypatch.setattr(seams, "SEAMS", (moved, *seams.SEAMS))
    assert doctor.run_verl() == 1
    out = capsys.readouterr().out
    assert ": 1 of " in out
    for text in ("PPOTrainer.fit", "PPOTrainer.fit(self)", "agent_loop_manager", "training"):
        assert text in "".join(out.split()), text


def test_switches_of_a_command_line():
    argv = ["+turnkey=gigpo", "data.x=1", "trainer.v1.trainer_mode=turnkey_sync", "turnkey.credit.gamma=0.9", "model=x"]
    assert switches(argv) == [argv[0], argv[2], argv[3]]
