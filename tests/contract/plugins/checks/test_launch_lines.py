"""Each launch line goes the way of ``main_ppo``'s driver up to the start of Ray, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driving import Driver, driving
from launch_lines import REFUSED, STARTS, TABLE, filled, write_files


@pytest.fixture(scope="module")
def driver(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """``driver(line)`` does what ``main_ppo`` does with ``BASE`` and the line; returns what it says."""
    files = write_files(tmp_path_factory.mktemp("lines"), model_dir)
    with driving() as drive:
        yield lambda line: drive(filled(line, files))


def test_the_table_is_long_enough():
    assert len(REFUSED) >= 200
    assert len(STARTS) >= 40
    assert len({line for line, _ in REFUSED}) == len(REFUSED)


@pytest.mark.parametrize(("line", "words"), REFUSED, ids=[line or "nothing" for line, _ in REFUSED])
def test_refused_by_name_before_ray(driver: Driver, line, words):
    with pytest.raises(Exception) as error:  # noqa: PT011 - the words tell what was meant, Hydra's own included
        driver(line)
    message = str(error.value)
    for word in words.split(" | "):
        assert word in message


def test_an_unknown_key_is_one_error(driver: Driver):
    line = "+turnkey=gigpo +actor_rollout_ref.rollout.temprature=1"
    with pytest.raises(
        Exception, match=r"^actor_\S+\.temprature=1: .*rollout\.temperature\? \[unknown-dataclass-key\]$"
    ):
        driver(line)
    with pytest.raises(Exception, match=r"^2 errors in this launch line:\n1\. .*temprature=1: .*\n2\. .*lora_rnk=8: "):
        driver(f"{line} +actor_rollout_ref.model.lora_rnk=8")
    with pytest.raises(Exception, match=r"^verl rejects actor_rollout_ref\.rollout\.temprature: TypeError: "):
        driver(f"{line} turnkey.ignore=[unknown-dataclass-key]")


@pytest.mark.parametrize("line", STARTS, ids=STARTS)
def test_starts(driver: Driver, line):
    assert "verl has no such key" not in driver(line)


def test_data_that_name_the_default_loop_are_as_data_that_name_none(driver: Driver):
    assert driver("+turnkey=gigpo data.train_files={tmp}/own.parquet") == driver("+turnkey=gigpo")


def test_groups_are_not_filtered_by_what_an_older_verl_does_not_know(driver: Driver, monkeypatch):
    line = "+turnkey=gigpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric="
    driver(f"{line}reward")
    monkeypatch.delattr("verl.trainer.ppo.v1.replay_buffer.FILTER_GROUPS_REWARD_METRIC")
    with pytest.raises(Exception, match=r"metric='reward' .* verl \d.*; choices: acc, env_return"):
        driver(f"{line}reward")
    with pytest.raises(Exception, match=r"set algorithm\.filter_groups\.metric=acc"):
        driver(f"{line}null")
    driver(f"{line}acc")


def rows(name: str, *fields: str) -> Any:
    """The rows of a part of the table, with their lines as ids."""
    return pytest.mark.parametrize(
        ("line", *fields),
        [(row["line"], *(row[field] for field in fields)) for row in TABLE[name]],
        ids=[row["line"] for row in TABLE[name]],
    )


@rows("warned", "words")
def test_starts_with_a_warning(driver: Driver, line, words):
    output = " ".join(driver(line if line.startswith("+turnkey=") else f"+turnkey=gigpo {line}").split())
    for word in words.split(" | "):
        assert word in output


@rows("refused_or_not", "words", "fine")
def test_refused_and_its_neighbour_is_not(driver: Driver, line, words, fine):
    with pytest.raises(Exception) as error:  # noqa: PT011 - the words tell what was meant
        driver(line)
    message = " ".join(str(error.value).split())
    for word in words.split(" | "):
        assert word in message
    driver(fine)


@rows("warned_or_not", "words", "fine")
def test_warned_about_and_its_neighbour_is_not(driver: Driver, line, words, fine):
    messages, quiet = (" ".join(driver(text).split()) for text in (line, fine))
    for word in words.split(" | "):
        assert word in messages
    assert words.split(" | ")[-1] not in quiet


@rows("said", "words", "silent")
def test_starts_with_words_and_without_others(driver: Driver, line, words, silent):
    """Of the loops that the rows name."""
    output = " ".join(driver(line).split())
    assert all(word in output for word in words.split(" | ")), output
    assert not any(word in output for word in silent.split(" | ")), output


@rows("quiet", "silent")
def test_starts_without_a_word(driver: Driver, line, silent):
    output = " ".join(driver(f"+turnkey=gigpo {line}").split())
    assert "this run" in output
    assert silent not in output
