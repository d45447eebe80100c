"""Keeps speculators' hidden-state extraction working on every vLLM release.

Import this package before the extraction script's other imports::

    import speculators_compat
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

Importing activates it; :func:`status` says what was changed, :func:`deactivate` undoes it. It imports neither torch
nor vLLM by itself.
"""

import sys

from .activation import activate, deactivate, status
from .adapter import Adapter, CallAdapter, Context, Probe, State
from .errors import CompatError, CompatWarning, InputError
from .settings import configure, switched_off

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "CallAdapter",
    "CompatError",
    "CompatWarning",
    "Context",
    "InputError",
    "Probe",
    "State",
    "__version__",
    "activate",
    "configure",
    "deactivate",
    "hookimpl",
    "status",
    "switched_off",
]


def __getattr__(name: str) -> object:
    if name == "hookimpl":  # pluggy is imported by those who write adapters only
        from .hookspecs import hookimpl

        return hookimpl
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# vLLM's processes import the package for the server's adapters only, see speculators_compat_plugin.
if not switched_off() and not getattr(sys.modules.get("speculators_compat_plugin"), "server_only", False):
    activate()
