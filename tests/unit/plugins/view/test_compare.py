"""``turnkey compare``: which runs are seeds of one configuration, the numbers, and what is written."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
from run_folders import VAL, example, write
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.view import report, stats
from verl_turnkey.plugins.view.compare import SCALES, compare
from verl_turnkey.plugins.view.groups import group_runs, seed_of
from verl_turnkey.plugins.view.runs import read

CURVE = {0: 0.2, 5: 0.6, 10: 0.9}


def runs(tmp_path, *kinds):
    """One run per dict of arguments of ``write``."""
    return [read(write(tmp_path / f"run-{number}", CURVE, **kind)) for number, kind in enumerate(kinds)]


def seeds(group):
    return [seed_of(run) for run in group.runs]


def named(tmp_path, *kinds, by=()):
    return {group.name: seeds(group) for group in group_runs(runs(tmp_path, *kinds), by)}


# --- groups -----------------------------------------------------------------------------------------------------------


def test_seeds_and_folders_do_not_part_runs(tmp_path):
    output = {"trainer.project_name": "other", "trainer.save_freq": 3, "critic.data_loader_seed": 9}
    groups = named(tmp_path, {}, {"seed": 1}, {"seed": 2, "more": output}, {"method": "salt"})
    assert groups == {"gigpo": ["0", "1", "2"], "salt": ["0"]}


def test_what_parts_runs_is_in_the_name_and_the_table(tmp_path):
    loss = {"actor_rollout_ref.actor.policy_loss.loss_mode": "st_ppo"}
    gamma = {"turnkey.credit.gamma": 0.5}
    assert list(named(tmp_path / "loss", {}, {"more": loss})) == ["vanilla", "st_ppo"]
    assert list(named(tmp_path / "both", {"method": "salt"}, {"more": loss})) == ["salt vanilla", "gigpo st_ppo"]
    assert list(named(tmp_path / "gamma", {}, {"more": gamma})) == ["gigpo gamma=0.95", "gigpo gamma=0.5"]
    groups = group_runs(runs(tmp_path, {}, {"more": {"turnkey.credit.extra": "x"}}))
    assert [group.config for group in groups] == [{"turnkey.credit.extra": "absent"}, {"turnkey.credit.extra": "x"}]
    many = [{"more": {f"turnkey.credit.{key}": value for key in "abcd"}} for value in (1, 2)]
    many += [{"more": {f"turnkey.credit.{key}": 1 for key in "abc"} | {"turnkey.credit.d": 2}}]
    assert len(named(tmp_path / "many", *many)) == 3


def test_two_models_are_two_configurations_wherever_they_lie(tmp_path):
    kinds = [{"more": {"actor_rollout_ref.model.path": path}} for path in ("/a/small", "/b/small", "/a/large", "o/r")]
    assert list(named(tmp_path, *kinds)) == ["gigpo path=small", "gigpo path=large", "gigpo path=o/r"]


def test_by_groups_by_this_alone_and_says_what_it_mixes(tmp_path):
    kinds = {}, {"seed": 1, "more": {"turnkey.credit.gamma": 0.5}}, {"method": "salt"}
    groups = group_runs(runs(tmp_path, *kinds), ["method"])
    assert [(group.name, seeds(group)) for group in groups] == [("gigpo", ["0", "1"]), ("salt", ["0"])]
    assert groups[0].mixed == {"turnkey.credit.gamma": ["0.95", "0.5"]}
    assert groups[1].mixed == {}
    comparison = compare(runs(tmp_path, *kinds), by=["method"])
    assert "the runs of gigpo differ in turnkey.credit.gamma" in comparison["notes"]
    by_key = group_runs(runs(tmp_path, *kinds), ["turnkey.credit.gamma"])
    assert [group.name for group in by_key] == ["0.95", "0.5"]
    with pytest.raises(LookupError, match=r"--by turnkey.credit.gama: no run has this key.*turnkey.credit.gamma"):
        group_runs(runs(tmp_path, *kinds), ["turnkey.credit.gama"])


def test_runs_without_configuration_go_by_their_folders(tmp_path):
    for name in ("gigpo-0", "gigpo-1", "salt-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.jsonl").write_text('{"step":1,"data":{"episode/success_rate":0.5}}\n')
    groups = group_runs([read(folder) for folder in sorted(tmp_path.iterdir())])
    assert {group.name: seeds(group) for group in groups} == {"gigpo": ["gigpo-0", "gigpo-1"], "salt": ["salt-0"]}


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_by_hand(tmp_path):
    curves = [
        ("gigpo", {0: 0.2, 5: 0.8, 10: 0.9}),
        ("gigpo", {0: 0.0, 5: 0.4, 10: 0.8, 15: 0.8}),  # longer than the others: judged at step 10
        ("gigpo", {0: 0.1, 5: 0.9, 10: 0.7}),  # reached, but did not hold
        ("salt", {0: 0.1, 10: 0.3}),
    ]
    made = [read(write(tmp_path / str(i), c, method=m, seed=i)) for i, (m, c) in enumerate(curves)]
    comparison = compare(made, level=0.8)
    gigpo, salt = comparison["groups"]
    assert (comparison["metric"], comparison["range"]) == (VAL, [0, 10])
    assert gigpo["final"]["of_runs"] == pytest.approx([0.9, 0.8, 0.7])
    assert gigpo["final"]["mean"] == pytest.approx(0.8)
    assert gigpo["final"]["interval"] == list(stats.bootstrap([0.9, 0.8, 0.7], stats.interquartile_mean)[1:])
    assert gigpo["area"]["of_runs"] == pytest.approx([0.675, 0.4, 0.65])
    assert gigpo["to_level"]["step"] == {"of_runs": [5, 10, None], "said": "2 of 3, median 10"}
    assert gigpo["to_level"]["interactions"]["of_runs"] == [1600, 3200, None]
    assert gigpo["to_level"]["tokens"]["of_runs"] == [25000, 50000, None]
    assert gigpo["to_level"]["seconds"]["of_runs"] == [100, 200, None]
    assert gigpo["curve"]["x"] == [0, 5, 10]
    assert gigpo["curve"]["mean"] == pytest.approx([0.1, 0.7, 0.8])
    assert gigpo["curve"]["low"] == pytest.approx([0.0, 0.4, 0.7])
    assert gigpo["curve"]["high"] == pytest.approx([0.2, 0.9, 0.9])
    assert gigpo["seconds_per_step"] == {"step": 20, "gen": 12, "adv": 0.25}
    assert salt["final"]["interval"] is None
    assert comparison["notes"] == ["salt: 1 seed; an interval needs 3"]
    [pair] = comparison["pairs"]
    assert (pair["a"], pair["b"], pair["final"]) == ("gigpo", "salt", {"improvement": 1.0, "interval": None})
    json.dumps(comparison, allow_nan=False)


def test_success_that_was_lost_is_told_with_what_changed(tmp_path):
    def line(step):
        lost = step >= 8
        data = {"episode/success_rate": 0.1 if lost else 0.5, "episode/length/mean": 20.0 if lost else 10.0}
        data |= {"actor/entropy": 0.2 if step >= 6 else 0.5, "actor/ppo_kl": 0.001, VAL: 0.1 if lost else 0.5}
        return json.dumps({"step": step, "data": data}, separators=(",", ":"))

    (tmp_path / "fallen-0").mkdir()
    (tmp_path / "fallen-0" / "m.jsonl").write_text("\n".join(map(line, range(1, 15))))
    sound = write(tmp_path / "sound-0", dict.fromkeys(range(15), 0.5))
    comparison = compare([read(tmp_path / "fallen-0"), read(sound)], by=["method"])
    first, second = (group["runs"][0]["collapse"] for group in comparison["groups"])
    assert second is None
    assert (first["step"], first["best"], first["last"]) == (8, 0.5, pytest.approx(0.1))
    [table] = [table for table in report.tables(comparison) if table.title == "success that was lost in training"]
    [row] = table.rows
    assert row[1:4] == ["0.500 (step 7)", "0.100", "8"]
    assert row[4] == "entropy 0.5 to 0.2 (step 6); turns per episode 10 to 20 (step 8)"
    assert "success that was lost" not in "".join(t.title for t in report.tables(compare([read(sound)])))
    json.dumps(comparison, allow_nan=False)


def test_other_budgets(tmp_path):
    made = runs(tmp_path, {}, {"seed": 1})
    heads = ["at step 10", "at interaction 3200", "at token 50000", "at second 200"]
    assert [report.tables(compare(made, x=x))[0].head[2] for x in SCALES] == heads
    assert compare(made, x="interactions")["range"] == [0, 3200]
    assert compare(made, x="tokens")["range"] == [0, 50000]
    assert compare(made, x="seconds")["groups"][0]["curve"]["x"] == [0, 100, 200]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "m.jsonl").write_text(f'{{"step":0,"data":{{"{VAL}":0.5}}}}\n')
    bare = read(tmp_path / "bare")
    with pytest.raises(ValueError, match=r"--x seconds needs the metrics timing_s/step, which .*bare lacks"):
        compare([*made, bare], x="seconds")
    assert compare([*made, bare], level=0.5)["groups"][1]["to_level"] == {"step": {"of_runs": [None], "said": "0 of 1"}}
    with pytest.raises(ValueError, match="x to be one of step, interactions, tokens, seconds, got 'words'"):
        compare(made, x="words")


def test_a_baseline(tmp_path):
    made = [read(write(tmp_path / m, {0: 0.1, 10: h}, method=m)) for m, h in (("a", 0.3), ("b", 0.2), ("c", 0.4))]
    against = [(pair["a"], pair["b"]) for pair in compare(made, baseline="b")["pairs"]]
    assert against == [("a", "b"), ("c", "b")]
    assert len(compare(made)["pairs"]) == 3
    with pytest.raises(LookupError, match="no group 'd' to be the baseline; the groups are a, b, c"):
        compare(made, baseline="d")


def test_the_metric(tmp_path):
    made = runs(tmp_path, {}, {"seed": 1})
    assert compare(made, metric="success")["metric"] == "episode/success_rate"
    assert compare(made, metric="timing_s/gen")["groups"][0]["final"]["mean"] == 12
    with pytest.raises(LookupError, match=r"run-0 has no metric 'episode/succes'; did you mean episode/success_rate"):
        compare(made, metric="episode/succes")
    other = tmp_path / "other"
    write(other, {0: 0.1, 1: 0.2})
    [path] = other.rglob("*.jsonl")
    path.write_text(path.read_text().replace("doorkey", "lake"))
    with pytest.raises(LookupError, match=r"'val success' matches several metrics: .*doorkey/acc.*lake/acc"):
        compare([*made, read(other)], metric="val success")
    path.write_text(path.read_text().replace("acc/mean", "x/mean"))
    assert compare([*made, read(other)])["metric"] == "episode/success_rate"  # the one that all have
    with pytest.raises(LookupError, match=r"other has no metric for 'val success'"):
        compare([*made, read(other)], metric="val success")


def test_what_cannot_be_compared(tmp_path):
    [run] = runs(tmp_path, {})
    with pytest.raises(ValueError, match="run-0 is given twice"):
        compare([run, run])
    with pytest.raises(ValueError, match="at least one run"):
        compare([])
    late = read(write(tmp_path / "late", {20: 0.5, 30: 0.5}))
    with pytest.raises(
        ValueError, match=r"no common budget: .*late was first evaluated at step 20, another run last at 10"
    ):
        compare([run, late])


# --- what is written --------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.seen, self.loads = set(), []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "onload", "onerror")]


def test_the_command(tmp_path):
    folders = [str(folder) for folder in example(tmp_path)]
    done = CliRunner().invoke(app, ["compare", *folders, "--level", "0.8", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert re.search(r"gigpo +5 +0\.\d{3}", done.output)
    assert "5 of 5" in done.output
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [group["name"] for group in comparison["groups"]] == ["gigpo", "grpo_steps"]
    text = (tmp_path / "out" / "comparison.html").read_text()
    tags = Tags(text)
    assert text.count("<polyline") == 12  # ten runs, two means
    assert not tags.loads
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert "default-src 'none'" in text
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_a_long_list_of_differences_is_cut(tmp_path):
    many = {f"turnkey.credit.p{number:02}": 1 for number in range(25)}
    comparison = compare(runs(tmp_path, {}, {"more": many}))
    [table] = [table for table in report.tables(comparison) if table.title == "what differs"]
    assert len(table.rows) == report.KEYS + 1
    assert table.rows[-1][0] == "5 more, in comparison.json"


def test_success_is_drawn_from_0_to_1_and_anything_else_as_far_as_it_goes(tmp_path):
    made = runs(tmp_path, {})
    tops = {}
    for metric in ("success", "timing_s/adv"):
        page = report.page(compare(made, metric=metric))
        tops[metric] = re.findall(r'dominant-baseline="middle">([\d.e-]+)<', page)
    assert tops["success"] == ["0", "0.25", "0.5", "0.75", "1"]
    assert set(tops["timing_s/adv"]) == {"0.25"}


def test_an_error_is_one_line(tmp_path, monkeypatch, capsys):
    from verl_turnkey.plugins.cli.main import main

    monkeypatch.setattr(sys, "argv", ["turnkey", "compare", str(tmp_path / "absent")])
    with pytest.raises(SystemExit):
        main()
    assert "turnkey: expected the folder of a run, found no" in capsys.readouterr().err


def test_texts_of_others_stay_texts(tmp_path, capsys):
    evil = "<script>alert(1)</script> $\\frac$ \x1b[31m\u202e|[bold]x</svg>"
    comparison = compare(runs(tmp_path, {"method": evil}, {"method": "_b"}))
    page = report.page(comparison)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    report.print_tables(comparison)
    output = page + capsys.readouterr().out + "".join(map(report.markdown, report.tables(comparison)))
    assert "[bold]x" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "\\|[bold]" in report.markdown(report.tables(comparison)[0])
    report.draw([comparison], tmp_path / "c.png")


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_turnkey.plugins.cli.view.find_spec", lambda name: None)
    folder = str(write(tmp_path / "run", CURVE))
    done = CliRunner().invoke(app, ["compare", folder, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert 'no picture: pip install "verl-turnkey[viz]"' in done.output
    assert not (tmp_path / "out" / "comparison.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"verl-turnkey\[viz\]"):
        report.draw([], tmp_path / "c.png")


def test_one_evaluation_and_numbers_that_are_not_finite(tmp_path):
    run = read(write(tmp_path / "one", {0: 0.5}))
    comparison = compare([run], level=0.1)
    assert comparison["range"] == [0, 0]
    assert comparison["groups"][0]["area"]["mean"] == 0.5
    assert "<polyline" in report.page(comparison)
    assert np.isnan(run.metrics[VAL]).sum() == 0


def test_it_needs_no_verl():
    import subprocess

    code = (
        "import sys; from verl_turnkey.plugins.view import compare, report, runs, stats; "
        "print([name for name in ('verl', 'torch', 'ray', 'omegaconf', 'pandas') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"
