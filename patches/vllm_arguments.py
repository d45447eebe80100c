"""vLLM arguments that the generator's signature has no place for, and the worker extension.

What breaks: dtype is always "auto", which makes bf16 of a float32 checkpoint; the KV-cache dtype, expert parallelism,
the executor and most of what a large model needs cannot be set.
Since: every vLLM.
How it is mended: arguments given through ``speculators_compat.configure`` go to the vLLM config class that has a field
of that name, and that class validates them. The workers get this package's extension, so that they import it whatever
``VLLM_PLUGINS`` says and need not import speculators.
Upstream: speculators/data_generation/vllm_hidden_states_generator.py, ``_create_vllm_config``.
Retire when: speculators passes vLLM arguments through.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.construction import running
from speculators_compat.errors import InputError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.prompts import check_parallelism, check_prefix_caching
from speculators_compat.surface import Surface
from speculators_compat.worker import EXTENSION

#: Config classes in the order in which an argument's field is looked for.
CONFIGS = ("ModelConfig", "CacheConfig", "ParallelConfig", "SchedulerConfig", "LoadConfig", "DeviceConfig", "VllmConfig")
#: Command-line names that differ from their field's name.
ALIASES = {
    "kv_cache_dtype": "cache_dtype",
    "cpu_offload_gb": "cpu_offload_gb",
    "num_gpu_blocks": "num_gpu_blocks_override",
}
#: Arguments that the generator's constructor has itself.
CONSTRUCTOR = {
    "model": "model_path",
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "tensor_parallel_size": "tensor_parallel_size",
    "worker_extension_cls": None,
}


def route(vllm_args: dict[str, Any], fields: dict[str, set[str]]) -> dict[str, dict[str, Any]]:
    """Which config class gets which arguments.

    Args:
        fields: config class name to the names it takes.

    Raises:
        InputError: SC403 for an argument that no class takes, or that the constructor takes itself.
    """
    routed: dict[str, dict[str, Any]] = {name: {} for name in CONFIGS}
    for argument, value in vllm_args.items():
        field = ALIASES.get(argument, argument)
        owner = next((name for name in CONFIGS if field in fields[name]), None)
        if argument in CONSTRUCTOR or owner is None:
            known = sorted({f for names in fields.values() for f in names} | set(ALIASES))
            near = difflib.get_close_matches(argument, known, n=3)
            parameter = CONSTRUCTOR.get(argument)
            raise InputError(
                "SC403",
                found=f"vLLM argument {argument!r}",
                expected="a field of one of this vLLM's config classes that the generator does not set itself",
                why="it would have no effect, or contradict the constructor",
                mend=f"pass {parameter}= to VllmHiddenStatesGenerator"
                if parameter
                else (f"did you mean {' or '.join(near)}?" if near else "leave it out"),
            )
        routed[owner][field] = value
    check_prefix_caching(vllm_args)
    check_parallelism(routed["ParallelConfig"])
    return routed


class VllmArguments(Adapter):
    id = "vllm_arguments"
    seam = "the calls of vLLM's config classes in the generator"
    why = "dtype, KV-cache dtype, executor and the like cannot be set, and the workers know nothing of this package"
    since = "every vLLM"
    how = "adds configure()'s arguments to the config class that has the field, which validates them; sets the extension"
    upstream = "speculators' _create_vllm_config"
    retire_when = "speculators passes vLLM arguments through"

    def probe(self, surface: Surface) -> Probe:
        for name in CONFIGS:
            if surface.parameters(f"vllm.config:{name}") is None:
                return Probe(State.DRIFTED, f"vllm.config.{name} no longer exists")
        parallel = surface.parameters("vllm.config:ParallelConfig")
        if parallel is not None and "worker_extension_cls" not in parallel.names:
            return Probe(State.DRIFTED, "ParallelConfig no longer takes worker_extension_cls")
        return Probe(State.APPLIED, "in the generator's constructor")

    def apply(self, context: Context) -> None:
        import vllm.config

        fields = {
            name: {f.name for f in dataclasses.fields(getattr(vllm.config, name))} for name in CONFIGS
        }

        def amend(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            construction = running()
            if construction is not None:
                name = wrapped.__name__
                kwargs.update(route(construction.vllm_args, fields)[name])
                if name == "ParallelConfig":
                    kwargs["worker_extension_cls"] = EXTENSION
                elif name == "CacheConfig":
                    # A token found in the prefix cache is not computed again, so its state cannot be captured.
                    kwargs.setdefault("enable_prefix_caching", False)
                elif name == "ModelConfig":
                    kwargs["trust_remote_code"] = construction.vllm_args.get("trust_remote_code", True)
            return wrapped(*args, **kwargs)

        for name in CONFIGS:
            if hasattr(context.module, name):
                context.journal.wrap(context.module, name, amend, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [VllmArguments()]
