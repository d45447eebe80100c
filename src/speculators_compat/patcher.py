"""The only module that changes attributes of other packages.

Every change goes into a :class:`Journal`, so that it can be listed and undone to the very same object.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from .errors import CompatWarning

if TYPE_CHECKING:
    from pathlib import Path

_ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "<absent>"})()


@dataclass
class Change:
    """One attribute (or environment variable, or module entry) that was replaced."""

    adapter: str
    where: str
    undo: Callable[[], bool]


@dataclass
class Journal:
    """An undo log. Use as a context manager to make a group of changes all-or-nothing."""

    changes: list[Change] = field(default_factory=list)
    _marks: list[int] = field(default_factory=list, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def replace(self, owner: Any, name: str, value: Any, *, adapter: str) -> None:
        """Set ``owner.name``; ``undo`` restores the former object, or deletes the name if ``owner`` did not define it."""
        with self._lock:
            former = vars(owner).get(name, _ABSENT)
            setattr(owner, name, value)
            kept = vars(owner).get(name, _ABSENT)

            def undo() -> bool:
                if vars(owner).get(name, _ABSENT) is not kept:
                    return False
                if former is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, former)
                return True

            self.changes.append(Change(adapter, _label(owner, name), undo))

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any], *, adapter: str) -> None:
        """Put a :class:`wrapt.FunctionWrapper` around ``owner.name``.

        Args:
            wrapper: called as ``wrapper(wrapped, instance, args, kwargs)``.
        """
        import wrapt

        # Through __dict__ where there is one, so that static methods and the like stay what they are.
        former = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        self.replace(owner, name, wrapt.FunctionWrapper(former, wrapper), adapter=adapter)

    def add_module(self, name: str, module: ModuleType, *, adapter: str) -> None:
        """Enter a module that the package does not have into :data:`sys.modules`."""
        with self._lock:
            sys.modules[name] = module

            def undo() -> bool:
                return sys.modules.pop(name, None) is module

            self.changes.append(Change(adapter, f"sys.modules[{name!r}]", undo))

    def supply_modules(self, package: ModuleType, files: Mapping[str, Path], *, adapter: str) -> None:
        """Let modules be imported that ``package`` does not have; those that it has go first.

        Args:
            files: full module name to the source file that it is made from.
        """
        with self._lock:
            supplier = _Supplier(files)
            sys.meta_path.append(supplier)

            def undo() -> bool:
                if supplier not in sys.meta_path:
                    return False
                sys.meta_path.remove(supplier)
                for name, file in files.items():
                    module = sys.modules.get(name)
                    if getattr(getattr(module, "__spec__", None), "origin", None) == str(file):
                        del sys.modules[name]
                        child = name.rpartition(".")[2]
                        if vars(package).get(child) is module:
                            delattr(package, child)
                return True

            self.changes.append(Change(adapter, f"sys.meta_path: {', '.join(files)}", undo))

    def replace_code(self, function: FunctionType, code: CodeType, *, adapter: str) -> None:
        """Give a function another code object, where others hold the very function and a new one would not be seen."""
        with self._lock:
            former = function.__code__
            function.__code__ = code

            def undo() -> bool:
                if function.__code__ is not code:
                    return False
                function.__code__ = former
                return True

            self.changes.append(Change(adapter, f"{function.__module__}:{function.__qualname__}.__code__", undo))

    def extend(self, owner: Any, attributes: dict[str, Any], close: Callable[[], None], *, adapter: str) -> None:
        """Give one object attributes that it lacks. The journal does not keep the object alive.

        Args:
            close: called by ``undo`` besides, where the object still exists.
        """
        with self._lock:
            for name, value in attributes.items():
                setattr(owner, name, value)
            reference, kept, close_later = weakref.ref(owner), dict.fromkeys(attributes), weakref.WeakMethod(close)

            def undo() -> bool:
                alive = reference()
                if alive is None:
                    return True
                for name in kept:
                    vars(alive).pop(name, None)
                closing = close_later()
                if closing is not None:
                    closing()
                return True

            self.changes.append(Change(adapter, f"a {type(owner).__qualname__}: {', '.join(attributes)}", undo))

    def set_env(self, name: str, value: str, *, adapter: str) -> None:
        """Set an environment variable, which child processes inherit."""
        with self._lock:
            former = os.environ.get(name)
            os.environ[name] = value

            def undo() -> bool:
                if os.environ.get(name) != value:
                    return False
                if former is None:
                    del os.environ[name]
                else:
                    os.environ[name] = former
                return True

            self.changes.append(Change(adapter, f"os.environ[{name!r}]", undo))

    def undo(self, down_to: int = 0) -> list[str]:
        """Undo the changes after the first ``down_to``, last first.

        Returns:
            The places left alone because somebody else has changed them since; one warning names them.
        """
        left = []
        with self._lock:
            while len(self.changes) > down_to:
                change = self.changes.pop()
                if not change.undo():
                    left.append(change.where)
        if left:
            warnings.warn(
                f"left as they are, because they were changed again after speculators_compat: {', '.join(left)}",
                CompatWarning,
                stacklevel=3,
            )
        return left

    def __enter__(self) -> Journal:
        self._lock.acquire()
        self._marks.append(len(self.changes))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        mark = self._marks.pop()
        try:
            if kind is not None:
                self.undo(down_to=mark)
        finally:
            self._lock.release()


class _Supplier:
    """Finds modules in given files. The last finder there is: whatever another one finds is the real module."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        if file is None:
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(fullname, file)


def _label(owner: Any, name: str) -> str:
    module = getattr(owner, "__module__", None) if not isinstance(owner, ModuleType) else None
    own = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", None) or type(owner).__name__
    return f"{module + ':' if module else ''}{own}.{name}"
