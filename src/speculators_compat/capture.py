"""Captures, inside a vLLM worker, what leaves the target model's decoder layers.

Forward hooks on the decoder layers see what each layer really returned; the model's own forward is not touched. Rows of
a step are attributed to requests by the model runner's batch order, and every row's token id is compared with the
prompt's, so that a wrong order cannot go unnoticed. Rows are stored by their position in the prompt, so chunked prefill
and preemption need no special care: whatever is computed again lands in the same place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .errors import CompatError
from .handover import Parcel, Sender
from .patcher import Journal


@dataclass
class _Request:
    """A request whose prompt is being computed."""

    prompt: list[int]
    buffer: torch.Tensor | None = None  # (captured layers, prompt tokens, hidden size), in shared memory
    parcel: Parcel | None = None
    done: list[tuple[int, int]] = field(default_factory=list)  # spans of prompt positions stored

    def missing(self) -> int:
        """How many prompt positions have not been stored."""
        covered = end = 0
        for start, stop in sorted(self.done):
            covered += max(0, stop - max(start, end))
            end = max(end, stop)
        return len(self.prompt) - covered


@dataclass(frozen=True)
class _Span:
    """Rows of one step that belong to one request's prompt."""

    id: str
    row: int
    position: int
    count: int


@dataclass
class _Step:
    """One forward pass."""

    scheduled: dict[str, int]
    computed: dict[str, int]
    spans: list[_Span] | None = None
    states: dict[int, torch.Tensor] = field(default_factory=dict)


class Capture:
    """Hooks for one worker.

    Args:
        runner: vLLM's model runner, version 1 or 2.
        layers: the target model's decoder layers.
        layer_ids: indices into ``layers``, ascending and without duplicates. State ``k`` is what leaves decoder layer
            ``k`` with the residual added: transformers' ``hidden_states[k + 1]``, except that for the last layer it is
            the state *before* the final norm.
        sender: makes the buffers.
    """

    def __init__(self, runner: Any, layers: torch.nn.ModuleList, layer_ids: list[int], sender: Sender) -> None:
        self._runner = runner
        self._ids = layer_ids
        self._sender = sender
        self._requests: dict[str, _Request] = {}
        self._step: _Step | None = None
        self._batch: Any = None  # the step's batch as model runner V2 prepares it
        self._error: CompatError | None = None
        self._handles = [layers[k].register_forward_hook(self._hook(k)) for k in layer_ids]
        self._journal = Journal()
        self._journal.wrap(runner, "execute_model", self._execute_model, adapter="capture")
        if not hasattr(runner, "input_batch"):  # model runner V2 lays out a new batch in every step
            self._journal.wrap(runner, "prepare_inputs", self._prepare_inputs, adapter="capture")

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._journal.undo()

    def _execute_model(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._begin(args[0] if args else kwargs["scheduler_output"])
        output = wrapped(*args, **kwargs)
        self._end()
        return output

    def _prepare_inputs(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._batch = wrapped(*args, **kwargs)
        return self._batch

    def reset(self) -> None:
        """Forget all requests."""
        self._requests.clear()
        self._error = None

    def _begin(self, scheduler_output: Any) -> None:
        """A step begins; ``scheduler_output`` is vLLM's ``SchedulerOutput``."""
        self._step = self._batch = None
        if not scheduler_output.total_num_scheduled_tokens:
            return
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            # A request with embeddings instead of tokens has no token ids to check against.
            self._requests.setdefault(new.req_id, _Request(list(new.prompt_token_ids or ())))
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._step = _Step(dict(scheduler_output.num_scheduled_tokens), computed)

    def _end(self) -> None:
        """The step's forward pass is over: store its rows."""
        step, self._step = self._step, None
        if step is None or self._error is not None:
            return
        try:
            self._store(step)
        except CompatError as error:
            # Raising here would take the worker down with the model in it; the caller is told when it asks.
            self._error = error

    def take(self, ids: list[str]) -> dict[str, Parcel]:
        """Parcels of finished requests, which are then forgotten.

        Raises:
            CompatError: SC503 if positions are missing, or whatever went wrong while capturing.
        """
        if self._error is not None:
            raise self._error
        # vLLM's engine makes ids unique by a suffix, "ID-1a2b3c4d".
        inner = {id.rpartition("-")[0]: id for id in self._requests}
        parcels = {}
        for id in ids:
            request = self._requests.pop(id, None) or self._requests.pop(inner.get(id, ""), None)
            if request is None or request.parcel is None:
                found = "no states at all"
            elif request.missing():
                found = f"no states for {request.missing()} of {len(request.prompt)} tokens"
            else:
                parcels[id] = request.parcel
                continue
            raise CompatError(
                "SC503",
                found=f"request {id}: {found}",
                expected="a state for every prompt token",
                why="states that are too short would be paired with the wrong loss mask",
                mend="leave enable_prefix_caching off: tokens found in the prefix cache are not computed again",
            )
        return parcels

    def _hook(self, layer_id: int) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            step = self._step
            if step is None or self._error is not None:
                return  # a profiling or warm-up pass
            try:
                if step.spans is None:
                    step.spans = self._spans(step)
                step.states[layer_id] = left_layer(output)
            except CompatError as error:
                self._error = error

        return hook

    def _spans(self, step: _Step) -> list[_Span]:
        """Which rows are whose. Called inside the forward pass, when the runner's batch order is final."""
        if self._batch is not None:
            order, token_ids = list(self._batch.req_ids), getattr(self._batch, "input_ids", None)
        else:
            order = [id for id in self._runner.input_batch.req_ids if id in step.scheduled]
            buffer = getattr(self._runner, "input_ids", None)
            token_ids = getattr(buffer, "cpu", buffer)
        if set(order) != set(step.scheduled):
            raise CompatError(
                "SC505",
                found=f"the model runner's batch has {len(order)} requests, {len(step.scheduled)} were scheduled",
                expected="the same requests",
                why="rows could be given to the wrong request",
                mend="report this vLLM version; SPECULATORS_COMPAT_WAY=engine may work",
            )
        spans, row = [], 0
        for id in order:
            count, position = step.scheduled[id], step.computed[id]
            request = self._requests.get(id)
            if request is not None:
                wanted = min(count, len(request.prompt) - position)
                if wanted > 0:
                    spans.append(_Span(id, row, position, wanted))
            row += count
        if isinstance(token_ids, torch.Tensor):
            self._check_tokens(spans, token_ids)
        return spans

    def _check_tokens(self, spans: list[_Span], token_ids: torch.Tensor) -> None:
        seen = token_ids[: max((s.row + s.count for s in spans), default=0)].tolist()
        for span in spans:
            prompt = self._requests[span.id].prompt
            if seen[span.row : span.row + span.count] != prompt[span.position : span.position + span.count]:
                raise CompatError(
                    "SC506",
                    found=f"request {span.id}: the engine computed other tokens at rows {span.row}..{span.row + span.count - 1}",
                    expected=f"the prompt's tokens from position {span.position} on",
                    why="the states in those rows belong to another request",
                    mend="report this vLLM version; SPECULATORS_COMPAT_WAY=engine may work",
                )

    def _store(self, step: _Step) -> None:
        absent = [k for k in self._ids if k not in step.states]
        if absent:
            raise CompatError(
                "SC502",
                found=f"decoder layers {absent} ran without their forward hooks",
                expected="each decoder layer called as a module",
                why="their states cannot be seen",
                mend="keep enforce_eager on: a compiled model or a replayed CUDA graph runs no hooks",
            )
        for span in step.spans or ():
            request = self._requests[span.id]
            for index, layer_id in enumerate(self._ids):
                rows = step.states[layer_id][span.row : span.row + span.count]
                if rows.shape[0] != span.count:
                    raise CompatError(
                        "SC507",
                        found=f"decoder layer {layer_id} returned {step.states[layer_id].shape[0]} rows",
                        expected=f"at least {span.row + span.count}",
                        why="each rank computed only a part of the tokens (sequence parallelism or micro-batches)",
                        mend="leave sequence parallelism and dual-batch overlap off",
                    )
                if request.buffer is None:
                    shape = (len(self._ids), len(request.prompt), rows.shape[-1])
                    request.buffer, request.parcel = self._sender.buffer(shape, rows.dtype)
                request.buffer[index, span.position : span.position + span.count].copy_(rows)
            request.done.append((span.position, span.position + span.count))


def left_layer(output: Any) -> torch.Tensor:
    """The residual stream after a decoder layer, from what its forward returned.

    vLLM's layers return ``(hidden_states, residual)`` where the next layer's fused norm adds the two (the add is the
    same as in ``fused_add_rms_norm``), ``(hidden_states, None)``, or ``hidden_states`` alone.

    Returns:
        A new tensor of shape (rows, hidden size): later in-place changes by the model do not reach it.

    Raises:
        CompatError: SC508 for any other kind of output.
    """
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], torch.Tensor):
        hidden = output[0]
        residual = output[1] if len(output) > 1 else None
        if residual is None:
            return hidden.clone()
        if isinstance(residual, torch.Tensor) and residual.shape == hidden.shape and len(output) == 2:
            return hidden + residual
    kinds = [type(o).__name__ for o in output] if isinstance(output, (tuple, list)) else type(output).__name__
    raise CompatError(
        "SC508",
        found=f"a decoder layer returned {kinds}",
        expected="hidden states, or hidden states and a residual of the same shape",
        why="which of these is the residual stream would be a guess",
        mend="report the model's architecture",
    )
