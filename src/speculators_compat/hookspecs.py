"""The hooks that adapters are registered through (pluggy, project name ``speculators_compat``).

Another package adds adapters by an entry point in the group ``speculators_compat`` that names a module or object with
implementations of these hooks::

    # pyproject.toml of the other package
    [project.entry-points.speculators_compat]
    my_adapters = "my_package.adapters"

    # my_package/adapters.py
    from speculators_compat import hookimpl

    @hookimpl
    def speculators_compat_adapters():
        return [MyAdapter()]

A plugin that fails to load or to answer is reported and left out; the others go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .adapter import Adapter

PROJECT = "speculators_compat"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def speculators_compat_adapters() -> list[Adapter]:  # type: ignore[empty-body]
    """Return adapters, in the order in which they are to be applied.

    Called once a process, before the first adapter is needed. Must import neither vLLM nor torch.
    Adapters that ``compat_matrix.yaml`` names are applied where a row names them; any other adapter is applied
    after those, on every vLLM that its ``vllm`` specifier admits.
    """
