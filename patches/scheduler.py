"""Scheduler: the block size that vLLM's ``Scheduler`` came to require.

What breaks: ``Scheduler.__init__() missing 1 required positional argument: 'block_size'``; and speculators 0.4 passes a
constant 16 where vLLM's platform may have chosen another block size (64 for FlashMLA), which corrupts block tables.
Since: vLLM 0.11.1.
How it is mended: passes the block size of the finished vLLM config.
Upstream: vllm/v1/core/sched/scheduler.py.
Retire when: the generator's own loop is no longer used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_compat.adapter import Adapter, CallAdapter
from speculators_compat.hookspecs import hookimpl


class SchedulerCall(CallAdapter):
    id = "scheduler"
    seam = "the call of vllm.v1.core.sched.scheduler.Scheduler"
    why = "vLLM requires block_size; a constant one disagrees with what vLLM's platform chose for the model"
    since = "vLLM 0.11.1"
    how = "passes the block size of the finished vLLM config"
    upstream = "vllm/v1/core/sched/scheduler.py"
    retire_when = "the generator's own loop is no longer used"
    name = "Scheduler"
    callee = "vllm.v1.core.sched.scheduler:Scheduler"
    fill = {"block_size": "the vLLM config's"}
    drop = {"block_size": "older vLLM takes it from the vLLM config"}

    def always(self, names: tuple[str, ...]) -> list[str]:
        return ["passes the vLLM config's block_size"] if "block_size" in names else []

    def value(self, parameter: str, kwargs: Mapping[str, Any]) -> Any:
        return kwargs["vllm_config"].cache_config.block_size

    def amend(self, names: tuple[str, ...], kwargs: dict[str, Any]) -> None:
        if "block_size" in names:
            kwargs["block_size"] = kwargs["vllm_config"].cache_config.block_size


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [SchedulerCall()]
