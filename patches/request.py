"""Request: arguments that vLLM's ``Request`` no longer takes.

What breaks: ``Request.__init__() got an unexpected keyword argument 'eos_token_id'``.
Since: vLLM 0.17.0.
How it is mended: the argument is left out. Stop tokens travel in the sampling parameters since, and a request that
generates one token needs none.
Upstream: vllm/v1/request.py.
Retire when: the generator's own loop is no longer used.
"""

from __future__ import annotations

from speculators_compat.adapter import Adapter, CallAdapter
from speculators_compat.hookspecs import hookimpl


class RequestCall(CallAdapter):
    id = "request"
    seam = "the call of vllm.v1.request.Request"
    why = "vLLM dropped eos_token_id from Request: the first generate() dies, after the load"
    since = "vLLM 0.17.0"
    how = "leaves eos_token_id out; a request that generates one token needs no stop token"
    upstream = "vllm/v1/request.py"
    retire_when = "the generator's own loop is no longer used"
    name = "Request"
    callee = "vllm.v1.request:Request"
    drop = {"eos_token_id": "one token is generated, whatever it is"}
    ours = ("request_id", "prompt_token_ids", "sampling_params", "pooling_params", "eos_token_id", "arrival_time")


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [RequestCall()]
