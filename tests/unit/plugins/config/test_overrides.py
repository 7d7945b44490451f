"""What is written as an override is what Hydra reads back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.config.overrides import override, read, values

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
        (1e-6, "1e-06"),
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
