"""env-check: every defect is found, and is the only one that is; healthy environments have none."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import defective_envs
import pytest
from defective_envs import DEFECTS, HEALTHY, IN_PROCESSES, MOVES
from typer.testing import CliRunner

from verl_turnkey.envs import EnvironmentKwargsError, UnknownEnvironmentError
from verl_turnkey.envs.answers import KEYS
from verl_turnkey.envs.checking import play
from verl_turnkey.envs.checking.properties import PROPERTIES, UNREACHED, judge
from verl_turnkey.envs.checking.report import Report, check, play_here, samples, table
from verl_turnkey.envs.checking.traces import Limits, Record
from verl_turnkey.plugins.cli.main import app

ROOT = Path(__file__).parents[4]
DEFECTIVE = defective_envs.__file__
CUSTOM = str(ROOT / "examples" / "custom_env.py")
SMALL = {"seeds": 2, "rollouts": 4, "steps": 12}


def judged(report: Report) -> dict[str, str]:
    return {finding.property: finding.status for finding in report.findings if finding.status in ("fail", "warn")}


def test_the_healthy_one_passes_everything_that_is_judged_in_one_process():
    report = check("defect/Corridor-v0", processes=0, **SMALL)
    assert judged(report) == {}
    assert report.ok
    skipped = {finding.property for finding in report.findings if finding.status == "skip"}
    assert skipped == {"processes", "threads", "clone", "memory"}


@pytest.mark.parametrize("env", HEALTHY, ids=lambda env: env.__name__)
def test_what_resembles_a_defect_is_none(env):
    assert judged(check(f"defect/{env.__name__}-v0", processes=0, **SMALL)) == {}


def test_how_it_is_cloned_is_said():
    copied = check("defect/Copied-v0", processes=0, **SMALL)
    assert copied["clone"].evidence.startswith("by a copy: 2 made, ")
    replayed = check("turnkey/FrozenLake-v0", processes=0, **SMALL)["clone"]
    assert replayed.evidence.startswith("by a reset and a replay: 1 made, ")


@pytest.mark.parametrize(("env", "property", "status", "words"), DEFECTS, ids=[env.__name__ for env, *_ in DEFECTS])
def test_a_defect_is_found_and_nothing_else(env, property, status, words):
    report = check(
        f"defect/{env.__name__}-v0", processes=0, step_timeout=0.04 if env.__name__ == "Slow" else 30, **SMALL
    )
    assert judged(report) == {property: status}
    assert words in report[property].evidence
    assert report.ok == (status == "warn")


def test_texts_that_got_no_answer_are_not_judged():
    report = check("defect/RaisesOnOtherText-v0", processes=0, **SMALL)
    assert (report["invalid_text"].status, report["invalid_text"].evidence) == ("skip", "no text got an answer")


def test_what_no_valid_action_could_show_is_not_judged():
    report = check("defect/SpeaksItsOwnLanguage-v0", processes=0, **SMALL)
    assert [report[name].status for name in ("group", "seed", "reuse")] == ["pass", "skip", "skip"]
    assert (
        report["seed"].evidence
        == report["reuse"].evidence
        == (
            "none of the 24 actions was valid, so only the starts were compared: list the actions in "
            "info['admissible'], name some with --action, or add oracle()"
        )
    )
    assert [line for line in report.lines() if line.startswith("reset ")], "no steps whose speed could be told"


def test_the_episode_of_most_different_actions_is_replayed():
    """This finds what the oracle's one step misses, and checks that also replay are not judged."""
    report = check("defect/StaysTired-v0", processes=0, **SMALL)
    assert judged(report) == {"reuse": "fail", "admissible": "warn"}
    assert "then 'You are tired.'; reset must" in report["reuse"].evidence
    unjudged = {finding.property for finding in report.findings if finding.evidence == "not judged while `reuse` fails"}
    assert unjudged == {"processes", "threads", "clone", "key_stable", "key_coarse", "images"}
    record = Record()
    play_here(play.Job("defect/StaysTired-v0", {}, (), (0, 1), rollouts=4, steps=12), record)
    assert [len(rollouts) for rollouts in record.groups()] == [4, 4], "a replay is no rollout more"


def test_what_all_instances_share_is_found_by_the_first_episode_of_a_process(monkeypatch):
    """Even if another episode, which began when all was changed, is the one that is replayed most."""
    monkeypatch.setattr(defective_envs.DoorsOfAll, "opened", set())
    report = check("defect/DoorsOfAll-v0", processes=0, **{**SMALL, "steps": 6})
    assert judged(report) == {"seed": "fail"}
    assert "'It opens.', then 'It was open.'" in report["seed"].evidence


@pytest.mark.parametrize(("used", "made"), [(0, 6), (2, 2)])
def test_a_reset_that_fails_on_a_later_instance_is_a_finding(monkeypatch, used, made):
    monkeypatch.setattr(defective_envs.LimitedSessions, "sessions", itertools.count(used))
    report = check("defect/LimitedSessions-v0", processes=0, **SMALL)
    assert judged(report) == {"runs": "fail"}
    assert "reset(seed=0) raised OSError: 'no session left'" in report["runs"].evidence
    assert report["makes"].evidence == f"made {made} instances"


def test_a_process_that_died_before_it_made_an_instance_made_none():
    makes = next(finding for finding in judge(Record(), Limits(), [("runs", "it died")]) if finding.property == "makes")
    assert (makes.status, makes.evidence) == ("skip", UNREACHED)


def test_an_environment_without_spaces_is_not_excused_by_them(monkeypatch):
    """A start that an unseeded reset draws at random may pass the second time."""
    verdicts = iter(["the start is random", ""])

    def fickle(env, **_):
        if fault := next(verdicts):
            raise AssertionError(fault)

    monkeypatch.setattr(play, "check_env", fickle)
    monkeypatch.setattr(play, "make", lambda *_: defective_envs.WithoutSpaces())
    job = play.Job("defect/WithoutSpaces-v0", {}, (), (0,), rollouts=1, steps=1)
    assert play._gymnasium(job) == ("AssertionError: 'the start is random'", "")


def test_one_step_has_no_key_that_could_repeat():
    report = check("defect/Quiz-v0", processes=0, **SMALL)
    assert (report["key_repeats"].status, report["key_repeats"].evidence) == (
        "skip",
        "no episode had a second action",
    )


def test_actions_can_be_named():
    report = check("defect/Leaps-v0", processes=0, actions=MOVES, **SMALL)
    assert judged(report) == {}
    assert "distinct valid ones played: 4; " in report["admissible"].evidence
    assert re.search(r"steps alike; distinct valid actions: [34]$", report["reuse"].evidence)
    unnamed, named = (check("defect/EitherWay-v0", processes=0, actions=actions, **SMALL) for actions in ((), MOVES))
    assert (judged(unnamed), judged(named)) == ({"admissible": "warn"}, {})
    listed = [check("defect/Corridor-v0", processes=0, actions=actions, **SMALL) for actions in ((), MOVES)]
    assert ["--action had no effect" in report["admissible"].evidence for report in listed] == [False, True]


def test_a_list_that_the_end_lacks_is_one():
    report = check("defect/ListsUntilTheEnd-v0", processes=0, **{**SMALL, "steps": 30})
    assert report["info"].evidence == "with admissible, success and task"


def test_what_a_seed_draws_may_be_hidden_at_first():
    report = check("defect/HiddenGoal-v0", processes=0, **SMALL)
    assert report["seeds_differ"].evidence == "2 seeds start alike, but the same actions lead to different states"


def test_every_property_has_a_defect_and_a_line_in_the_docs():
    assert {property for _, property, *_ in (*DEFECTS, *IN_PROCESSES)} == set(PROPERTIES)
    page = (ROOT / "docs" / "env-check.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(PROPERTIES)


def test_keys_of_info_are_those_of_the_docs():
    section = (ROOT / "docs" / "environments.md").read_text().split("## Keys of info")[1].split("\n## ")[0]
    named = {
        name for row in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert named == {*KEYS, "results", "outcome", "rewards"}


def test_the_anchor_rate_is_that_of_the_definition():
    report = check("defect/KeyCountsSteps-v0", processes=0, **SMALL)
    plain = check("defect/Corridor-v0", processes=0, **SMALL)
    assert report.measures.anchor_rate < plain.measures.anchor_rate
    assert report.measures.anchor_rate_text == plain.measures.anchor_rate_text


def test_states_that_only_pictures_tell_apart_are_counted_as_in_training():
    drawn, written = (check(f"defect/{name}-v0", processes=0, **SMALL) for name in ("Drawn", "NoKey"))
    assert drawn.measures.anchor_rate_text == written.measures.anchor_rate_text < 1
    assert f"shared-anchor rate {written.measures.anchor_rate_text:.2f} by observation" in written.lines()
    assert drawn.to_dict()["measures"]["anchor_rate"] is None, "there is no state_key"


def test_sizes_of_pictures_and_whether_equal_states_look_alike():
    assert check("defect/Corridor-v0", processes=0, **SMALL)["images"].evidence == "none"
    kwargs = {"level": "MiniGrid-Empty-5x5-v0", "images": True, "tile": 4}
    report = check("turnkey/MiniGrid-v0", kwargs, processes=0, **SMALL)
    assert report.ok
    assert re.fullmatch(
        r"\d+ of 28 x 28 pixels, \d+ different; equal states are drawn alike", report["images"].evidence
    )
    without_key = check("defect/Drawn-v0", processes=0, **SMALL)["images"].evidence
    assert re.search(r"of 16 x 1 pixels, .*; no state_key says whether", without_key)


@pytest.mark.parametrize(
    ("env_id", "modules", "kwargs", "warnings"),
    [
        ("example/GuessNumber-v0", [CUSTOM], {"highest": 10}, set()),
        ("turnkey/MiniGrid-v0", [], {"level": "BabyAI-GoToLocal-v0"}, set()),
    ],
)
def test_healthy_environments(env_id, modules, kwargs, warnings):
    report = check(env_id, kwargs, modules=modules, processes=0, **SMALL)
    assert report.ok
    assert set(judged(report)) <= warnings


def test_what_the_user_got_wrong_is_an_error_and_no_finding():
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'defect/Corridor-v0'"):
        check("defect/Coridor-v0", modules=[DEFECTIVE], processes=0)
    with pytest.raises(EnvironmentKwargsError, match="plain JSON"):
        check("defect/Corridor-v0", {"x": object()})
    with pytest.raises(ValueError, match="rollouts must be at least 2"):
        check("defect/Corridor-v0", rollouts=1)
    with pytest.raises(ValueError, match="processes must be at least 0, not -1"):
        check("defect/Corridor-v0", processes=-1)
    for name in ("step_timeout", "reset_timeout"):
        with pytest.raises(ValueError, match=f"{name} must be above 0, not 0"):
            check("defect/Corridor-v0", processes=0, **{name: 0})


def test_rollouts_for_some_seconds(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(play.time, "monotonic", lambda: float(next(clock)))
    job = play.Job("x", {}, (), (0, 1), rollouts=8, steps=5)
    assert list(job.further_rollouts()) == [*range(1, 8)]
    assert list(replace(job, seconds=3.0).further_rollouts()) == [1, 2, 3]
    assert list(replace(job, seconds=0.1).further_rollouts()) == [1]
    assert len(list(replace(job, seconds=1e9).further_rollouts())) == play.MOST_ROLLOUTS - 1
    with pytest.raises(ValueError, match="seconds must be above 0, not 0"):
        check("defect/Corridor-v0", seconds=0)


def test_seconds_take_the_place_of_rollouts():
    timed = check("defect/Corridor-v0", processes=0, seconds=1e-9, **SMALL)
    two = check("defect/Corridor-v0", processes=0, **{**SMALL, "rollouts": 2})
    four = check("defect/Corridor-v0", processes=0, **SMALL)
    assert timed["key_repeats"] == two["key_repeats"] != four["key_repeats"]


def test_command(capfd):
    def run(*arguments: str) -> tuple[int, str]:
        small = ["--seeds", "2", "--rollouts", "2", "--steps", "6", "--processes", "0"]
        result = CliRunner().invoke(app, ["env-check", *arguments, *small, "--module", DEFECTIVE])
        return result.exit_code, result.output

    code, out = run("defect/BothFlags-v0")
    assert code == 1
    assert out.splitlines()[-1] == "fails: flags"
    assert re.search(r"^fail  flags +seed \d+, step \d+: terminated and truncated are both set;", out, re.MULTILINE)
    assert run(CUSTOM)[1].startswith("example/GuessNumber-v0\n")  # a file belongs to no package
    code, out = run("defect/Corridor-v0", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["ok"]
    assert [finding["property"] for finding in report["findings"]] == list(PROPERTIES)
    assert report["env"]["id"] == "defect/Corridor-v0"
    assert report["measures"]["anchor_rate"] > 0
    assert run("defect/Leaps-v0")[1].endswith("look at: admissible\n")
    assert run("defect/Leaps-v0", "--action", "left", "--action", "right")[1].endswith("all good\n")
    for bad in (["defect/Corridor-v0", "--kwargs", "[1]"], [], ["defect/Corridor-v0", "--all-installed"]):
        assert run(*bad)[0] == 2


def test_table_of_the_installed_ones():
    todo, left_out = samples()
    assert ("turnkey/FrozenLake-v0", {}) in todo
    assert any(line.startswith("turnkey/WebShop-v0 needs a running webshop_server.py") for line in left_out)
    report = check("turnkey/FrozenLake-v0", {"size": 3}, processes=0, **SMALL)
    head, line, row = table([report]).splitlines()
    assert head.count("|") == line.count("|") == row.count("|")
    assert row.startswith('| turnkey/FrozenLake-v0 | `{"size": 3}` | gymnasium ')
    assert row.endswith("| none |")
    nothing = check("defect/Unmakeable-v0", processes=0, **SMALL)
    assert table([nothing]).splitlines()[-1].endswith("| - | - (max -) | - | - | - | - | fail: makes |")
    assert set(nothing.to_dict()["measures"].values()) == {None}
    assert nothing.lines()[1:] == [
        nothing.lines()[1],
        f"skip  {len(PROPERTIES) - 1} others: the check did not get that far",
        "fails: makes",
    ]
