"""Hooks that run once a module has been imported: wrapt's, without the cost of wrapt until one of them can matter.

Importing wrapt takes longer than everything else that ``import speculators_compat`` does. So hooks wait here until a
package that one of them is about is looked for; then wrapt is imported and takes all of them over.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

Hook = Callable[[ModuleType], object]


class _Door:
    """A finder that finds nothing itself; at the first look for a package that is waited for it hands over to wrapt."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Hook | str, str]] = []
        self.lock = threading.RLock()
        self.looking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.partition(".")[0]
        if getattr(self.looking, "only", False) or not any(_package(module) == package for _, module in self.waiting):
            return None
        self.open()
        from importlib.util import find_spec

        return find_spec(fullname)  # wrapt's finder, which is the first one now, answers

    def open(self) -> None:
        """Hand all hooks over to wrapt."""
        with self.lock:
            waiting, self.waiting = self.waiting, []
            import wrapt

            for hook, module in waiting:
                wrapt.register_post_import_hook(hook, module)
            # It stays in sys.meta_path: another thread may be going through that list.


_door = _Door()


def _package(module: str) -> str:
    return module.partition(".")[0]


def when_imported(hook: Hook | str, module: str) -> None:
    """Call ``hook`` with ``module`` after its import; at once if it is there.

    A hook can't be taken back: it has to look for itself whether it is still wanted.

    Args:
        hook: the function, or ``package.module:function`` to import it only then.
    """
    with _door.lock:
        _door.waiting.append((hook, module))
        if "wrapt" in sys.modules or _package(module) in sys.modules:
            _door.open()
        elif _door not in sys.meta_path:
            sys.meta_path.insert(0, _door)


@contextmanager
def only_looking() -> Iterator[None]:
    """Within it, looking for a package in this thread is not the beginning of an import."""
    before = getattr(_door.looking, "only", False)
    _door.looking.only = True
    try:
        yield
    finally:
        _door.looking.only = before
