"""``turnkey list methods NAME``."""

import pytest
from typer.testing import CliRunner

from verl_turnkey.advantage.paper_names import PAPER_NAMES
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.cli.tables import explain, shipped


def test_a_paper_is_explained_by_the_command():
    done = CliRunner().invoke(app, ["list", "methods", "gtpo"], catch_exceptions=False)
    assert done.exit_code == 0
    for words in (
        "gtpo is turn_norm here (also: group turn policy optimization, 2511.14846)",
        "\n    +turnkey=turn_norm\n",
        "note: statistics are of the group",
        "  turnkey.credit.over=group",
        "page: docs/methods/turn_norm.md",
    ):
        assert words in done.output


def test_one_of_ours_is_explained_with_its_papers():
    text = explain("hae")
    assert text.startswith("hae is a method of this package (also: HiPER, 2602.16165)\n\n    +turnkey=hae\n")
    assert "  needs extra.switch" in text


def test_parts_beside_the_method_are_explained():
    text = explain("SPO")
    for words in ("method progress: ", "loss segment_mask: ", "strategy spo_chain: ", "  turnkey.loss.threshold=0.9"):
        assert words in text
    assert "\nmodifier empg: " in explain("empg")


def test_what_is_not_here_says_what_differs():
    assert "\ndiffers: " in explain("StarPO")


def test_an_unknown_name_is_refused_with_the_closest():
    done = CliRunner().invoke(app, ["list", "methods", "vinepo"])
    assert "'vinepo'; did you mean 'VinePPO'?" in str(done.exception)


@pytest.mark.parametrize("name", [*shipped(), *(entry.names.split(" / ")[0] for entry in PAPER_NAMES)])
def test_every_name_is_explained_in_80_columns(name):
    lines = explain(name).splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("    +") and " " in line.strip())
