"""Server's connector: hidden states leave the KV cache on a host without CUDA, and from the right blocks.

What breaks, first: ``ExampleHiddenStatesConnector`` copies a finished request's states to the host on a CUDA stream of its
own, into pinned memory. On a host without CUDA the first finished request ends the engine: ``RuntimeError: Found no NVIDIA
driver on your system``.
Since: vLLM 0.22 or 0.21 (0.17 to 0.20 write from the forward pass). How it is mended: where vLLM's platform is
the CPU, streams and events in the connector's module are stand-ins that are always done, which is true there: the copy is
made when it is asked for. Pinned memory becomes plain memory. With CUDA nothing is changed.
Upstream: vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py.
Retire when: the connector asks the platform for its streams.

What breaks, second: where layers differ in what they cache (sliding windows, linear attention), the hidden states get
blocks of another length than ``cache_config.block_size``, and the connector reads them by that one. The files hold other
rows than the prompt's, without any error.
Since: vLLM 0.24 (up to 0.23 the slots come from the forward pass); vLLM 0.25 reads its group's own length. How it is
mended: as there, when the connector gets its cache; a cache of yet another length is refused.
Retire when: vLLM 0.24 is no longer supported.
"""

from __future__ import annotations

import contextlib
from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector"
#: What the connector's module calls of ``torch.cuda``.
USED = ("Stream", "Event", "stream")


class DoneEvent:
    """An event of a device whose work is done when a call returns."""

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class NoStream:
    """A stream of such a device."""

    def wait_event(self, event: object) -> None: ...

    def synchronize(self) -> None: ...


class _Cuda:
    """``torch.cuda`` with the three names that the connector uses."""

    Event, Stream = DoneEvent, NoStream

    def __init__(self, real: Any) -> None:
        self._real = real

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class HostTorch:
    """``torch`` as a module of vLLM sees it on a host without CUDA."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = _Cuda(torch.cuda)

    def empty_like(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)  # needs a CUDA driver
        return self._torch.empty_like(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class ServerConnectorStreams(Adapter):
    id = "server_connector_streams"
    seam = "CUDA streams of ExampleHiddenStatesConnector"
    why = "the first finished request ends the engine on a host without CUDA"
    since = "vLLM 0.22"
    how = "stand-ins for streams and events where vLLM's platform is the CPU; nothing with CUDA"
    upstream = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
    retire_when = "the connector asks the platform for its streams"
    trigger = CONNECTOR

    def probe(self, surface: Surface) -> Probe:
        if not surface.has(f"{CONNECTOR}:ExampleHiddenStatesConnector"):
            return Probe(State.NOT_APPLICABLE, "this vLLM has no ExampleHiddenStatesConnector")
        used = [name for name in USED if surface.call_keywords(CONNECTOR, name) is not None]
        if not used:
            return Probe(State.NOT_NEEDED, "this connector uses no CUDA streams")
        if used != list(USED):
            return Probe(State.DRIFTED, f"of {', '.join(USED)} the connector calls only {', '.join(used)}")
        return Probe(State.APPLIED, "CUDA streams are stood in for where vLLM's platform is the CPU")

    def apply(self, context: Context) -> None:
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            context.journal.replace(context.module, "torch", HostTorch(context.module.torch), adapter=self.id)


class ServerConnectorBlocks(Adapter):
    id = "server_connector_blocks"
    seam = "block length by which ExampleHiddenStatesConnector reads the KV cache"
    why = "models with sliding windows or linear attention get the states of other rows, without any error"
    since = "vLLM 0.24"
    how = "the length is that of the connector's own cache group"
    upstream = "vllm/distributed/kv_transfer/kv_connector/v1/example_hidden_states_connector.py"
    retire_when = "vLLM 0.24 is no longer supported"
    trigger = CONNECTOR

    def probe(self, surface: Surface) -> Probe:
        connector = f"{CONNECTOR}:ExampleHiddenStatesConnector"
        if not surface.has(connector):
            return Probe(State.NOT_APPLICABLE, "this vLLM has no ExampleHiddenStatesConnector")
        if surface.has(f"{connector}._get_cache_block_size"):
            return Probe(State.NOT_NEEDED, "the connector reads its group's own block length")
        if not surface.has(f"{connector}._submit_async_write"):
            return Probe(State.NOT_NEEDED, "the connector takes slots from the forward pass")
        if not surface.has(f"{connector}.register_kv_caches"):
            return Probe(State.DRIFTED, "the connector has no register_kv_caches")
        return Probe(State.APPLIED, "blocks are read by the length of the connector's own group")

    def apply(self, context: Context) -> None:
        journal = context.journal

        def register(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            done = wrapped(*args, **kwargs)
            groups = instance._kv_cache_config.kv_cache_groups
            length, rows = groups[instance._hs_group_idx].kv_cache_spec.block_size, instance._kv_cache.shape[1]
            if length % rows:
                raise CompatError(
                    "SC805",
                    found=f"a cache of hidden states with {rows} rows a block; its group has {length}",
                    expected="the same, or a whole part of it",
                    why="states would be read from other rows than the prompt's",
                    mend="extract in-process instead, or with vLLM 0.25 or later",
                )
            instance._block_size = length  # right for good, whether the adapter is undone or not
            return done

        journal.wrap(context.module.ExampleHiddenStatesConnector, "register_kv_caches", register, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ServerConnectorStreams(), ServerConnectorBlocks()]
