"""Prose of pages, docstrings, comments and messages is what a native engineer would say aloud."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = (
    *("advantage", "losses", "envs", "plugins", "recipe", "examples", "benchmarks", "docs"),
    *("README.md", "SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"),
)
EXAMPLES = "| instead of | write |"
"""head of the table at the end of CONTRIBUTING.md, which shows such phrases"""
INSTEAD = {
    r"(?<!here )(?:is|are|was|were) no (?!longer|more|less|different|better|worse|matter)\S+": "is not a ...",
    r"(?:is|are|was|were) told(?! apart| to )": "gets, receives",
    r"to be had": "available; or who does not publish it",
    r"had not to": "did not have to",
    r"(?:that|those) of those": "name the thing again",
    r"of what rewards are": "name the quantity",
    r"under the tasks' own": "default ...",
    r"of the own": "of its own",
}
"""phrases that no native speaker says -> what to write"""
CODE = ("advantage", "losses", "envs", "plugins", "recipe", "examples", "benchmarks", "tests", "tools")
BY_GRAMMAR = {"found", "given", "asked", "shown", "said", "told", "beside", "one", "each"}
PUBLIC = {("advantage/batch.py", "given")}
PHRASES = re.compile(rf".{{,40}}\b({'|'.join(INSTEAD)})")


def phrases(text: str) -> list[str]:
    """Each phrase, also one that is broken over lines, with the text before it."""
    return [match[0] for match in PHRASES.finditer(re.sub(r"[\s#]+", " ", text))]


def text_of(file: Path) -> str:
    return file.read_text("utf-8").partition(EXAMPLES)[0]


def test_no_page_and_no_file_of_code_has_a_phrase_of_the_list():
    roots = [ROOT / place for place in PLACES]
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*")))]
    texts = [file for file in files if file.suffix in (".py", ".md", ".yaml", ".sh")]
    assert len(texts) > 500
    matches = [f"{file.relative_to(ROOT)}: {text}" for file in texts for text in phrases(text_of(file))]
    assert not matches, "\n".join(["", *matches, "write instead:", *map(" -> ".join, INSTEAD.items())])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the task is no\nJSON object", 1),
        ("# the class is no\n# frozen dataclass", 1),
        ("its weights were not to be had", 1),
        ("a panel is no longer needed; there is no file, and there are no rows", 0),
        ("states are told apart, and the model is told to answer", 0),
    ],
)
def test_a_phrase_is_recognised(text: str, count: int):
    assert len(phrases(text)) == count


def parsed(text: str) -> ast.AST:
    try:
        return ast.parse(text)
    except SystemError:  # Python 3.11, if another thread parses meanwhile, as a printed traceback does
        return ast.parse(text)


def names_by_grammar(text: str) -> list[tuple[int, str]]:
    """Line and name of each variable, parameter, attribute and function that says nothing of its content."""
    names = []
    for node in ast.walk(parsed(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                names.append((node.lineno, name))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append((node.lineno, name))
    return [(line, name) for line, name in names if name.strip("_") in BY_GRAMMAR]


def test_names_say_what_they_hold():
    matches = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for room in CODE
        for file in sorted((ROOT / room).rglob("*.py"))
        for line, name in names_by_grammar(file.read_text("utf-8"))
        if (str(file.relative_to(ROOT)), name) not in PUBLIC
    ]
    assert not matches, "\n".join(["name these after their content:", *matches])


def test_a_name_by_grammar_is_recognised():
    text = "for each in rows:\n    self.found = [one for one in each]\ndef said(given, *, rows):\n    rows_found = 1"
    assert sorted(names_by_grammar(text)) == [(1, "each"), (2, "found"), (2, "one"), (3, "given"), (3, "said")]
