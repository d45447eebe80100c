"""Speculators' client of the server: no file is read before it is whole, and what is missing is said.

What breaks: the client in speculators 0.5 to 0.9 gets the path of a file from `vllm serve` and reads it.

- 0.5 knows nothing of the lock file with which vLLM from 0.22 on says that it is still writing: it reads files that are
  not there yet, or half there, and leaves the lock files behind. It gives up after 15 seconds, which long prompts, and
  requests that queue behind others, take; and a server without the connector ends in ``'NoneType' object has no attribute
  'get'``, after three more tries.
- 0.6 and 0.7 open the lock file for reading and ask for an exclusive lock, which network file systems refuse
  (``Bad file descriptor``), and return None as the path where the server says none.
- 0.6 to 0.9 wait 10 seconds for a lock, whatever the size of the states.
- None of them looks whether a file is whole where there is no lock: vLLM 0.17 to 0.20 write none, and a file system that
  another host writes to may show a file before its end.

Since: speculators 0.5.0. How it is mended: each request waits, as long as it may take (120 seconds unless told
otherwise), for the lock's release where there is a lock, and until the file is as long as its own header says; the states
are then checked: a row for each token of the prompt, the prompt's own tokens, as many layers as before, every number
finite, no row of zeros. Only then the caller gets the path, and the lock file is gone, so that no release's own waiting
can fail. What does not hold is an error that says so.
Upstream: https://github.com/vllm-project/speculators (data_generation/vllm_client.py).
Retire when: speculators 0.9 is no longer supported.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.hookspecs import hookimpl
from speculators_compat.serving import CLIENT_MODULE
from speculators_compat.surface import Surface

FUNCTIONS = ("generate_hidden_states", "generate_hidden_states_async")
TIMEOUT = "DEFAULT_REQUEST_TIMEOUT"
#: The seconds that a request may take unless told otherwise; as in speculators from 0.6 on.
SECONDS = 120


class ServerClient(Adapter):
    id = "server_client"
    seam = "the file of states that the server names and speculators' client reads"
    why = "files are read before they are whole, requests given up after 15 s, and missing answers told as Python errors"
    since = "speculators 0.5.0"
    how = "waits for the whole file, checks it, and only then hands the path on"
    upstream = "speculators/data_generation/vllm_client.py"
    retire_when = "speculators 0.9 is no longer supported"
    trigger = CLIENT_MODULE
    required = False

    def probe(self, surface: Surface) -> Probe:
        if not surface.has_module(self.trigger):
            return Probe(State.NOT_APPLICABLE, "this speculators has no client of a server")
        names = (*FUNCTIONS, "extract_output", "InvalidResponseError", TIMEOUT)
        gone = [name for name in names if not surface.has(f"{self.trigger}:{name}")]
        parameters = surface.parameters(f"{self.trigger}:extract_output")
        if gone or parameters is None or len(parameters.names) != 2:
            what = f"{', '.join(gone)} are gone" if gone else "extract_output() takes other arguments"
            return Probe(State.DRIFTED, what)
        return Probe(State.APPLIED, "files are whole and checked before they are handed on")

    def apply(self, context: Context) -> None:
        module, journal = context.module, context.journal
        seconds = getattr(module, TIMEOUT)
        if seconds is not None and seconds < SECONDS:
            seconds = SECONDS
            journal.replace(module, TIMEOUT, seconds, adapter=self.id)
        journal.wrap(module, "extract_output", functools.partial(_answered, module), adapter=self.id)
        for name in FUNCTIONS:
            signature = inspect.signature(getattr(module, name))
            wrapper = functools.partial(_generated, signature, seconds)
            journal.wrap(module, name, wrapper, adapter=self.id)


def _answered(
    module: Any, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``extract_output``, where the server did not say where the states are."""
    response = args[0] if args else next(iter(kwargs.values()))
    params = getattr(response, "kv_transfer_params", None)
    if not params or not (params.get("hidden_states_path") or params.get("handle")):
        said = "nothing" if not params else f"only {', '.join(params)}"
        raise module.InvalidResponseError(
            f"[SC801] the server's answer does not say where the states are (kv_transfer_params holds {said}). "
            "It runs without a connector for hidden states: compat-check --url checks it, compat-check --serve prints "
            "the command to start it with"
        )
    return wrapped(*args, **kwargs)


def _generated(
    signature: inspect.Signature,
    seconds: float | None,
    wrapped: Any,
    instance: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """A request of the client, whose file is whole and checked when it is over."""
    given = signature.bind_partial(*args, **{k: v for k, v in kwargs.items() if k in signature.parameters}).arguments
    if "timeout" in signature.parameters and "timeout" not in given:
        kwargs = {**kwargs, "timeout": seconds}  # the default was bound when the function was made
    limit = kwargs["timeout"] if "timeout" in kwargs else given.get("timeout", seconds)
    prompt = given.get("client_item", given.get("token_ids"))
    tokens = prompt["input_ids"] if isinstance(prompt, dict) else prompt
    found = wrapped(*args, **kwargs)
    if inspect.isawaitable(found):
        return _checked_later(found, tokens, limit)
    _check(found, tokens, limit)
    return found


async def _checked_later(coming: Any, tokens: Any, limit: float | None) -> Any:
    found = await coming
    import asyncio  # its import takes longer than those of all adapters

    await asyncio.to_thread(_check, found, tokens, limit)
    return found


def _check(found: Any, tokens: Any, limit: float | None) -> None:
    from speculators_compat.statefile import checked_states

    if isinstance(found, tuple):  # speculators 0.9 returns all that the server said
        path = found[1].get("hidden_states_path")  # another connector's handle is no file
    else:
        path = found if isinstance(found, str) and found.endswith(".safetensors") else None
    if path is not None:
        checked_states(path, tokens, seconds=limit)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ServerClient()]
