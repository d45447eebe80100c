"""KV-cache utilities: three private helpers whose signatures change from release to release.

What breaks: ``get_kv_cache_config_from_groups() got an unexpected keyword argument 'kv_cache_specs'`` (speculators 0.3),
and an assertion for models whose layers do not share one KV-cache spec.
Since: vLLM 0.12.0.
How it is mended: the generator's three calls only note the specs; the last one asks ``get_kv_cache_configs``, which
vLLM's own engine uses and which groups hybrid models too.
Upstream: vllm/v1/core/kv_cache_utils.py.
Retire when: the generator's own loop is no longer used.
"""

from __future__ import annotations

from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

UTILS = "vllm.v1.core.kv_cache_utils"


class _Specs:
    """Stands for KV-cache groups until the vLLM config is at hand."""

    def __init__(self, specs: Any) -> None:
        self.specs = specs


class KVCache(Adapter):
    id = "kv_cache"
    seam = "the private helpers of vllm.v1.core.kv_cache_utils"
    why = "their signatures change; the generator dies after the load, and its uniform grouping cannot hold hybrid models"
    since = "vLLM 0.12.0"
    how = "computes the KV-cache config with get_kv_cache_configs, as vLLM's engine does"
    upstream = "vllm/v1/core/kv_cache_utils.py"
    retire_when = "the generator's own loop is no longer used"

    def probe(self, surface: Surface) -> Probe:
        parameters = surface.parameters(f"{UTILS}:get_kv_cache_configs")
        if parameters is None:
            return Probe(State.DRIFTED, f"{UTILS}.get_kv_cache_configs no longer exists")
        if parameters.names != ("vllm_config", "kv_cache_specs", "available_memory"):
            return Probe(State.DRIFTED, f"get_kv_cache_configs now takes {', '.join(parameters.names)}")
        return Probe(State.APPLIED, "asks get_kv_cache_configs")

    def apply(self, context: Context) -> None:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        def unify(kv_cache_spec: Any) -> None:
            """vLLM unifies specs itself where its config asks for it."""

        def group(kv_cache_specs: Any) -> _Specs:
            return _Specs(kv_cache_specs)

        def configure(vllm_config: Any, kv_cache_groups: _Specs, available_memory: int, **_: Any) -> Any:
            cache = vllm_config.cache_config
            # A CPU has no free-memory figure to go by; there the size is a setting.
            memory = getattr(cache, "cpu_kvcache_space_bytes", None) or available_memory
            return get_kv_cache_configs(vllm_config, [kv_cache_groups.specs], [memory])[0]

        for name, function in (
            ("unify_hybrid_kv_cache_specs", unify),
            ("_get_kv_cache_groups_uniform_spec", group),
            ("get_kv_cache_config_from_groups", configure),
        ):
            context.journal.replace(context.module, name, function, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [KVCache()]
