"""What is found in pieces of a text must be what is found in all of it, parsed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from vllm_env import VllmEnv

from speculators_compat.pieces import Body, _bound, member
from speculators_compat.surface import _field_parameters

FILLER = "".join(f"    def filler_{k}(self, a={k}):\n        return [{k}, '#']\n\n" for k in range(80))
TRICKY = f'''"""A docstring
class Documented: ...
def documented(): ...
"""
from x import (
    first as renamed,
    second,
)
text = \'\'\'
class Quoted:
    """not one"""
\'\'\'
joined = 1 + \\
outer(2)
table = dict(
inside=1,
inside_too=2,
)
if text:
    conditional = 1
elif joined:
    conditional_too = 2
else:
    def otherwise(a): ...
try:
    from y import found
except ImportError:
    found = None
    def fallback(b): ...
else:
    unseen = 1
# def commented(): ...
twice = 1
def twice(c): ...
@decorate(
    "class NotThis:",
)
@dataclass(frozen=True)
class Fields(
    Base,
    keyword=1,
):
    """Fields.
    not_a_field: int
    """

    required: int
    """a remark: with colon"""
    kind: ClassVar[str] = "k"
    made: list = field(
        default_factory=list)
    if True:
        conditional: int = 1
{FILLER}
    @overload
    def over(self, a: int): ...
    @overload
    def over(self, a: str): ...
    def over(self, a): return f"{{a['b']}}" + "it's" + 'a "b'
    async def later(self, z): ...
    class Nested:
        deep: int
    last: int = 3
class Short: pass
class Short2: x: int = 1
(Short3, b) = 1, 2
async def later(d): ...
if documented: from z import one_line
'''
WORDS = [*dict.fromkeys(re.findall(r"\w+", TRICKY)), "absent"]


def shown(node: Body | ast.AST | None) -> object:
    """A node as something to compare; of a class its statements."""
    if isinstance(node, Body):
        return [ast.dump(s) for s in node.tree]
    if isinstance(node, ast.ClassDef):
        return [ast.dump(s) for s in node.body]
    return None if node is None else ast.dump(node)


def compare(text: str, names: list[str], inner: list[str] | None = None) -> None:
    body, tree = Body(text), ast.parse(text)
    for name in names:
        found, expected = body.member(name), _bound(tree.body, name)
        assert shown(found) == shown(expected), name
        if isinstance(found, Body) and isinstance(expected, ast.ClassDef):
            assert _field_parameters(found.fields()) == _field_parameters(expected.body), name
            bound = [getattr(s, "name", getattr(getattr(s, "target", None), "id", "absent")) for s in expected.body]
            for part in inner or bound:
                assert shown(member(found, part)) == shown(member(expected, part)), (name, part)


@pytest.mark.parametrize("tail", ["", "def broken_bracket(): return '['\n", "odd = '\\'' + \"\\\"\" + r'\\''\n"])
def test_a_text_full_of_traps(tail: str) -> None:
    compare(TRICKY + tail, WORDS, WORDS)


def test_a_long_class_is_not_parsed_as_a_whole() -> None:
    found = Body(TRICKY).member("Fields")
    assert isinstance(found, Body)
    assert found.member("absent") is None
    assert found.member("last") is not None
    assert "tree" not in vars(found)


@pytest.mark.parametrize("text", ["def broken(:\n", "x = (1\ndef broken(): ...\n", "x = '''\ndef broken(): ...\n"])
def test_what_is_no_python_holds_no_names(text: str) -> None:
    assert Body(text).member("broken") is None


@pytest.mark.parametrize("folder", ["config", "engine", "v1/core", "v1/engine"])
def test_the_same_names_in_vllm(vllm_env: VllmEnv, folder: str) -> None:
    files = sorted(Path(vllm_env.site / "vllm" / folder).rglob("*.py"))
    assert files
    for file in files:
        text = file.read_text(encoding="utf-8")
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, (ast.Name, ast.FunctionDef, ast.ClassDef))]
        names = dict.fromkeys(getattr(n, "id", getattr(n, "name", "")) for n in nodes)
        compare(text, [*names][:60])
