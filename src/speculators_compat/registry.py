"""Collects adapters: the project's own, then those of other packages."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet

from .adapter import Adapter
from .hookspecs import PROJECT


@dataclass
class Registry:
    """Adapters by id, and the plugins that were left out with the reason."""

    adapters: dict[str, Adapter] = field(default_factory=dict)
    third_party: set[str] = field(default_factory=set)
    broken: dict[str, str] = field(default_factory=dict)


@functools.lru_cache(maxsize=1)
def registry() -> Registry:
    """All adapters, loaded once a process."""
    import pluggy

    from . import hookspecs, patches

    found = Registry()
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    own = [m.name for m in pkgutil.iter_modules(patches.__path__)]
    for name in own:
        manager.register(importlib.import_module(f"{patches.__name__}.{name}"), name)
    for point in importlib.metadata.entry_points(group=PROJECT):
        try:
            manager.register(point.load(), point.name)
        except Exception as error:  # somebody else's code: anything can happen
            found.broken[point.name] = f"{type(error).__name__}: {error}"
    for name, plugin in manager.list_name_plugin():
        hook = manager.subset_hook_caller(
            "speculators_compat_adapters", [p for _, p in manager.list_name_plugin() if p is not plugin]
        )
        try:
            for adapter in (a for answer in hook() for a in answer):
                if not isinstance(adapter, Adapter):
                    raise TypeError(f"{adapter!r} is not an Adapter")
                SpecifierSet(adapter.vllm)  # raises where it is none
                if adapter.id in found.adapters:
                    raise ValueError(f"adapter id {adapter.id!r} is taken")
                found.adapters[adapter.id] = adapter
                if name not in own:
                    found.third_party.add(adapter.id)
        except Exception as error:
            if name in own:
                raise
            found.broken[name] = f"{type(error).__name__}: {error}"
    return found


def adapters() -> dict[str, Adapter]:
    """Adapters by id."""
    return registry().adapters
