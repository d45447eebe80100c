"""Activation, in this process and in the processes it starts.

Activating only registers import hooks. When one of :data:`BOOTSTRAP` is imported the matrix row is chosen, and when a
module that an adapter mends is imported the adapter is probed and applied.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from . import serving, settings
from .adapter import GENERATOR_MODULE, GENERATOR_PACKAGE, Adapter, Context, Probe, State
from .errors import CompatError, CompatWarning
from .importing import when_imported
from .patcher import Journal

if TYPE_CHECKING:
    from .matrix import Selection

#: Set in the environment while active: vLLM's workers activate only if they inherit it.
MARKER = "SPECULATORS_COMPAT_ACTIVE"
#: Its value once this process, or the one that started it, has warned of an untested combination; "1" before.
WARNED = "warned"
#: The name of this package's entry point in vLLM's plugin group, as ``VLLM_PLUGINS`` lists it.
VLLM_PLUGIN = "speculators_compat"
#: The first imports that can matter. ``transformers`` is here because ``import speculators`` can fail through it.
BOOTSTRAP = ("transformers", "vllm", "speculators")


@dataclass(frozen=True)
class AdapterStatus:
    """An adapter's state in this process, and the reason in words."""

    id: str
    state: State
    reason: str


@dataclass(frozen=True)
class Status:
    """What :func:`status` returns.

    Attributes:
        active: whether the plugin is active in this process.
        row: the matrix row chosen, in words; empty until vLLM or speculators is imported.
        way: name of the adapter set, such as ``in-process`` or ``engine``; empty likewise.
        adapters: in the order of application.
        changes: every attribute changed now, as ``adapter: place``.
        broken_plugins: third-party plugins left out, with the reason.
    """

    active: bool
    row: str
    way: str
    adapters: tuple[AdapterStatus, ...]
    changes: tuple[str, ...]
    broken_plugins: dict[str, str]


@dataclass
class _Process:
    """What this process has activated."""

    active: bool = False
    selection: Selection | None = None
    way: str = ""
    error: CompatError | None = None
    chosen: list[Adapter] = field(default_factory=list)
    states: dict[str, Probe] = field(default_factory=dict)
    hooked: set[str] = field(default_factory=set)
    warned: bool = False
    journal: Journal = field(default_factory=Journal)
    lock: threading.RLock = field(default_factory=threading.RLock)


_process = _Process()


class _Refuser:
    """Keeps refusing the generator module after a required adapter could not be applied.

    Otherwise a script that catches the first error and imports again would run unpatched.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == GENERATOR_MODULE and _process.active and _process.error is not None:
            raise _process.error
        return None


_refuser = _Refuser()


def activate() -> None:
    """Activate the plugin in this process and in those it starts from now on. Activating twice changes nothing.

    Raises:
        CompatError: if the generator's module is imported already and a required adapter cannot be applied to it.
    """
    with _process.lock:
        if _process.active:
            return
        _process.active = True
        _process.error = None
        sys.meta_path.insert(0, _refuser)
        if not os.environ.get(MARKER):  # else this is one of vLLM's processes
            _process.journal.set_env(MARKER, "1", adapter="activation")
        listed = os.environ.get("VLLM_PLUGINS")
        if listed is not None and VLLM_PLUGIN not in listed.split(","):
            names = [name for name in listed.split(",") if name]
            _process.journal.set_env("VLLM_PLUGINS", ",".join([*names, VLLM_PLUGIN]), adapter="activation")
        if "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ:
            # As vLLM does when it is imported: otherwise torch.cuda.is_available(), which importing speculators leads to
            # before that, leaves CUDA unusable in the processes that vLLM forks.
            _process.journal.set_env("PYTORCH_NVML_BASED_CUDA_CHECK", "1", adapter="activation")
        if os.environ.get("SPECULATORS_COMPAT_REHEARSAL"):  # see speculators_compat.doctor.rehearse
            weights = "speculators_compat.doctor.rehearsal_worker:speaking_weights"
            when_imported(weights, "vllm.model_executor.model_loader.dummy_loader")
        serving.activate_client()
        for module in BOOTSTRAP:
            _when_imported(module)
        if any(module in sys.modules for module in BOOTSTRAP):
            _bootstrap()


def deactivate() -> None:
    """Put back every object that was changed. Generators made before keep working as they were made."""
    with _process.lock:
        if not _process.active:
            return
        _process.active = False
        if _refuser in sys.meta_path:
            sys.meta_path.remove(_refuser)
        _process.journal.undo()
        serving.deactivate()
        # A module that was supplied is gone: the next import of its name makes another, and wrapt calls a hook once only.
        _process.hooked &= {*BOOTSTRAP, *sys.modules}
        for id, probe in _process.states.items():
            if probe.state in (State.APPLIED, State.WAITING):
                _process.states[id] = Probe(State.UNDONE, "deactivate() was called")
        _process.chosen = []
        _process.selection = None


def status() -> Status:
    """What is active in this process, adapter by adapter."""
    broken: dict[str, str] = {}
    if _process.selection is not None:
        from .registry import registry

        broken = dict(registry().broken)
    return Status(
        active=_process.active,
        row=_process.selection.reason if _process.selection else "",
        way=_process.way,
        adapters=tuple(
            AdapterStatus(id, probe.state, probe.reason)
            for id, probe in [*_process.states.items(), *serving.states().items()]
        ),
        changes=(*(f"{c.adapter}: {c.where}" for c in _process.journal.changes), *serving.changes()),
        broken_plugins=broken,
    )


def _when_imported(module: str) -> None:
    # wrapt cannot unregister a hook and calls it at once if the module is there already, so each is registered once
    # and looks at what is active when it fires.
    if module not in _process.hooked:
        _process.hooked.add(module)
        when_imported(_imported, module)


def _imported(module: ModuleType) -> None:
    with _process.lock:
        if not _process.active:
            return
        if module.__name__ in BOOTSTRAP:
            _bootstrap()
        _apply(module)


def _bootstrap() -> None:
    """Choose the row and its adapters; wait for the modules that they mend."""
    if _process.selection is not None or _process.error is not None:
        return
    from .detect import detect_all
    from .matrix import load_matrix
    from .registry import registry

    try:
        installed = detect_all()
        for package in ("vllm", "speculators"):
            if not installed[package].present:
                return  # nothing to mend in this environment
            problem = installed[package].problem
            if problem is not None:
                raise problem
        found = registry()
        matrix = load_matrix(known_adapters=found.adapters)
        vllm, speculators = installed["vllm"].version, installed["speculators"].version
        assert vllm is not None
        assert speculators is not None
        selection = matrix.select(vllm, speculators)
        forced = settings.forced_way()
        if selection.cell.status == "unsupported" and forced is None:
            raise CompatError(
                "SC301",
                found=f"vLLM {vllm} with speculators {speculators}",
                expected="a combination that compat-check --list shows as supported",
                why=selection.cell.why or "no way to extract hidden states is known for it",
                mend=selection.cell.mend or "compat-check --list",
            )
        untested = not selection.exact or selection.cell.status == "untested"
        if untested and settings.strict():
            raise CompatError(
                "SC303",
                found=selection.reason,
                expected="a combination that has been run, because SPECULATORS_COMPAT_STRICT is set",
                why="adapters would be chosen by resemblance",
                mend="install a listed vLLM (compat-check --list), or unset SPECULATORS_COMPAT_STRICT",
            )
        if untested and not _process.warned and os.environ.get(MARKER) != WARNED:
            _process.warned = True
            _process.journal.set_env(MARKER, WARNED, adapter="activation")  # workers need not say it again
            warnings.warn(f"untested combination: {selection.reason}", CompatWarning, stacklevel=2)
        _process.selection = selection
        _process.way, ids = matrix.choose(selection, forced)
        others = [a for a in found.adapters.values() if a.id in found.third_party and a.id not in ids]
        _process.chosen = [found.adapters[id] for id in ids] + [a for a in others if _admits(a, str(vllm))]
        left_out = settings.without()
        if left_out:
            warnings.warn(f"left out for diagnosis: adapters {', '.join(left_out)}", CompatWarning, stacklevel=2)
            _process.chosen = [a for a in _process.chosen if a.id not in left_out]
    except CompatError as error:
        # Not raised here: importing transformers or vLLM alone has nothing to do with extraction.
        _process.error = error
        _when_imported(GENERATOR_PACKAGE)
    else:
        _process.states = {a.id: Probe(State.WAITING, f"until {a.trigger} is imported") for a in _process.chosen}
        for trigger in dict.fromkeys(a.trigger for a in _process.chosen):
            _when_imported(trigger)
    _when_imported(GENERATOR_MODULE)
    for trigger in dict.fromkeys([*(a.trigger for a in _process.chosen), GENERATOR_PACKAGE, GENERATOR_MODULE]):
        module = sys.modules.get(trigger)
        if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
            _apply(module)


def _admits(adapter: Adapter, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(adapter.vllm).contains(version, prereleases=True)


def _apply(module: ModuleType) -> None:
    """Apply all adapters that wait for ``module``: all of them, or none."""
    if module.__name__ == GENERATOR_MODULE and _process.error is not None:
        raise _process.error
    if module.__name__ == GENERATOR_PACKAGE and _process.error is not None:
        _refuse_class(module)
    from .registry import registry
    from .surface import LiveSurface

    waiting = [
        a for a in _process.chosen if a.trigger == module.__name__ and _process.states[a.id].state is State.WAITING
    ]
    if not waiting:
        return
    context = Context(module, _process.journal, settings.current(), _versions())
    surface = LiveSurface()
    try:
        with _process.journal:
            for adapter in waiting:
                if adapter.id not in registry().third_party:
                    _apply_one(adapter, context, surface)
    except Exception as error:
        for adapter in waiting:
            if _process.states[adapter.id].state is State.APPLIED:
                _process.states[adapter.id] = Probe(State.UNDONE, "another required adapter could not be applied")
        _process.error = error if isinstance(error, CompatError) else _failed(error)
        raise _process.error from error
    for adapter in waiting:
        if adapter.id in registry().third_party:
            try:
                with _process.journal:
                    _apply_one(adapter, context, surface)
            except Exception as error:  # somebody else's adapter must not take the run down
                if _process.states[adapter.id].state is not State.DRIFTED:
                    _process.states[adapter.id] = Probe(State.FAILED, f"{type(error).__name__}: {error}")
                warnings.warn(f"adapter {adapter.id} of another package failed: {error}", CompatWarning, stacklevel=2)


def _refuse_class(package: ModuleType) -> None:
    """Where a package lacks the class, tell why it is not restored instead of ``cannot import name``."""
    name = "VllmHiddenStatesGenerator"
    if name in vars(package) or "__getattr__" in vars(package):
        return

    def look_up(asked: str) -> object:
        if asked == name and _process.active and _process.error is not None:
            raise _process.error
        raise AttributeError(f"module {package.__name__!r} has no attribute {asked!r}")

    _process.journal.replace(package, "__getattr__", look_up, adapter="activation")


def _apply_one(adapter: Adapter, context: Context, surface: object) -> None:
    probe = adapter.probe(surface)  # type: ignore[arg-type]
    if probe.state is State.DRIFTED and adapter.required:
        _process.states[adapter.id] = probe
        raise CompatError(
            "SC302",
            found=f"adapter {adapter.id}: {probe.reason}",
            expected=f"a shape it knows at its seam ({adapter.seam})",
            why=adapter.why,
            mend="compat-check --list shows vLLM releases that work; please report this one",
        )
    if probe.state is State.APPLIED:
        try:
            adapter.apply(context)
        except Exception as error:
            _process.states[adapter.id] = Probe(State.FAILED, f"{type(error).__name__}: {error}")
            raise
    _process.states[adapter.id] = probe


def _failed(error: Exception) -> CompatError:
    failed = next((id for id, p in _process.states.items() if p.state is State.FAILED), "?")
    return CompatError(
        "SC304",
        found=f"adapter {failed}: {type(error).__name__}: {error}",
        expected="every required adapter applied",
        why="a half-patched library could return wrong hidden states, so no change of this module is left",
        mend="compat-check shows the versions; please report the traceback above with its output",
    )


def _versions() -> dict[str, str]:
    from .detect import detect_all

    return {name: str(found.version) for name, found in detect_all().items() if found.version is not None}
