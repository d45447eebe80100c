"""Rules that hold for the whole source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculators_compat.adapter import Adapter
from speculators_compat.errors import CATALOG
from speculators_compat.registry import registry

ROOT = Path(__file__).parent.parent
PATCHES = sorted(p for p in (ROOT / "patches").glob("*.py") if p.name != "__init__.py")
SOURCES = sorted(
    {p.resolve() for folder in ("src", "patches") for p in (ROOT / folder).rglob("*.py") if p.is_file()}
)
OWN = [a for a in registry().adapters.values() if a.id not in registry().third_party]
FIELDS = ("id", "seam", "why", "since", "how", "upstream", "retire_when", "trigger")
#: The parts of an adapter file's docstring, which people read before the code.
PARTS = ("What breaks", "Since:", "How it is mended:", "Upstream:", "Retire when:")


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def test_there_is_something_to_look_at() -> None:
    names = {p.name for p in SOURCES}
    assert {"activation.py", "patcher.py", "scheduler_config.py", "engine.py"} <= names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: p.name)
def test_only_the_journal_changes_attributes_by_name(path: Path) -> None:
    if path.name == "patcher.py":
        return
    calls = {
        f"line {node.lineno}: {name}"
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (name := getattr(node.func, "id", getattr(node.func, "attr", ""))) in ("setattr", "delattr", "__setattr__")
    }
    assert not calls


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_adapters_assign_to_nothing_of_another_package(path: Path) -> None:
    """``context.module.x = ...`` or ``vllm.y = ...`` would be a change that nothing can list or undo."""
    tree = ast.parse(path.read_text())
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) else []:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                text = ast.unparse(target)
                assert not text.startswith(("context.", "sys.modules", "os.environ")), text
                assert text.partition(".")[0] not in imported, text


def test_every_error_id_that_is_raised_is_explained_and_the_other_way_round() -> None:
    sources = [*SOURCES, *(ROOT / "examples").glob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "errors.py")
    raised = set(re.findall(r"\bSC\d{3}\b", text))
    assert raised - CATALOG.keys() == set()
    assert CATALOG.keys() - raised == set()


@pytest.mark.parametrize("adapter", OWN, ids=lambda a: a.id)
def test_adapters_say_why_and_how(adapter: Adapter) -> None:
    for field in FIELDS:
        text = getattr(adapter, field)
        assert isinstance(text, str), field
        assert text.strip() == text != "", field
    assert re.fullmatch(r"[a-z0-9_]+", adapter.id)
    assert isinstance(adapter.required, bool)


@pytest.mark.parametrize("path", PATCHES, ids=lambda p: p.stem)
def test_adapter_files_are_documented(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    places = [doc.find(part) for part in PARTS]
    assert -1 not in places, [part for part, place in zip(PARTS, places, strict=True) if place < 0]
    assert places == sorted(places)


def test_every_adapter_is_in_the_matrix() -> None:
    from speculators_compat.matrix import load_matrix

    sets = load_matrix(known_adapters=registry().adapters).adapter_sets
    assert {id for ids in sets.values() for id in ids} == {a.id for a in OWN}
