"""What a library offers - names and call signatures - read either from live objects or from source text.

An adapter's probe is written once against :class:`Surface`. At activation it sees live objects, so what another plugin
changed is seen too; in ``compat-check`` it sees source files, so nothing heavy is imported.

A *name* is written ``package.module:Qualified.name``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .pieces import Body, member


@dataclass(frozen=True)
class Parameters:
    """The parameters a callable takes, without ``self``.

    Attributes:
        names: every named parameter, in order.
        required: those without a default.
        open: whether it also takes ``**kwargs``.
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    open: bool = False

    def missing(self, given: Iterable[str]) -> list[str]:
        """Required parameters that ``given`` does not name."""
        given = set(given)
        return [name for name in self.required if name not in given]

    def unknown(self, given: Iterable[str]) -> list[str]:
        """Names in ``given`` that the callable does not take."""
        return [] if self.open else [name for name in given if name not in self.names]


class Surface(Protocol):
    """Looks up names; ``None`` means that the name does not exist."""

    def has(self, name: str) -> bool: ...

    def has_module(self, module: str) -> bool: ...

    def parameters(self, name: str) -> Parameters | None: ...

    def text_lists(self, name: str) -> list[tuple[str, ...]] | None:
        """Lists and tuples written out in a function's source that hold nothing but texts."""
        ...

    def call_keywords(self, module: str, callee: str) -> tuple[str, ...] | None:
        """Keyword names with which ``module``'s source calls ``callee``; ``None`` if it never does."""
        ...


def live_parameters(obj: Any) -> Parameters:
    """Parameters of a live callable; for a class, those of its constructor."""
    names, required, is_open = [], [], False
    for parameter in inspect.signature(obj).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            is_open = True
        elif parameter.kind is not parameter.VAR_POSITIONAL and parameter.name != "self":
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    return Parameters(tuple(names), tuple(required), is_open)


class SourceSurface:
    """Reads ``.py`` files below ``roots``, with :mod:`speculators_compat.pieces`; imports nothing.

    Args:
        roots: maps a top-level package to the folder that holds it, or to any object with ``joinpath`` and
            ``read_text`` such as :class:`zipfile.Path` (an unpacked wheel need not be installed).
        supplied: source files of modules that an adapter supplies, see :mod:`speculators_compat.restored`;
            :meth:`has_module` does not count them.
    """

    def __init__(self, roots: dict[str, Any], supplied: Mapping[str, Path] | None = None) -> None:
        self._roots = roots
        self._supplied = supplied or {}
        self._tree = functools.lru_cache(maxsize=None)(self._read)

    def _read(self, module: str) -> Body | None:
        file = self._file(module)
        return None if file is None else Body(file.read_text(encoding="utf-8"))

    def _file(self, module: str) -> Any:
        root = self._roots.get(module.partition(".")[0])
        if root is None:
            return None
        *parents, last = module.split(".")
        folder = root
        for part in parents:
            folder = folder.joinpath(part)
        for candidate in (folder.joinpath(last + ".py"), folder.joinpath(last).joinpath("__init__.py")):
            if candidate.is_file():
                return candidate
        return None

    def _source(self, module: str) -> Body | None:
        body = self._tree(module)
        if body is None and module in self._supplied:
            return Body(self._supplied[module].read_text(encoding="utf-8"))
        return body

    def _find(self, name: str, seen: frozenset[str] = frozenset()) -> Body | ast.AST | None:
        module, _, qualified = name.partition(":")
        if name in seen:
            return None
        body = self._source(module)
        if not qualified or body is None:
            return body
        first, *rest = qualified.split(".")
        found = member(body, first)
        if isinstance(found, ast.ImportFrom):  # re-exported: follow it to where it is defined
            original = next((a.name for a in found.names if (a.asname or a.name) == first), first)
            base = module.rsplit(".", found.level)[0] if found.level else ""
            if found.level and self._is_package(module):
                base = module.rsplit(".", found.level - 1)[0] if found.level > 1 else module
            target = ".".join(filter(None, (base, found.module)))
            return self._find(f"{target}:{'.'.join([original, *rest])}", seen | {name})
        for part in rest:
            found = member(found, part) if found is not None else None
        return found

    def _is_package(self, module: str) -> bool:
        root = self._roots.get(module.partition(".")[0])
        return root is not None and bool(root.joinpath(*module.split(".")).joinpath("__init__.py").is_file())

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def has_module(self, module: str) -> bool:
        return self._tree(module) is not None

    def parameters(self, name: str) -> Parameters | None:
        node = self._find(name)
        if isinstance(node, (ast.ClassDef, Body)) and name.partition(":")[2]:
            init = member(node, "__init__")
            if isinstance(init, ast.FunctionDef):
                return _function_parameters(init)
            return _field_parameters(node.fields() if isinstance(node, Body) else node.body)
        return _function_parameters(node) if isinstance(node, ast.FunctionDef) else None

    def text_lists(self, name: str) -> list[tuple[str, ...]] | None:
        node = self._find(name)
        if not isinstance(node, ast.FunctionDef):
            return None
        found = []
        for child in ast.walk(node):
            if isinstance(child, (ast.List, ast.Tuple)):
                texts = [e.value for e in child.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
                if texts and len(texts) == len(child.elts):
                    found.append(tuple(texts))
        return found

    def call_keywords(self, module: str, callee: str) -> tuple[str, ...] | None:
        body = self._source(module)
        if body is None or callee not in body.text:
            return None
        return _call_keywords(ast.Module(body.tree, type_ignores=[]), callee)


class LiveSurface:
    """Looks at the imported modules themselves (and at source text only for :meth:`call_keywords`)."""

    def _find(self, name: str) -> Any:
        module, _, qualified = name.partition(":")
        try:
            obj: Any = importlib.import_module(module)
            for part in filter(None, qualified.split(".")):
                obj = getattr(obj, part)
        except (ImportError, AttributeError):
            return None
        return obj

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def has_module(self, module: str) -> bool:
        # Not imported: a probe for transformers must not import half of it.
        if module in sys.modules:
            return True
        try:
            return importlib.util.find_spec(module) is not None
        except ImportError:  # the package that would hold it does not exist
            return False

    def parameters(self, name: str) -> Parameters | None:
        obj = self._find(name)
        try:
            return live_parameters(obj) if callable(obj) else None
        except (TypeError, ValueError):
            return None

    def text_lists(self, name: str) -> list[tuple[str, ...]] | None:
        code = getattr(self._find(name), "__code__", None)
        if code is None:
            return None
        return [c for c in code.co_consts if isinstance(c, tuple) and c and all(isinstance(t, str) for t in c)]

    def call_keywords(self, module: str, callee: str) -> tuple[str, ...] | None:
        source = getattr(importlib.import_module(module), "__file__", None)
        return None if source is None else _call_keywords(ast.parse(Path(source).read_text("utf-8")), callee)


def _function_parameters(node: ast.FunctionDef) -> Parameters:
    positional = [a.arg for a in [*node.args.posonlyargs, *node.args.args]]
    without_default = positional[: len(positional) - len(node.args.defaults)]
    keyword = [a.arg for a in node.args.kwonlyargs]
    required = without_default + [
        a.arg for a, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None
    ]
    return Parameters(
        tuple(n for n in positional + keyword if n != "self"),
        tuple(n for n in required if n != "self"),
        node.args.kwarg is not None,
    )


def _field_parameters(statements: Iterable[ast.stmt]) -> Parameters:
    """Constructor parameters of a (pydantic) dataclass, from its annotated fields."""
    names, required = [], []
    for child in statements:
        if not isinstance(child, ast.AnnAssign) or not isinstance(child.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(child.annotation):
            continue
        value = child.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", getattr(value.func, "attr", "")) in ("field", "Field"):
            keywords = {k.arg: k.value for k in value.keywords}
            init = keywords.get("init")
            if isinstance(init, ast.Constant) and init.value is False:
                continue
            has_default = bool(value.args) or bool({"default", "default_factory"} & keywords.keys())
        else:
            has_default = value is not None
        names.append(child.target.id)
        if not has_default:
            required.append(child.target.id)
    return Parameters(tuple(names), tuple(required))


def _call_keywords(tree: ast.AST, callee: str) -> tuple[str, ...] | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == callee:
            return tuple(k.arg for k in node.keywords if k.arg is not None)
    return None
