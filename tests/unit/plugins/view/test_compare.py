"""``turnkey compare``: which runs are seeds of one configuration, the numbers, and what is written."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_folders import VAL, example, write
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.view import stats
from verl_turnkey.plugins.view.collapse import Curve, change_rows, changes, fall, formatted, split
from verl_turnkey.plugins.view.compare import KEYS, SCALES, compare, draw, markdown, print_tables, tables
from verl_turnkey.plugins.view.runs import group_runs, read, seed_of

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


def test_an_edited_file_parts_runs_and_is_named(tmp_path, capsys):
    before, after = {"env.py": "a", "lab/same.py": "b"}, {"env.py": "c", "lab/same.py": "b"}
    kinds = {"files": before}, {"seed": 1, "files": before}, {"seed": 2, "files": after}, {"files": before | {"n": "d"}}
    a, c, d, absent = "a" * 12, "c" * 12, "d" * 12, "absent"
    comparison = compare(runs(tmp_path, *kinds))
    assert [group["config"] for group in comparison["groups"]] == [
        {"file env.py": a, "file n": absent},
        {"file env.py": c, "file n": absent},
        {"file env.py": a, "file n": d},
    ]
    assert comparison["groups"][1]["name"] == f"gigpo env.py={c} n=absent"
    print_tables(comparison)
    assert re.search(rf"file env\.py +{a} +{c} +{a}", capsys.readouterr().out)
    by_method = compare(runs(tmp_path, *kinds), by=["method"])
    assert "the runs of gigpo differ in file env.py, file n" in by_method["notes"]


def test_the_difference_of_copies_is_shown(tmp_path, capsys):
    written = runs(tmp_path, {"files": {"env.py": "a", "b.py": "a"}}, {"files": {"env.py": "c", "b.py": "c"}})
    for run, letter, text in zip(written, "ac", ("same\nsize = 1\n", "same\nsize = 2\x1b[2J\n"), strict=True):
        (run.folder / "turnkey_log" / "files").mkdir()
        (run.folder / "turnkey_log" / "files" / f"{letter * 64}.py").write_text(text)
    (tmp_path / "run-0" / "turnkey_log" / "files" / f"{'a' * 64}.py").rename(tmp_path / "kept")
    comparison = compare([read(run.folder) for run in written])
    assert [(file["file"], file["diff"]) for file in comparison["files"]] == [("b.py", None), ("env.py", None)]
    print_tables(comparison)
    assert says(capsys.readouterr().out, f"b.py differs between {tmp_path}/run-0 and")
    (tmp_path / "kept").rename(tmp_path / "run-0" / "turnkey_log" / "files" / f"{'a' * 64}.py")
    comparison = compare([read(run.folder) for run in written])
    assert comparison["files"][1]["diff"][2:] == ["@@ -1,2 +1,2 @@", " same", "-size = 1", "+size = 2\x1b[2J"]
    print_tables(comparison)
    output = capsys.readouterr().out
    assert "-size = 1\n+size = 2\N{REPLACEMENT CHARACTER}[2J" in output


def test_files_are_not_compared_with_a_run_that_has_no_record_of_its_own(tmp_path):
    comparison = compare(runs(tmp_path, {"files": {"env.py": "a"}}, {"seed": 1}))
    [group] = comparison["groups"]
    assert len(group["runs"]) == 2
    assert f"files are not compared: {tmp_path}/run-1 has no record of those that it read" in comparison["notes"]
    assert not [note for note in compare(runs(tmp_path / "none", {}, {"seed": 1}))["notes"] if "files" in note]


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
    [table] = [table for table in tables(comparison) if table.title == "success that was lost in training"]
    [row] = table.rows
    assert row[1:4] == ["0.500 (step 7)", "0.100", "8"]
    assert row[4] == "entropy 0.5 to 0.2 (step 6); turns per episode 10 to 20 (step 8)"
    assert "success that was lost" not in "".join(t.title for t in tables(compare([read(sound)])))
    json.dumps(comparison, allow_nan=False)


def test_other_budgets(tmp_path):
    made = runs(tmp_path, {}, {"seed": 1})
    heads = ["at step 10", "at interaction 3200", "at token 50000", "at second 200"]
    assert [tables(compare(made, x=x))[0].head[2] for x in SCALES] == heads
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
def test_the_command(tmp_path):
    folders = [str(folder) for folder in example(tmp_path)]
    done = CliRunner().invoke(app, ["compare", *folders, "--level", "0.8", "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert re.search(r"gigpo +5 +0\.\d{3}", done.output)
    assert "5 of 5" in done.output
    comparison = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert [group["name"] for group in comparison["groups"]] == ["gigpo", "grpo_steps"]
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


# --- ratings ----------------------------------------------------------------------------------------------------------
def rated_by_game(ends: Any) -> list[stats.Interval]:
    """The ratings if each game of the table (P, P, 3) has a task of its own."""
    table = np.asarray(ends, int)
    first = np.cumsum(table, axis=-1) - table
    task = np.arange(table.sum(axis=-1).max())[:, None]
    return stats.ratings((first[:, :, None] <= task) & (task < (first + table)[:, :, None]))


def test_the_ratings_of_two_by_hand():
    ends = np.zeros((2, 2, 3))
    ends[0, 1] = 6, 2, 1
    ends[1, 0] = 1, 0, 2  # the other way round: two more won, one more lost
    a, b = rated_by_game(ends)
    points = 6 + 2 + (2 + stats.DRAWS) / 2
    assert a.value - b.value == pytest.approx(400 * math.log10(points / (13 - points)), abs=0.01)
    assert a.value + b.value == pytest.approx(2000)
    assert a.low < a.value < a.high
    assert b.low == pytest.approx(2000 - a.high)
    few, many = (rated_by_game(number * ends)[0] for number in (1, 20))
    assert many.high - many.low < (few.high - few.low) / 3
    for games in ([9, 0, 0], [2, 0, 0], [0, 9, 0]):
        won, lost = rated_by_game([[[0, 0, 0], games], [[0, 0, 0], [0, 0, 0]]])
        points = games[0] + games[1] / 2 + 0.5
        expected = 400 * math.log10(points / (sum(games) + 1 - points))
        assert won.value - lost.value == pytest.approx(expected, abs=0.01)
        assert won.low < won.value < won.high


def test_an_interval_counts_tasks_not_games():
    """Twenty samples of a task that end alike tell no more than one."""
    ends = np.zeros((2, 2, 12, 3))
    ends[0, 1, :6, 0] = ends[0, 1, 6:, 2] = 1
    single, twenty = (stats.ratings(number * ends)[0] for number in (1, 20))
    assert twenty.high - twenty.low > 0.8 * (single.high - single.low)


def test_the_ratings_of_four_are_those_of_a_logistic_regression():
    from sklearn.linear_model import LogisticRegression

    ends = np.random.default_rng(0).integers(0, 9, size=(4, 4, 3))
    ends[0, 3] = ends[3, 0] = 0  # they never met
    pairs, won, weight = [], [], []
    for i in range(4):
        for j in range(i + 1, 4):
            wins, draws, losses = ends[i, j] + ends[j, i, ::-1]
            draws += stats.DRAWS * (wins + draws + losses > 0)
            pairs += 2 * [np.eye(4)[i] - np.eye(4)[j]]
            won += [1, 0]
            weight += [wins + draws / 2, losses + draws / 2]
    fit = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(pairs, won, sample_weight=weight)
    expected = 400 / math.log(10) * (fit.coef_[0] - fit.coef_[0].mean()) + 1000
    assert [rating.value for rating in rated_by_game(ends)] == pytest.approx([*expected], abs=0.1)


def evaluation(
    folder: Path,
    policy: str,
    opponent: str,
    outcomes: list[float],
    environment: str = "kuhn",
    model: dict[str, Any] | None = None,
) -> Path:
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps({"players": {"policy": policy, "opponent": opponent}}))
    (folder / "eval.json").write_text(json.dumps({"environment": environment, "model": model or {"sha256": policy}}))
    lines = [{"task": str(n), "outcomes": {f"player {n % 2}": outcome}} for n, outcome in enumerate(outcomes)]
    (folder / "samples.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"task": "0", "truncated": True}])))
    return folder


def rated(*folders: Path, more: tuple[str, ...] = ()):
    return CliRunner().invoke(app, ["compare", *map(str, folders), *more])


def says(output: str, words: str) -> bool:
    """Whether a command printed these words, wherever its lines end."""
    return "".join(words.split()) in "".join(output.split())


def test_evaluations_are_compared_by_ratings(tmp_path):
    late = evaluation(tmp_path / "late", "step 20", "step 10", [2, 1, 1, 0, -1])
    early = evaluation(tmp_path / "early", "step 10", "random", [1, 1, -2])
    done = rated(late, early, more=("--out", str(tmp_path / "out")))
    assert done.exit_code == 0, done.output
    for name, ends in {"step 20": (5, 3, 1, 1), "step 10": (8, 3, 1, 4), "random": (3, 1, 0, 2)}.items():
        assert re.search(rf"{name} +\d+ +-?\d+ to \d+ +{' +'.join(map(str, ends))} +\n", done.output), done.output
    ratings = json.loads((tmp_path / "out" / "comparison.json").read_text())["ratings"]
    assert [line["player"] for line in ratings] == ["step 20", "step 10", "random"]
    assert sum(line["rating"] for line in ratings) == pytest.approx(3000)


@pytest.mark.parametrize(
    ("models", "same"),
    [
        ([{"sha256": "1", "engine": "hf"}, {"sha256": "1", "engine": "vllm"}], True),
        ([{"sha256": "1"}, {"name": "m", "tag": None}], True),  # served and not
        ([{"name": "m", "tag": "a"}, {"name": "n", "tag": "a"}], True),
        ([{"name": "x/a", "tag": None}, {"name": "y/a", "tag": None}], False),
    ],
)
def test_a_name_is_of_one_model(tmp_path, models, same):
    folders = [evaluation(tmp_path / str(n), "a", "b", [1], model=model) for n, model in enumerate(models)]
    assert (rated(*folders).exit_code == 0) == same


def test_evaluations_that_cannot_be_rated(tmp_path):
    first = evaluation(tmp_path / "first", "a", "b", [1])
    for other, message in {
        evaluation(tmp_path / "apart", "c", "d", [1]): "some players are not connected by games",
        evaluation(tmp_path / "same", "a", "a", [1]): "both players are called 'a': name the evaluated one with --tag",
        evaluation(tmp_path / "nim", "a", "c", [1], "nim"): "were played in different environments",
        evaluation(tmp_path / "other", "a", "b", [1], model={"sha256": "1"}): (
            f"{first} and .*other evaluate different models called 'a': name them with --tag"
        ),
    }.items():
        assert re.search(message, str(rated(first, other).exception))
    truncated = evaluation(tmp_path / "truncated", "a", "d", [])
    assert re.search("no game in .*truncated has an outcome", str(rated(truncated).exception))
    assert says(rated(first, truncated).output, f"{truncated} is left out: none of its games has an outcome")
    (first / "result.json").write_text("{}")
    assert "has no games against an opponent" in str(rated(first).exception)
    assert says(rated(first, more=("--level", "0.5")).output, "are for runs, not for evaluations")
    done = rated(first, write(tmp_path / "run", CURVE), more=("--level", "0.5"))
    assert done.exit_code == 0, done.output
    assert says(done.output, f"left out: expected the folder of a run, found an evaluation: {first}")


def test_a_long_list_of_differences_is_cut(tmp_path):
    many = {f"turnkey.credit.p{number:02}": 1 for number in range(25)}
    comparison = compare(runs(tmp_path, {}, {"more": many}))
    [table] = [table for table in tables(comparison) if table.title == "what differs"]
    assert len(table.rows) == KEYS + 1
    assert table.rows[-1][0] == "5 more, in comparison.json"


def test_an_error_is_one_line(tmp_path, monkeypatch, capsys):
    from verl_turnkey.plugins.cli.main import main

    monkeypatch.setattr(sys, "argv", ["turnkey", "compare", str(tmp_path / "absent")])
    with pytest.raises(SystemExit):
        main()
    assert "turnkey: expected the folder of a run, found no" in capsys.readouterr().err


def test_texts_of_others_stay_texts(tmp_path, capsys):
    evil = "<script>alert(1)</script> $\\frac$ \x1b[31m\u202e|[bold]x</svg>"
    comparison = compare(runs(tmp_path, {"method": evil}, {"method": "_b"}))
    print_tables(comparison)
    output = capsys.readouterr().out + "".join(map(markdown, tables(comparison)))
    assert "[bold]x" in output
    assert "\x1b" not in output
    assert "\u202e" not in output
    assert "\\|[bold]" in markdown(tables(comparison)[0])
    draw([comparison], tmp_path / "c.png")


def test_without_matplotlib_the_rest_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("verl_turnkey.plugins.cli.view.find_spec", lambda name: None)
    folder = str(write(tmp_path / "run", CURVE))
    done = CliRunner().invoke(app, ["compare", folder, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0
    assert 'no picture: pip install "verl-turnkey[viz]"' in done.output
    assert not (tmp_path / "out" / "comparison.png").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"verl-turnkey\[viz\]"):
        draw([], tmp_path / "c.png")


def test_one_evaluation_and_numbers_that_are_not_finite(tmp_path):
    run = read(write(tmp_path / "one", {0: 0.5}))
    comparison = compare([run], level=0.1)
    assert comparison["range"] == [0, 0]
    assert comparison["groups"][0]["area"]["mean"] == 0.5
    draw([comparison], tmp_path / "c.png")
    assert np.isnan(run.metrics[VAL]).sum() == 0


def test_it_needs_no_verl():
    import subprocess

    code = (
        "import sys; from verl_turnkey.plugins.view import compare, runs, stats; "
        "print([name for name in ('verl', 'torch', 'ray', 'omegaconf', 'pandas') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


# --- Where success was lost and what changed about then: curves whose answer is plain to see --------------------------
STEPS = np.arange(1.0, 13.0)
SUCCESS = Curve(STEPS, np.array([0.3, 0.4, 0.4, 0.5, 0.4, 0.5, 0.4, 0.1, 0.0, 0.1, 0.0, 0.0]))


def jump(at: int, before: float, after: float, kind="size") -> Curve:
    return Curve(STEPS, np.where(at > STEPS, before, after) + 0.001 * (STEPS % 2), kind)


def test_a_fall_by_hand():
    drop = fall(SUCCESS)
    assert drop.best == pytest.approx((0.5 + 0.4 + 0.5) / 3)
    assert drop.best_at == 6
    assert drop.last == pytest.approx(0.1 / 3)
    assert drop.turn == 8  # where most was lost, though the mean of three steps is below half only from 9 on
    assert drop.steps == [9, 10, 11, 12]
    assert drop.within == (1, 11)


@pytest.mark.parametrize(
    "values",
    [
        [],
        [0.5],
        [0.1, 0.15, 0.1, 0.0, 0.0, 0.0],  # never had much
        [0.5, 0.5, 0.5, 0.3, 0.3, 0.3],  # lost less than half
        [0.1, 0.2, 0.3, 0.4, 0.5],
    ],
)
def test_no_fall(values):
    assert fall(Curve(np.arange(len(values)), np.array(values, float))) is None


@pytest.mark.parametrize(("episodes", "width"), [(np.inf, 3), (100, 3), (5, 6), (1, None)])
def test_the_fewer_episodes_a_step_is_worth_the_more_steps_it_takes(episodes, width):
    drop = fall(Curve(np.arange(24), np.repeat([0.7, 0.1], 12), episodes=episodes))
    assert (drop and drop.width) == width


def test_a_lucky_step_is_not_the_best_level():
    value = np.tile([0.2, 0.45, 0.2, 0.2], 8)
    value[9] = 1.0
    assert fall(Curve(np.arange(32), value)) is not None
    assert fall(Curve(np.arange(32), value, episodes=8)) is None


@pytest.mark.parametrize(
    ("validation", "silent"),
    [
        ({}, False),
        ({5: 0.6, 9: 0.6}, True),
        ({5: 0.6, 9: 0.8}, True),
        ({5: 0.6, 8: 0.3, 9: 0.6}, True),  # three quarters on average
        ({5: 0.6, 8: 0.2, 9: 0.6}, False),
        ({0: 0.6, 9: 0.3}, False),
        ({9: 0.6}, False),  # nothing before
        ({5: 0.6}, False),  # nothing since
        ({7: 0.6, 9: 0.6}, False),  # after step 7 it plays the policy of step 8
    ],
)
def test_a_fall_during_which_validation_held(validation, silent):
    """Success is lost at step 8, and below half from step 9 on; what tells of it begins at step 1."""
    curve = Curve(np.array(list(validation), float), np.array(list(validation.values()), float))
    assert (fall(SUCCESS, curve) is None) == silent


def test_validation_long_before_a_fall_says_nothing_of_it():
    success = Curve(np.arange(1.0, 17), np.append(np.full(4, 0.4), SUCCESS.value))
    assert fall(success).within[0] == 5
    assert fall(success, Curve(np.array([3.0, 13]), np.full(2, 0.1))) is not None
    assert fall(success, Curve(np.array([4.0, 13]), np.full(2, 0.1))) is None


def test_validation_after_a_fall_that_was_made_good_says_nothing_of_it():
    success = Curve(np.arange(1.0, 13), np.repeat([0.6, 0.0, 0.6], 4))
    about = fall(success)
    assert (about.steps, about.back) == ([6, 7, 8, 9], 10)
    assert fall(success, Curve(np.array([3.0, 9, 12]), np.full(3, 0.6))) == about
    assert fall(success, Curve(np.array([3.0, 8, 12]), np.full(3, 0.6))) is None


def test_a_fall_that_was_made_good():
    """A real run of the quickstart with four times its learning rate: success in 12 steps of training."""
    values = [0.438, 0.359, 0.203, 0.266, 0.109, 0.375, 0.5, 0.641, 0.781, 0.719, 0.703, 0.719]
    assert fall(Curve(STEPS, np.array(values), episodes=8)) is None  # of its 8 groups a step, half may be luck
    drop = fall(Curve(STEPS, np.array(values)))
    assert (drop.best, drop.best_at) == (0.438, 1)
    assert drop.last == pytest.approx((0.203 + 0.266 + 0.109) / 3)
    assert (drop.turn, drop.steps, drop.back) == (3, [5], 6)
    kl = [0.014, 0.018, 0.082, 0.02, 0.001, 0.003, 0.003, 0.003, 0.002, 0.005, 0.002, 0.001]
    reported = changes({"KL": Curve(STEPS, np.array(kl), "peak", 0.02)}, drop)
    assert [(change.step, change.before, change.after) for change in reported] == [(3, 0.003, 0.082)]
    norm = [0.254, 0.351, 3.0, 0.377, 0.153, 0.325, 0.324, 0.228, 0.256, 0.536, 0.273, 0.414]
    assert changes({"norm": Curve(STEPS, np.array(norm), "peak")}, drop) == []  # nothing was usual yet
    assert changes({"KL": Curve(STEPS, np.array(kl), "peak", 0.03)}, drop) == []


@pytest.mark.parametrize("episodes", [8, 64])
def test_the_run_on_the_page(episodes):
    """The one in docs/view-collapse.png, with 8 groups of 8 episodes a step: solved in the first step only."""
    success = Curve(STEPS, np.array([31 / 64] + 11 * [0.0]), episodes=episodes)
    drop = fall(success, Curve(np.array([0.0, 12.0]), np.array([0.42, 0.0])))
    assert (drop.best, drop.best_at, drop.last, drop.turn) == (31 / 64, 1, 0.0, 3)
    assert (drop.steps, drop.width, drop.back) == (list(range(3, 13)), 3, None)


def test_of_two_falls_the_last_counts():
    drop = fall(Curve(np.arange(1.0, 15), np.array([0.5, 0.5, 0, 0, 0, 0.5, 0.5, 0.5, 0.6, 0, 0, 0, 0.6, 0.6])))
    assert (drop.steps, drop.back, drop.last) == ([11, 12, 13], 14, 0.0)


def test_steps_without_a_number_and_out_of_order():
    order = [11, 3, 4, 0, 1, 2, 5, 6, 7, 8, 9, 10]
    step, value = np.append(STEPS[order], [3.5, 99]), np.append(SUCCESS.value[order], [np.nan, np.inf])
    assert fall(Curve(step, value)) == fall(SUCCESS)


def test_what_changed_stands_in_the_order_in_which_it_did():
    curves = {
        "afterwards": jump(10, 10, 20),
        "at once": jump(8, 0.1, 0.9, "share"),
        "a cause": jump(6, 1.0, 0.1),
        "gentle": jump(8, 10, 12),
        "a few points": jump(8, 0.40, 0.45, "share"),
        "not logged": Curve(STEPS, np.full(12, np.nan)),
        "never moved": Curve(STEPS, np.zeros(12)),
    }
    drop = changes(curves, fall(SUCCESS))
    late = fall(Curve(np.arange(1.0, 17), np.append(np.full(4, 0.4), SUCCESS.value)))
    assert late.within[0] == 5
    assert changes({"long ago": jump(4, 10, 20)}, late) == []
    assert [(change.what, change.step) for change in drop] == [("a cause", 6), ("at once", 8), ("afterwards", 10)]
    assert (drop[1].before, drop[1].after) == pytest.approx((0.1, 0.9), abs=0.01)


def test_noise_is_no_change():
    value = np.array([1, 1, 1, 1, 4, 1, 5, 1, 6, 1, 7, 1.0])
    assert changes({"restless": Curve(STEPS, value)}, fall(SUCCESS)) == []


def test_a_peak_is_held_against_what_was_usual_before():
    def norm(at, size):
        return {"norm": Curve(STEPS, np.where(at == STEPS, size, 1.0), "peak")}

    [peak] = changes(norm(7, 9.0), fall(SUCCESS))
    assert (peak.step, peak.before, peak.after) == (7, 1.0, 9.0)
    assert changes(norm(7, 2.9), fall(SUCCESS)) == []
    [kl] = changes({"KL": Curve(STEPS, -norm(7, 9.0)["norm"].value / 100, "peak", 0.02)}, fall(SUCCESS))
    assert kl.after == 0.09  # of either sign
    healthy = {"KL": Curve(STEPS, norm(7, 9.0)["norm"].value / 1000, "peak", 0.02)}
    assert changes(healthy, fall(SUCCESS)) == []
    assert changes(norm(2, 9.0), fall(SUCCESS)) == []  # long before
    assert changes(norm(12, 9.0), fall(SUCCESS)) == []  # long after


def test_the_fall_stands_among_what_changed():
    about = fall(SUCCESS)
    curves = {"before": jump(6, 1, 9), "with": jump(8, 1, 9), "after": jump(10, 1, 9)}
    rows = change_rows(about, changes(curves, about))
    assert [(row["step"], row["what"], row["fall"]) for row in rows] == [
        (6, "before", False), (8, "success", True), (8, "with", False), (10, "after", False),
    ]  # fmt: skip
    assert (rows[1]["before"], rows[1]["after"]) == ("47 %", "3 %")


def test_two_levels_of_at_least_two_numbers():
    assert split(np.array([1.0, 1, 1, 5, 5])) == 3
    assert split(np.array([1.0, 5, 5, 5, 5])) == 2  # one number is no level
    assert split(np.array([1.0, 5, 5])) == 0
    assert (formatted(0.0, "share"), formatted(0.004, "share"), formatted(0.5, "share"), formatted(0.5, "size")) == (
        "0 %", "0.4 %", "50 %", "0.5",
    )  # fmt: skip
