"""What is read from the folder of a run: every kind of log, several starts, and what cannot be read."""

from __future__ import annotations

import json
import sys
from itertools import product

import numpy as np
import pytest
from run_folders import VAL, write

from verl_turnkey.plugins.view.runs import read

KINDS, WHAT = ("trained", "measured"), ("tokens", "steps")


def test_a_run_as_turnkey_train_leaves_it(tmp_path):
    run = read(write(tmp_path, {0: 0.2, 2: 0.5}, method="salt", seed=3))
    steps, values = run.curve(VAL)
    assert steps.tolist() == [0, 2]
    assert values.tolist() == [0.2, 0.5]
    assert run.step.tolist() == [0, 1, 2]
    assert run.interactions().tolist() == [0, 320, 640]  # failed episodes have no turns
    assert run.seconds().tolist() == [0, 20, 40]
    assert run.config["algorithm.adv_estimator"] == "salt"
    assert run.config["data.seed"] == 3
    assert run.source == "metrics/1/doorkey/salt.jsonl"


def test_branches_cost_turns_and_tokens(tmp_path):
    folder = write(tmp_path, {0: 0.2, 2: 0.5})
    [path] = folder.rglob("gigpo.jsonl")
    branches = {f"branching/{kind}_{what}": n for n, (kind, what) in enumerate(product(KINDS, WHAT), start=2)}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[2]["data"] |= branches  # means over the 32 rollouts that were played; the first training step had none
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read(folder)
    assert run.interactions().tolist() == [0, 320, 640 + 32 * (3 + 5)]
    assert run.tokens().tolist() == [0, 5000, 10000 + 32 * 4]  # of trained branches: in rows


def test_a_resumed_run_counts_as_trained_last(tmp_path):
    write(tmp_path, {0: 0.1, 4: 0.4, 8: 0.8})
    write(tmp_path, {6: 0.6, 7: 0.7}, start="2")  # from the checkpoint of step 6; what came after it is gone
    run = read(tmp_path)
    steps, values = run.curve(VAL)
    assert (steps.tolist(), values.tolist()) == ([0, 4, 6, 7], [0.1, 0.4, 0.6, 0.7])
    assert run.step.tolist() == list(range(8))
    assert run.interactions()[-1] == 7 * 320


def test_half_a_line_at_the_end_is_still_being_written(tmp_path):
    write(tmp_path, {0: 0.1, 1: 0.4})
    [path] = tmp_path.rglob("*.jsonl")
    whole = path.read_text()
    path.write_text(whole + '{"step":2,"data":{"a":')
    assert read(tmp_path).step.tolist() == [0, 1]
    path.write_text(whole + '{"step":2,"data":{"a"\n{"step":3,"data":{}}\n')
    with pytest.raises(ValueError, match=r'gigpo.jsonl:3: expected \{"step".*got \{"step":2,"data":\{"a"'):
        read(tmp_path)


def test_what_is_no_number_is_left_out(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step":1,"data":{"a":null,"b":"x","c":2,"d":NaN,"e":true}}\n')
    (tmp_path / "episodes-host-1.jsonl").write_text('{"key": "a", "step": 3}\n')
    run = read(tmp_path)
    assert {name: values.tolist() for name, values in run.metrics.items() if name != "d"} == {"c": [2.0], "e": [1.0]}
    assert run.curve("d")[0].tolist() == []
    assert run.config == {}
    assert run.interactions() is None
    assert run.seconds() is None


def test_event_files_without_tensorboard(tmp_path, monkeypatch):
    (tmp_path / "events.out.tfevents.1").touch()
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        read(tmp_path)


def test_a_console_log(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "INFO starting\n"
        "\x1b[36m(TaskRunnerV1 pid=12)\x1b[0m step:0 - val-core/a - b/acc/mean@1:0.25\n"
        "step:1 - loss:np.float64(-1e-05) - grad:np.float32(nan) - lr:1e-06 - on:True\n"
        "step:2 - loss:2\n"
        "step:1 - loss:3\n"  # another start, appended
        "the step:9 - and so on\n"
    )
    run = read(tmp_path)
    assert run.source == "train.log"
    assert run.step.tolist() == [0, 1]
    assert run.curve("loss")[1].tolist() == [3.0]
    assert run.metrics["lr"][1] == 1e-6
    assert np.isnan(run.metrics["grad"]).all()


def test_metrics_files_come_before_logs(tmp_path):
    write(tmp_path, {0: 0.1, 1: 0.4})
    (tmp_path / "train.log").write_text("step:7 - a:1\n")
    assert read(tmp_path).step.tolist() == [0, 1]


def test_what_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected the folder of a run, found no .*absent"):
        read(tmp_path / "absent")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match=r"found a file .*file"):
        read(tmp_path / "file")
    with pytest.raises(FileNotFoundError, match=r"holds no metrics: expected a .jsonl file of trainer.logger=\[file\]"):
        read(tmp_path)
    (tmp_path / "m.jsonl").write_text('{"step":1,"data":{"a":1}}\n')
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("a: [")
    with pytest.raises(ValueError, match=r"config.yaml: expected the configuration that Hydra writes"):
        read(tmp_path)


def test_a_folder_of_several_runs(tmp_path):
    for seed in (0, 1):
        write(tmp_path / str(seed), {0: 0.1, 1: 0.2}, seed=seed)
    with pytest.raises(ValueError, match=r"holds several runs .*/0/checkpoints, .*/1/checkpoints.*one by one"):
        read(tmp_path)


def test_a_metric_that_was_not_logged(tmp_path):
    run = read(write(tmp_path, {0: 0.2, 1: 0.5}))
    with pytest.raises(LookupError, match=r"no metric 'episode/sucess_rate'; did you mean episode/success_rate"):
        run.curve("episode/sucess_rate")
    with pytest.raises(LookupError, match=r"no metric 'xyzzy'; it has \d+ others"):
        run.curve("xyzzy")
