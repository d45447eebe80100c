"""Restored generator: ``VllmHiddenStatesGenerator`` in speculators releases that no longer have it.

What breaks: ``from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator`` raises
``ModuleNotFoundError``, and ``from speculators.data_generation import VllmHiddenStatesGenerator`` an ``ImportError``.
Since: speculators 0.5.0, with every vLLM.
How it is mended: an import hook finds the two missing modules in this package, and ``speculators.data_generation`` answers
for the class; both import nothing until somebody asks for them. The adapter ``engine`` then does with the class what it
does with speculators' own. A module that speculators does have is never replaced.
Upstream: speculators 0.5.0 removed data_generation/vllm_hidden_states_generator.py and custom_worker.py.
Retire when: speculators has an in-process generator again.
"""

from __future__ import annotations

import importlib
from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.adapter import GENERATOR_PACKAGE as PACKAGE
from speculators_compat.generator import CLASS
from speculators_compat.hookspecs import hookimpl
from speculators_compat.restored import FILES
from speculators_compat.surface import Surface


class RestoredGenerator(Adapter):
    id = "restored_generator"
    seam = "the import of speculators.data_generation.vllm_hidden_states_generator"
    why = "the in-process generator was removed: scripts die with ModuleNotFoundError or ImportError"
    since = "speculators 0.5.0"
    how = "an import hook finds the class in this package; vLLM's public engine does the work behind it"
    upstream = "speculators 0.5.0 removed data_generation/vllm_hidden_states_generator.py and custom_worker.py"
    retire_when = "speculators has an in-process generator again"
    trigger = PACKAGE

    def probe(self, surface: Surface) -> Probe:
        if not surface.has_module(PACKAGE):
            return Probe(State.DRIFTED, f"{PACKAGE} no longer exists")
        if surface.has_module(GENERATOR_MODULE):
            return Probe(State.NOT_NEEDED, f"this speculators has {GENERATOR_MODULE}")
        if surface.has(f"{PACKAGE}:{CLASS}"):
            return Probe(State.DRIFTED, f"{PACKAGE} has another {CLASS}")
        return Probe(State.APPLIED, f"supplies {', '.join(name.rpartition('.')[2] for name in FILES)}")

    def apply(self, context: Context) -> None:
        former = vars(context.module).get("__getattr__")

        def look_up(name: str) -> Any:
            if name == CLASS:
                return getattr(importlib.import_module(GENERATOR_MODULE), CLASS)
            if former is not None:
                return former(name)
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")

        context.journal.supply_modules(context.module, FILES, adapter=self.id)
        context.journal.replace(context.module, "__getattr__", look_up, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [RestoredGenerator()]
