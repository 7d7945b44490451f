"""The folder of an evaluation: one identity, and every finished sample once."""

from __future__ import annotations

import copy
import json
import re

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.leaves import every
from verl_turnkey.plugins.eval import identity
from verl_turnkey.plugins.eval.identity import differing, eval_id, file_digest
from verl_turnkey.plugins.eval.samples import Samples

FIELDS = {"model": {"sha256": "ab"}, "sampling": {"temperature": 1.0, "top_p": 1.0}, "rewards": [{"name": "step"}]}
TASK = '{"env_id": "e", "kwargs": {}, "seed": 1}'


def test_the_id_is_that_of_the_fields_in_any_order():
    turned = {name: FIELDS[name] for name in reversed(FIELDS)}
    assert eval_id(turned) == eval_id(FIELDS)
    assert re.fullmatch("[0-9a-f]{16}", eval_id(FIELDS))
    other = copy.deepcopy(FIELDS)
    other["sampling"]["top_p"] = 0.9
    assert eval_id(other) != eval_id(FIELDS)


def test_differing_fields_are_named_down_to_the_leaf():
    other = copy.deepcopy(FIELDS)
    other["sampling"]["top_p"] = 0.9
    other["rewards"].append({"name": "length"})
    other["more"] = 1
    fields = differing(FIELDS, other)
    assert [*fields] == ["more", "rewards", "sampling.top_p"]
    assert (fields["more"], fields["sampling.top_p"]) == ((None, 1), (FIELDS["sampling"]["top_p"], 0.9))
    assert differing(FIELDS, copy.deepcopy(FIELDS)) == {}


def test_a_file_is_a_field_whatever_dots_its_name_has():
    fields = differing({"modules": {"my_env.py": "a1"}}, {"modules": {"my_env.py": "b2"}})
    assert fields == {"modules.my_env.py": ("a1", "b2")}


def test_a_digest_is_of_names_and_contents(tmp_path):
    for name, text in (("a", "xy"), ("b", "z")):
        (tmp_path / name).write_text(text)
    files = [tmp_path / "a", tmp_path / "b"]
    before = file_digest(files)
    assert before == file_digest(files) != file_digest(files[::-1])
    (tmp_path / "a").write_text("x")
    (tmp_path / "b").write_text("yz")
    assert file_digest(files) != before


def test_samples_are_found_again(tmp_path):
    kept = Samples(tmp_path, FIELDS)
    keys = [kept.key(TASK, number) for number in range(3)]
    assert len({*keys}) == 3
    for number in (0, 1):
        kept.add(keys[number], {"success": bool(number)})
    kept.close()
    again = Samples(tmp_path, copy.deepcopy(FIELDS))
    assert again.key(TASK, 2) == keys[2]
    assert [*again.done] == keys[:2]
    assert again.done[keys[1]] == {"key": keys[1], "success": True}
    again.close()


def test_samples_of_an_earlier_version_count_by_their_current_names(tmp_path):
    Samples(tmp_path, FIELDS).close()
    sample = {"key": "a", "success": True, "return": 1.0, "score": 0.5, "rewards": {"step": 1.0, "length": -0.5}}
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    kept = Samples(tmp_path, FIELDS)
    assert kept.done["a"] == {
        "key": "a",
        "success": True,
        "env_return": 1.0,
        "composed_return": 0.5,
        "composed_return.step": 1.0,
        "composed_return.length": -0.5,
    }
    kept.close()


@pytest.mark.parametrize("torn", ['{"key": "x", "succ', '{"key": "x"}'])
def test_half_a_line_is_no_sample_and_is_cut_off(tmp_path, torn):
    """Also one that is JSON: what follows would stand on the same line."""
    kept = Samples(tmp_path, FIELDS)
    kept.add("a", {"success": True})
    kept.close()
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(torn)
    again = Samples(tmp_path, FIELDS)
    assert [*again.done] == ["a"]
    again.add("b", {"success": False})
    again.close()
    lines = (tmp_path / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["a", "b"]


def test_another_evaluation_is_refused_and_stays(tmp_path):
    kept = Samples(tmp_path, FIELDS)
    kept.add("a", {"success": True})
    kept.close()
    other = {**FIELDS, "sampling": {"temperature": 0.0, "top_p": 1.0}}
    with pytest.raises(
        ConfigError, match=r"differs in\n  sampling.temperature: 1.0 there, 0.0 now\nGive another --out"
    ):
        Samples(tmp_path, other)
    again = Samples(tmp_path, FIELDS)
    assert [*again.done] == ["a"]
    again.close()
    anew = Samples(tmp_path, other, new=True)
    assert anew.done == {}
    anew.close()
    assert json.loads((tmp_path / "eval.json").read_text())["eval_id"] == eval_id(other)


def test_secrets_are_told_apart_but_neither_written_nor_shown(tmp_path):
    def fields(key):
        config = composed(
            ["+turnkey=base", "turnkey.env.id=turnkey/FrozenLake-v0", f"+turnkey.env.kwargs.api_key={key}"]
        )
        return identity.identity(config, {"name": "m", "tag": None}, None)

    Samples(tmp_path, fields("hunter2")).close()
    with pytest.raises(
        ConfigError, match=r"environment.kwargs.api_key: '\*\*\* \(\w+\)' there, '\*\*\* \(\w+\)' now"
    ) as raised:
        Samples(tmp_path, fields("hunter3"))
    assert "hunter" not in (tmp_path / "eval.json").read_text() + str(raised.value)


def test_files_of_the_user_count_by_name_and_content(tmp_path):
    """Not by their folder: the same evaluation on another machine has the same id."""
    identities = []
    for folder in ("here", "there"):
        file = tmp_path / folder / "own.py"
        file.parent.mkdir()
        file.write_text("def score(steps): ...\n")
        value = [{"name": f"{file}:score", "weight": 2.0, "note": "a .py: file"}, {"name": "tags"}]
        identities.append(every()["turnkey.rewards"].content(value))
    assert identities[0] == identities[1]
    assert re.fullmatch(r"own.py:score \(\w{16}\)", identities[0][0].pop("name"))
    assert identities[0] == [{"weight": 2.0, "note": "a .py: file"}, {"name": "tags"}]


ROLLOUT = "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("turnkey.mcp.servers={here}/mcp.json", r"turnkey.mcp.servers: None there, 'mcp.json \(\w{16}\)' now"),
        ("turnkey.mcp.tools=[look]", r"turnkey.mcp.tools: None there, \['look'\] now"),
        (
            ROLLOUT + ".multi_turn.tool_config_path={here}/mcp.json",
            r"tool_config_path: None there, 'mcp.json \(\w{16}\)' now",
        ),
        (
            ROLLOUT + ".multi_turn.function_tool_path={here}/a.py",
            r"function_tool_path: None there, 'a.py \(\w{16}\)' now",
        ),
        ("turnkey.modules=[{here}/a.py]", r"turnkey.modules: \[\] there, \['a.py \(\w{16}\)'\] now"),
        ("data.max_prompt_length=99", r"data.max_prompt_length: \d+ there, 99 now"),
    ],
)
def test_what_is_played_is_part_of_the_identity(tmp_path, word, line):
    """Above all the tools: samples with others are another evaluation."""
    (tmp_path / "out").mkdir()
    for name in ("mcp.json", "a.py"):
        (tmp_path / name).write_text("{}")

    def fields(*words):
        config = composed(["+turnkey=base", "turnkey.env.id=turnkey/FrozenLake-v0", *words])
        return identity.identity(config, {"name": "m"}, None)

    changed = word.format(here=tmp_path)
    Samples(tmp_path / "out", fields()).close()
    Samples(tmp_path / "out", fields("turnkey.rollout.layout=steps", "turnkey.env.step_timeout=9")).close()
    with pytest.raises(ConfigError, match=rf"differs in\n  \S*{line}\nGive"):
        Samples(tmp_path / "out", fields(changed))
    if str(tmp_path) in changed:
        before = fields(changed)
        for name in ("mcp.json", "a.py"):
            (tmp_path / name).write_text("{} ")
        assert len(differing(before, fields(changed))) == 1


def test_a_panel_has_the_tools_and_is_as_before_without_any(tmp_path):
    from verl_turnkey.envs.tasks import Panel
    from verl_turnkey.plugins.config.playing import differing as differing_from
    from verl_turnkey.plugins.config.playing import settings, words

    (tmp_path / "mcp.json").write_text("{}")
    plain = ["+turnkey=base", "turnkey.env.id=turnkey/FrozenLake-v0", "+turnkey.env.kwargs.size=4"]
    tools = [f"turnkey.mcp.servers={tmp_path}/mcp.json", "turnkey.mcp.shared=[pad]"]
    panels = [
        Panel({"settings": settings(composed(line)), "environment": {"kwargs": {"size": 4}}})
        for line in (plain, [*plain, *tools])
    ]
    assert [*panels[0].content["settings"]] == ["rollout", "template_sha256", "examples_sha256", "tokens", "rewards"]
    assert [name.partition(":")[0] for name in differing_from(panels[0], composed([*plain, *tools]))] == [
        "turnkey.mcp.servers",
        "turnkey.mcp.shared",
    ]
    again = [*plain, *words(panels[1])]
    [line] = differing_from(panels[1], composed(again))
    assert re.fullmatch(r"turnkey.mcp.servers: None, not 'mcp.json \(\w{16}\)'", line)
    assert differing_from(panels[1], composed([*again, tools[0]])) == []
