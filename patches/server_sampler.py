"""Sampler of the CPU runner: speculative methods on CPU builds whose stand-in kernel lags behind its caller.

What breaks: on a host without Triton vLLM's CPU runner puts plain functions in the place of Triton kernels. In some
releases the rejection sampler passes ``USE_FP64_GUMBEL``, which the function in ``vllm/utils/cpu_triton_utils.py`` does
not take: ``_sample_recovered_tokens_kernel_impl() got an unexpected keyword argument 'USE_FP64_GUMBEL'``. Every
speculative method, ``extract_hidden_states`` among them, ends before the first request.
Since: vLLM 0.24 (mended by vLLM in 0.28 at the latest). How it is mended: the argument is left out of the call. It says
in which precision the caller made its noise, which is handed over in float32, as the function reads it.
Upstream: vllm/v1/sample/rejection_sampler.py, vllm/utils/cpu_triton_utils.py.
Retire when: vLLM 0.27 is no longer supported.
"""

from __future__ import annotations

from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

KERNELS = "vllm.utils.cpu_triton_utils"
CALLER = "vllm.v1.sample.rejection_sampler"
NAME = "sample_recovered_tokens_kernel"
FUNCTION = f"_{NAME}_impl"
EXTRA = "USE_FP64_GUMBEL"
#: The noise among the positional arguments of the call.
NOISE = 5


class ServerSampler(Adapter):
    id = "server_sampler"
    seam = "the CPU stand-in for the kernel sample_recovered_tokens_kernel"
    why = "no speculative method starts on a CPU: the sampler passes an argument that the stand-in does not take"
    since = "vLLM 0.24"
    how = f"leaves {EXTRA} out of the call"
    upstream = "vllm/utils/cpu_triton_utils.py"
    retire_when = "vLLM 0.27 is no longer supported"
    trigger = KERNELS

    def probe(self, surface: Surface) -> Probe:
        parameters = surface.parameters(f"{KERNELS}:{FUNCTION}")
        if parameters is None:
            return Probe(State.NOT_APPLICABLE, "this vLLM has no CPU stand-in for the kernel")
        kernel = surface.parameters(f"{CALLER}:{NAME}")
        if not parameters.unknown([EXTRA]):
            return Probe(State.NOT_NEEDED, "the stand-in takes what the sampler passes")
        if kernel is not None and kernel.unknown([EXTRA]):
            return Probe(State.NOT_NEEDED, "the sampler does not pass it")
        return Probe(State.APPLIED, f"{EXTRA} is left out of the call")

    def apply(self, context: Context) -> None:
        def call(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if kwargs.pop(EXTRA, None) and len(args) > NOISE:
                args = (*args[:NOISE], args[NOISE].float(), *args[NOISE + 1 :])
            return wrapped(*args, **kwargs)

        context.journal.wrap(getattr(context.module, NAME), "func", call, adapter=self.id)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ServerSampler()]
