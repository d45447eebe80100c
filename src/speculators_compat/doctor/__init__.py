"""What can be known about a run before the model is loaded, and a rehearsal of it.

Nothing here imports torch or vLLM; the rehearsal does, in processes of its own. Checks are in :mod:`.model`,
:mod:`.memory`, :mod:`.cluster`, :mod:`.data`, :mod:`.host` and :mod:`.rehearse`, one function each.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..detect import Installed
from . import cluster, data, host, memory, model, rehearse  # noqa: F401 - they register their checks
from .base import AREAS, CHECKS, Result, perform
from .context import Context, Options

__all__ = ["CHECKS", "Options", "Result", "known_ids", "run_doctor"]


def known_ids() -> set[str]:
    """Every id that a check's result can carry."""
    return {id for one in CHECKS.values() for id in one.ids}


def run_doctor(options: Options, installed: Mapping[str, Installed] | None = None) -> tuple[Result, ...]:
    """Make the checks that the options call for, area by area.

    Args:
        installed: what is installed, if that is known already.
    """
    context = Context(options, installed)
    asked = {
        "model": options.model is not None,
        "memory": options.model is not None,
        "data": options.data is not None or options.output_dir is not None,
        "host": True,
        "rehearsal": options.rehearse,
    }
    results = []
    for area in AREAS:
        for one in CHECKS.values():
            if one.area == area and (set(options.only) & set(one.ids) if options.only else asked[area]):
                results.append(perform(one, context))
    return tuple(results)
