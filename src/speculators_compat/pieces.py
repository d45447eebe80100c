"""Source text that is parsed only where it is looked at.

Parsing vLLM's sources as a whole would take most of ``compat-check``'s time: a probe asks for a few names of files with
thousands of lines. So a module's text, and a long class's, is cut into its statements, and only those that can bind the
name in question are parsed. What is found is the same as if everything were parsed, for text that is Python.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

#: Everything that decides where a statement ends: line ends, comments, strings and brackets. Every alternative begins with
#: a plain character, which makes the search four times as fast.
_TOKENS = r"""
    \n(?=INDENT[^\s\#])
  | \#[^\n]*
  | \"\"\"[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"\"\"
  | '''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''
  | "[^"\\\n]*(?:\\.[^"\\\n]*)*"
  | '[^'\\\n]*(?:\\.[^'\\\n]*)*'
  | " | ' | \\.
  | \( | \[ | \{ | \) | \] | \}
"""
#: These begin a line and go on with the statement before.
_CONTINUED = re.compile(r"[ \t]*(?:(?:elif|else|except|finally)\b|[)\]}])")
_DEFINITION = re.compile(r"^[ \t]*(?:async[ \t]+)?(def|class)[ \t]+(\w+)", re.MULTILINE)
_FIELD = re.compile(r"[ \t]*\w+[ \t]*:")
#: Classes shorter than this are parsed as a whole.
_SHORT = 3000


@functools.cache
def _tokens(indent: str) -> re.Pattern[str]:
    return re.compile(_TOKENS.replace("INDENT", indent), re.VERBOSE | re.DOTALL)


class _NotCut(Exception):
    """The text can't be cut with certainty."""


def _lines(text: str, indent: str) -> Iterator[int]:
    """Where lines begin that are indented so (a regular expression), and that no string, bracket or joined line goes over.

    Raises:
        _NotCut: if a string or bracket is left open (or nested quotes of Python 3.12 look so).
    """
    depth = 0
    for found in _tokens(indent).finditer(text):
        start = found.start()
        first = text[start]
        if first == "\n":
            if not depth:
                yield found.end()
        elif first in "([{":
            depth += 1
        elif first in ")]}":
            depth -= 1
        elif first in "\"'" and found.end() == start + 1:
            raise _NotCut
    if depth:
        raise _NotCut


def _cut(text: str, indent: str) -> list[str]:
    """The statements of a block whose lines begin with ``indent``; ``text`` begins with a line end."""
    starts = list(_lines(text, re.escape(indent)))
    pieces: list[str] = []
    decorated = False
    for start, end in itertools.pairwise([*starts, len(text)]):
        piece = text[start:end]
        if pieces and (decorated or _CONTINUED.match(piece)):
            pieces[-1] += piece
        else:
            pieces.append(piece)
        decorated = piece.startswith("@", len(indent))
    return pieces


class Body:
    """The statements of a module, or of a class.

    Args:
        text: source of the module, or of the class from its header on.
        in_class: whether it is a class.
    """

    def __init__(self, text: str, *, in_class: bool = False) -> None:
        self.text = text
        self._in_class = in_class

    @functools.cached_property
    def tree(self) -> list[ast.stmt]:
        """All of it, parsed; empty where it is not Python."""
        try:
            if not self._in_class:
                return ast.parse(self.text).body
            return _inner(ast.parse(f"if 1:\n{self.text}" if self.text[:1].isspace() else self.text).body)
        except SyntaxError:
            return []

    def member(self, name: str) -> Body | ast.AST | None:
        """The statement that binds ``name``, the last one first."""
        if name not in self.text:
            return None
        found: Body | ast.AST | None = None
        try:
            for piece in self._pieces or ():
                if name not in piece:
                    continue
                kind, defined, start = _definition(piece)
                if kind == "class" and defined == name and len(piece) > _SHORT:
                    found = Body(piece[start:], in_class=True)
                elif kind is None or defined == name:
                    found = _bound(self._parse(piece), name, found)
        except SyntaxError:
            self._pieces = None
        return found if self._pieces is not None else _bound(self.tree, name)

    def fields(self) -> list[ast.stmt]:
        """The statements of a class that annotate names, and perhaps others."""
        try:
            if self._pieces is not None:
                return [s for piece in self._pieces if _FIELD.match(piece) for s in self._parse(piece)]
        except SyntaxError:
            self._pieces = None
        return self.tree

    @functools.cached_property
    def _pieces(self) -> list[str] | None:
        """The statements; ``None`` where the text has to be parsed as a whole."""
        try:
            if not self._in_class:
                return _cut("\n" + self.text, "")
            start = next(_lines(self.text, re.escape(_indent(self.text)) + r"[ \t]+"), None)
            if start is None:
                return None
            return _cut("\n" + self.text[start:], _indent(self.text[start:]))
        except _NotCut:
            return None

    def _parse(self, piece: str) -> list[ast.stmt]:
        return _inner(ast.parse("class _:\n" + piece).body) if self._in_class else ast.parse(piece).body


def member(node: Body | ast.AST, name: str) -> Body | ast.AST | None:
    """The statement in ``node``'s body that binds ``name``, the last one first; looks into ``if`` and ``try`` too."""
    return node.member(name) if isinstance(node, Body) else _bound(getattr(node, "body", []), name)


def _indent(text: str) -> str:
    return text[: len(text) - len(text.lstrip(" \t"))]


def _inner(statements: list[ast.stmt]) -> list[ast.stmt]:
    """What is in the class, which may stand in an ``if``."""
    (only,) = statements
    if isinstance(only, ast.If):
        (only,) = only.body
    assert isinstance(only, ast.ClassDef)
    return only.body


def _definition(piece: str) -> tuple[str | None, str, int]:
    """``def`` or ``class``, the name, and where that is in the piece, after decorators; ``None`` for other statements."""
    decorated = piece.lstrip(" \t").startswith("@")
    found = _DEFINITION.search(piece) if decorated else _DEFINITION.match(piece)
    return (found.group(1), found.group(2), found.start()) if found else (None, "", 0)


def _bound(
    statements: Iterable[ast.AST], name: str, found: Body | ast.AST | None = None
) -> Body | ast.AST | None:
    """The last of ``statements`` that binds ``name``, or else ``found``."""
    for child in statements:
        if isinstance(child, (ast.If, ast.Try)):
            for block in [child, *getattr(child, "handlers", [])]:
                found = _bound(block.body, name) or found
            found = found or _bound(child.orelse, name)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if child.name == name and not _is_overload(child):
                found = child
        elif isinstance(child, ast.Assign):
            if any(isinstance(t, ast.Name) and t.id == name for t in child.targets):
                found = child
        elif isinstance(child, ast.AnnAssign):
            if isinstance(child.target, ast.Name) and child.target.id == name:
                found = child
        elif isinstance(child, ast.ImportFrom) and any((a.asname or a.name) == name for a in child.names):
            found = child
    return found


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return any(getattr(d, "id", getattr(d, "attr", "")) == "overload" for d in node.decorator_list)
