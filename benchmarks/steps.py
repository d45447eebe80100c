"""Where the time of a step goes: device time of a forward pass in plain vLLM, and with parts of the capture left out.

``python benchmarks/throughput.py SHAPE --steps`` adds this to its table, measured in the engines that it has at hand:

all        capture as it is
no proof   without the greedy-token proof
no copies  states are added up in device memory, and neither checked nor copied to the host
hooks      the hooks run and do nothing on the device

The time is that between two events on the model's stream around ``execute_model``, for steps of the full size.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

VARIANTS = ("all", "no proof", "no copies", "hooks")
#: Full steps have at least this many tokens.
FULL = 8000


def watch(worker: Any) -> None:
    """In the worker: note device events around every step."""
    import torch

    runner = worker.model_runner
    inner, runner.noted = runner.execute_model, []

    def execute_model(*args: Any, **kwargs: Any) -> Any:
        scheduled = args[0] if args else kwargs["scheduler_output"]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        output = inner(*args, **kwargs)
        events[1].record()
        runner.noted.append((getattr(scheduled, "total_num_scheduled_tokens", 0), events))
        return output

    runner.execute_model = execute_model


def noted(worker: Any) -> list[tuple[int, float]]:
    """In the worker: tokens and milliseconds of the steps since the last call."""
    import torch

    torch.cuda.synchronize()
    found, worker.model_runner.noted = worker.model_runner.noted, []
    return [(tokens, begin.elapsed_time(end)) for tokens, (begin, end) in found]


def leave_out(worker: Any, variant: str) -> None:
    """In the worker: from here on without a part of the capture. The order is that of ``VARIANTS``."""
    import torch

    capture, alignment = worker._speculators_compat_capture, worker._speculators_compat_alignment
    if variant == "no proof":
        for handle in alignment._handles:
            handle.remove()
        return

    def store(step: Any, index: int, hidden: Any, residual: Any) -> None:
        for span in step.spans or ():
            capture._target(span, hidden)
        if variant == "no copies":
            rows = sum(span.count for span in step.spans or ())
            torch.add(hidden[:rows], residual[:rows], out=capture._staging[index][:rows])

    capture._store = store


def measure(plain: Any, plugin: Any, prompts: list[list[int]]) -> dict[str, float]:
    """Milliseconds of a full step, median. Leaves the plugin's engine without its capture."""
    engines: dict[str, tuple[Callable[..., list[Any]], Any]] = {
        "plain": (plain.llm.llm_engine.collective_rpc, plain),
        "plugin": (plugin.generator.llm.llm_engine.collective_rpc, plugin),
    }
    for rpc, _ in engines.values():
        rpc(watch)

    def median(name: str) -> float:
        rpc, peer = engines[name]
        rpc(noted)
        for _ in range(2):
            peer.run(prompts)
        return round(statistics.median(ms for tokens, ms in rpc(noted)[0] if tokens >= FULL), 3)

    found = {"plain": median("plain")}
    for variant in VARIANTS:
        if variant != "all":
            engines["plugin"][0](leave_out, args=(variant,))
            plugin.generator.session._unproved = "left out"
        found[variant] = median("plugin")
    found["plain again"] = median("plain")
    return found
