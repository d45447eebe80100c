"""Device memory: the free-memory query on a host without an accelerator.

What breaks: ``torch.cuda.mem_get_info()`` raises without CUDA (speculators 0.3); 0.4 falls back to 0 bytes, and vLLM
then finds no room for a single KV-cache block.
Since: every vLLM.
How it is mended: without an accelerator the host's available memory is returned; vLLM's CPU backend sizes its KV cache
by ``VLLM_CPU_KVCACHE_SPACE`` anyway. With an accelerator nothing changes.
Upstream: speculators.utils.util.mem_get_info returns (0, 0).
Retire when: speculators asks vLLM's platform.
"""

from __future__ import annotations

import os
from typing import Any

from speculators_compat.adapter import GENERATOR_MODULE, Adapter, Context, Probe, State
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface


def host_memory() -> tuple[int, int]:
    """Free and total host memory, in bytes; what caches files counts as taken."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


class DeviceMemory(Adapter):
    id = "device_memory"
    seam = "the query for free device memory"
    why = "it raises, or answers 0, on a host without an accelerator"
    since = "every vLLM"
    how = "answers with the host's memory there; unchanged on a host with an accelerator"
    upstream = "speculators/utils/util.py: mem_get_info"
    retire_when = "speculators asks vLLM's platform"

    def probe(self, surface: Surface) -> Probe:
        if surface.call_keywords(GENERATOR_MODULE, "mem_get_info") is None:
            return Probe(State.NOT_APPLICABLE, "this speculators does not ask for free memory")
        return Probe(State.APPLIED, "on a host without an accelerator")

    def apply(self, context: Context) -> None:
        import torch

        def mem_get_info(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return wrapped(*args, **kwargs) if torch.accelerator.is_available() else host_memory()

        if hasattr(context.module, "mem_get_info"):
            context.journal.wrap(context.module, "mem_get_info", mem_get_info, adapter=self.id)
            return
        import wrapt

        # speculators 0.3 goes through torch.cuda: give its module a view of torch rather than change torch itself.
        query = wrapt.FunctionWrapper(torch.cuda.mem_get_info, mem_get_info)
        view = _View(torch, cuda=_View(torch.cuda, mem_get_info=query))
        context.journal.replace(context.module, "torch", view, adapter=self.id)


class _View:
    """An object with some attributes of its own; all others are those of what it stands for."""

    def __init__(self, wrapped: Any, **own: Any) -> None:
        self._wrapped = wrapped
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [DeviceMemory()]
