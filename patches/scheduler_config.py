"""Scheduler config: arguments that vLLM's ``SchedulerConfig`` came to require.

What breaks: ``SchedulerConfig(...)`` raises a validation error, ``is_encoder_decoder`` field required.
Since: vLLM 0.12.0 (speculators 0.3 does not pass it; 0.4 does).
How it is mended: what is required and not passed is supplied; decoder-only is what the generator extracts from. Async
scheduling is switched off, because the generator's loop steps a synchronous scheduler.
Upstream: vllm/config/scheduler.py, ``is_encoder_decoder: InitVar[bool]``.
Retire when: speculators 0.3 is no longer supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from speculators_compat.adapter import Adapter, CallAdapter
from speculators_compat.construction import running
from speculators_compat.hookspecs import hookimpl


class SchedulerConfigCall(CallAdapter):
    id = "scheduler_config"
    seam = "the call of vllm.config.SchedulerConfig"
    why = "vLLM requires is_encoder_decoder, which speculators 0.3 does not pass: the generator dies before the load"
    since = "vLLM 0.12.0"
    how = "supplies what vLLM requires, and keeps scheduling synchronous as the generator's loop expects"
    upstream = "vllm/config/scheduler.py: is_encoder_decoder: InitVar[bool]"
    retire_when = "speculators 0.3 is no longer supported"
    name = "SchedulerConfig"
    callee = "vllm.config:SchedulerConfig"
    fill = {"is_encoder_decoder": "False", "max_model_len": "the generator's"}
    drop = {"is_encoder_decoder": "older vLLM takes it from the model config"}

    def always(self, names: tuple[str, ...]) -> list[str]:
        return ["sets async_scheduling=False"] if "async_scheduling" in names else []

    def value(self, parameter: str, kwargs: Mapping[str, Any]) -> Any:
        construction = running()
        if parameter == "max_model_len" and construction is not None:
            return construction.arguments["max_model_len"]
        return False

    def amend(self, names: tuple[str, ...], kwargs: dict[str, Any]) -> None:
        if "async_scheduling" in names:
            kwargs.setdefault("async_scheduling", False)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [SchedulerConfigCall()]
