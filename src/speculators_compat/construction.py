"""The generator under construction, for adapters that speculators' constructor calls without telling them enough."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Construction:
    """A ``VllmHiddenStatesGenerator.__init__`` that is running.

    Attributes:
        generator: the instance.
        arguments: the constructor's arguments by name, defaults included.
        vllm_args: the user's vLLM arguments, see :func:`speculators_compat.configure`.
    """

    generator: Any
    arguments: dict[str, Any]
    vllm_args: dict[str, Any] = field(default_factory=dict)


_running: ContextVar[Construction | None] = ContextVar("speculators_compat_construction", default=None)


def running() -> Construction | None:
    """The construction in this thread, if one is running."""
    return _running.get()


@contextlib.contextmanager
def constructing(construction: Construction) -> Iterator[None]:
    """Mark a construction as running."""
    token = _running.set(construction)
    try:
        yield
    finally:
        _running.reset(token)
