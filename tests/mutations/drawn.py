"""Mutations drawn by a seed from all that can be made of a room: nobody who knows its tests chose them.

Each changes one place: a comparison, a sum or product, ``and`` or ``or``, a condition or a ``not``, a number, a
returned value, or a statement that is left out. Texts, types, imports and errors' messages are left alone.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

OPERATORS: dict[type, tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}
EXTREMES = {"min": "max", "max": "min"}
LEFT_ALONE = (ast.JoinedStr, ast.Import, ast.ImportFrom)
FROZEN = "dataclass(frozen=True)"


class Edit(NamedTuple):
    """Bytes ``start`` to ``end`` of a file become ``new``; ``line``: that of ``start``, from 0."""

    start: int
    end: int
    new: str
    line: int


class File:
    """A source file, with all that can be changed in it."""

    def __init__(self, path: Path) -> None:
        self.source = path.read_bytes()
        self._begins = [0]
        for line in self.source.splitlines(keepends=True):
            self._begins.append(self._begins[-1] + len(line))

    def edits(self) -> list[Edit]:
        """In the order of the file."""
        return sorted(set(self._of(ast.parse(self.source))))

    def texts(self, edit: Edit) -> tuple[str, str]:
        """What becomes what: whole lines, as many as it takes to occur once in the file."""
        first = edit.line
        last = next(i for i, begin in enumerate(self._begins) if begin >= edit.end)  # the line after
        while self.source.count(self.source[self._begins[first] : self._begins[last]]) > 1:
            first, last = (first - 1, last) if first else (first, last + 1)
        start, end = self._begins[first], self._begins[last]
        new = self.source[start : edit.start] + edit.new.encode() + self.source[edit.end : end]
        return self.source[start:end].decode(), new.decode()

    def is_valid(self, edit: Edit) -> bool:
        """Whether it leaves a program."""
        try:
            ast.parse(self.source[: edit.start] + edit.new.encode() + self.source[edit.end :])
        except SyntaxError:
            return False
        return True

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self._begins[node.lineno - 1] + node.col_offset
        return start, self._begins[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _whole(self, node: ast.expr | ast.stmt, new: str) -> Edit:
        return Edit(*self._span(node), new, node.lineno - 1)

    def _between(self, operator: ast.AST, left: ast.expr, right: ast.expr) -> Iterator[Edit]:
        """The operator that stands between two operands."""
        if type(operator) not in OPERATORS:
            return
        old, new = OPERATORS[type(operator)]
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self.source[start:end].decode()
        if gap.count(old) == 1 and "#" not in gap:
            at = start + gap.index(old)
            line = sum(begin <= at for begin in self._begins) - 1
            yield Edit(at, at + len(old), new, line)

    def _of(self, node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, LEFT_ALONE) or (isinstance(node, ast.Call) and self._text(node) == FROZEN):
            return
        if isinstance(node, ast.stmt):
            yield from self._of_statement(node)
        elif isinstance(node, ast.expr):
            yield from self._of_expression(node)
        test = getattr(node, "test", None)
        for condition in [test] * isinstance(node, ast.If | ast.While | ast.IfExp) + getattr(node, "ifs", []):
            if not isinstance(condition, ast.UnaryOp):
                yield self._whole(condition, f"(not ({self._text(condition)}))")
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "exc") or (isinstance(node, ast.Assert) and name == "msg"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self._of(child)

    def _of_statement(self, node: ast.stmt) -> Iterator[Edit]:
        if isinstance(node, ast.Return) and not (node.value is None or _is(node.value, None)):
            yield self._whole(node, "return None")
        targets = node.targets if isinstance(node, ast.Assign) else []
        stored = bool(targets) and not any(isinstance(target, ast.Name | ast.Tuple) for target in targets)
        called = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant | ast.Yield | ast.YieldFrom)
        if stored or called or isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete):
            yield self._whole(node, "pass")

    def _of_expression(self, node: ast.expr) -> Iterator[Edit]:
        if isinstance(node, ast.Compare):
            operands = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, operands, node.comparators, strict=False):
                yield from self._between(operator, left, right)
        elif isinstance(node, ast.BinOp):
            yield from self._between(node.op, node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between(node.op, left, right)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
            yield self._whole(node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            changed = not node.value if isinstance(node.value, bool) else node.value + 1
            yield self._whole(node, repr(changed))
        elif isinstance(node, ast.Name) and node.id in EXTREMES:
            yield self._whole(node, EXTREMES[node.id])


def _is(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def draw(root: Path, room: str, seed: int, count: int) -> list[tuple[str, str, str]]:
    """``count`` mutations (file, old, new) of ``root/room``, at most one of a line: the same ones for the same code.

    More of the same seed are those of fewer and others.
    """
    files = {str(path.relative_to(root)): File(path) for path in sorted((root / room).rglob("*.py"))}
    all_of_them = [(name, edit) for name, file in files.items() for edit in file.edits()]
    random.Random(f"{room} {seed}").shuffle(all_of_them)
    drawn: dict[tuple[str, int], Edit] = {}
    for name, edit in all_of_them:
        if len(drawn) < count and (name, edit.line) not in drawn and files[name].is_valid(edit):
            drawn[name, edit.line] = edit
    return [(name, *files[name].texts(edit)) for (name, _), edit in drawn.items()]
