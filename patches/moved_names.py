"""Moved names: what the generator's module imports from vLLM and vLLM no longer has there.

What breaks: ``speculators.data_generation`` cannot be imported: ``vllm.utils.hashing`` did not exist before 0.11.1, and
the KV-cache helpers left ``vllm.v1.core.kv_cache_utils`` in 0.33.0.
Since: vLLM 0.33.0 (and before 0.11.1).
How it is mended: where the public engine does the work none of these names is called, so a stand-in that refuses to be
called is enough. Nothing is supplied that exists.
Upstream: vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py.
Retire when: speculators drives vLLM's public engine itself.
"""

from __future__ import annotations

import types
from typing import Any, ClassVar

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface


def _stand_in(name: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise CompatError(
            "SC306",
            found=f"a call of {name}, which this vLLM does not have",
            expected="extraction through vLLM's public engine",
            why="what the function did has no equivalent here",
            mend="unset SPECULATORS_COMPAT_WAY, or report the traceback",
        )

    refuse.__name__ = refuse.__qualname__ = name.rpartition(":")[2]
    return refuse


class KVCacheNames(Adapter):
    id = "kv_cache_names"
    seam = "the import of private KV-cache helpers"
    why = "speculators.data_generation cannot be imported: the helpers left vllm.v1.core.kv_cache_utils"
    since = "vLLM 0.33.0"
    how = "supplies stand-ins that refuse to be called; the public engine does without them"
    upstream = "vllm/v1/core/kv_cache_utils.py"
    retire_when = "speculators drives vLLM's public engine itself"
    trigger = "vllm.v1.core.kv_cache_utils"
    names: ClassVar[tuple[str, ...]] = (
        "_get_kv_cache_groups_uniform_spec",
        "get_kv_cache_config_from_groups",
        "get_request_block_hasher",
        "init_none_hash",
        "unify_hybrid_kv_cache_specs",
    )

    def _missing(self, surface: Surface) -> list[str]:
        return [name for name in self.names if not surface.has(f"{self.trigger}:{name}")]

    def probe(self, surface: Surface) -> Probe:
        missing = self._missing(surface)
        if not missing:
            return Probe(State.NOT_NEEDED, "all helpers are there")
        return Probe(State.APPLIED, f"supplies {', '.join(missing)}")

    def apply(self, context: Context) -> None:
        for name in self.names:
            if not hasattr(context.module, name):
                stand_in = _stand_in(f"{self.trigger}:{name}")
                context.journal.replace(context.module, name, stand_in, adapter=self.id)


class HashingModule(Adapter):
    id = "hashing_module"
    seam = "the import of vllm.utils.hashing"
    why = "speculators 0.4 cannot be imported: the module did not exist yet"
    since = "vLLM before 0.11.1"
    how = "enters a stand-in module whose function refuses to be called; the public engine does without it"
    upstream = "vllm/utils/hashing.py"
    retire_when = "vLLM 0.11.0 is no longer supported"
    trigger = "vllm.utils"

    def probe(self, surface: Surface) -> Probe:
        if surface.has_module("vllm.utils.hashing"):
            return Probe(State.NOT_NEEDED, "vllm.utils.hashing exists")
        return Probe(State.APPLIED, "enters a stand-in for vllm.utils.hashing")

    def apply(self, context: Context) -> None:
        module = types.ModuleType("vllm.utils.hashing", "Stand-in for a module that this vLLM does not have.")
        module.get_hash_fn_by_name = _stand_in("vllm.utils.hashing:get_hash_fn_by_name")  # type: ignore[attr-defined]
        context.journal.add_module(module.__name__, module, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [HashingModule(), KVCacheNames()]
