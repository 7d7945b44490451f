"""The folder of an evaluation: one identity, and every finished sample once."""

from __future__ import annotations

import copy
import json
import re

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.composing import composed
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
        value = [{"name": f"{file}:score", "weight": 2.0, "note": "a .py: file"}, "tags", 3]
        assert identity._files(value) == [file]
        identities.append(identity._without_folders(value))
    assert identities[0] == identities[1]
    assert identities[0][0]["name"] == "own.py:score"
    assert identities[0][1:] == ["tags", 3]
