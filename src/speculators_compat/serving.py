"""Adapters of the server path: vLLM's ``extract_hidden_states`` method, and speculators' client of it.

They are independent of the generator's. Those of the server are applied in vLLM's processes when :data:`SERVE` is set,
whether speculators is installed there or not; those of the client after ``import speculators_compat``, whether vLLM is
installed or not. Each waits for the module that it mends, and its probe decides.
"""

from __future__ import annotations

import sys
import threading
import warnings
from dataclasses import dataclass, field
from types import ModuleType

from . import settings
from .adapter import Adapter, Context, Probe, State
from .errors import CompatError, CompatWarning
from .importing import when_imported
from .patcher import Journal

#: Switches the server's adapters on in ``vllm serve`` and in every process that it starts.
SERVE = "SPECULATORS_COMPAT_SERVE"
#: Speculators' client of the server.
CLIENT_MODULE = "speculators.data_generation.vllm_client"


@dataclass
class _Side:
    """What this process has of one side's adapters."""

    chosen: list[Adapter] = field(default_factory=list)
    states: dict[str, Probe] = field(default_factory=dict)
    journal: Journal = field(default_factory=Journal)
    hooked: set[str] = field(default_factory=set)
    active: bool = False


_server, _client = _Side(), _Side()
_lock = threading.RLock()


def activate_server() -> None:
    """Wait for the modules of vLLM that the server's adapters mend. Doing it twice changes nothing.

    A vLLM that the matrix does not list uses the nearest row, with a warning; one without the method is left alone, with a
    warning.
    """
    with _lock:
        if _server.active:
            return
        _server.active = True
        from .detect import detect_all
        from .matrix import load_matrix
        from .registry import adapters

        version = detect_all()["vllm"].version
        if version is None:
            return
        found = adapters()
        matrix = load_matrix(known_adapters=found)
        try:
            row, exact, reason = matrix.select_server(version)
        except CompatError as error:
            warnings.warn(f"{SERVE} changes nothing: {error.found}; {error.why}", CompatWarning, stacklevel=2)
            return
        if not exact or row.status == "untested":
            warnings.warn(f"untested combination: {reason}", CompatWarning, stacklevel=2)
        _choose(_server, [found[id] for id in matrix.server_adapters])


def activate_client() -> None:
    """Wait for speculators' client module. Doing it twice changes nothing."""
    with _lock:
        if not _client.active:
            _client.active = True
            if CLIENT_MODULE in sys.modules:  # and the hook has run, or never runs
                _arrived(_client, sys.modules[CLIENT_MODULE])
            _hook(_client, CLIENT_MODULE)


def deactivate() -> None:
    """Undo what both sides' adapters changed in this process."""
    with _lock:
        for side in (_server, _client):
            side.journal.undo()
            for id, probe in side.states.items():
                if probe.state in (State.APPLIED, State.WAITING):
                    side.states[id] = Probe(State.UNDONE, "deactivate() was called")
            side.chosen = []
            side.active = False


def states() -> dict[str, Probe]:
    """Each chosen adapter's state in this process, server's first."""
    return {**_server.states, **_client.states}


def changes() -> list[str]:
    """Every attribute changed now, as ``adapter: place``."""
    return [f"{c.adapter}: {c.where}" for side in (_server, _client) for c in side.journal.changes]


def _choose(side: _Side, adapters: list[Adapter]) -> None:
    _take(side, adapters)
    for trigger in dict.fromkeys(a.trigger for a in side.chosen):
        module = sys.modules.get(trigger)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _arrived(side, module)
        _hook(side, trigger)


def _take(side: _Side, adapters: list[Adapter]) -> None:
    left_out = settings.without()
    side.chosen = [a for a in adapters if a.id not in left_out]
    if any(a.id in left_out for a in adapters):
        warnings.warn(f"left out for diagnosis: adapters {', '.join(left_out)}", CompatWarning, stacklevel=4)
    side.states = {a.id: Probe(State.WAITING, f"until {a.trigger} is imported") for a in side.chosen}


def _hook(side: _Side, name: str) -> None:
    if name not in side.hooked:  # wrapt keeps hooks for ever, and calls one at once if the module is there
        side.hooked.add(name)
        when_imported(lambda module: _arrived(side, module), name)


def _arrived(side: _Side, module: ModuleType) -> None:
    """Probe and apply the adapters that wait for ``module``."""
    from .surface import LiveSurface

    with _lock:
        if not side.active:
            return
        if side is _client and not side.chosen:
            _choose_client()
        surface = LiveSurface()
        for adapter in side.chosen:
            if adapter.trigger != module.__name__ or side.states[adapter.id].state is not State.WAITING:
                continue
            probe = adapter.probe(surface)
            side.states[adapter.id] = probe
            if probe.state is State.DRIFTED:
                if adapter.required:
                    raise CompatError(
                        "SC302",
                        found=f"adapter {adapter.id}: {probe.reason}",
                        expected=f"a shape it knows at its seam ({adapter.seam})",
                        why=adapter.why,
                        mend=f"set {settings.WITHOUT}={adapter.id} to go on without it, and please report this release",
                    )
                warnings.warn(f"adapter {adapter.id} is left out: {probe.reason}", CompatWarning, stacklevel=2)
            elif probe.state is State.APPLIED:
                try:
                    with side.journal:
                        adapter.apply(Context(module, side.journal, settings.current(), {}))
                except Exception as error:
                    side.states[adapter.id] = Probe(State.FAILED, f"{type(error).__name__}: {error}")
                    raise


def _choose_client() -> None:
    from .matrix import load_matrix
    from .registry import adapters

    found = adapters()
    _take(_client, [found[id] for id in load_matrix(known_adapters=found).client_adapters])
