"""Captures, inside a vLLM worker, what leaves the target model's decoder layers.

Forward hooks on the decoder layers see what each layer really returned; the model's own forward is not touched. Rows of
a step are attributed to requests by the model runner's batch order, and every row's token id is compared with the
prompt's, so that a wrong order cannot go unnoticed. Rows are stored by their position in the prompt, so chunked prefill
and preemption need no special care: whatever is computed again lands in the same place.

On CUDA each layer's state is written to a staging buffer and copied to pinned shared memory on a stream of its own, while
the next layers are computed; a thread waits for the copies, looks at the checks and tells the caller. The device memory
taken is ``captured layers * max_num_batched_tokens * hidden size * bytes``, whatever the prompts.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from .alignment import normed_output
from .errors import CompatError
from .handover import Parcel, Sender
from .patcher import Journal
from .residual import left_layer


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
    """One forward pass.

    Attributes:
        extremes: (captured layers, rows), the largest absolute value in each row; NaN if there is one in it.
        tokens: the token ids that the engine computed, if it says.
        size: how many requests the step computes.
        last: request, row and place in the batch of each prompt's last token, where the step computes it.
    """

    scheduled: dict[str, int]
    computed: dict[str, int]
    ended: tuple[str, ...]
    spans: list[_Span] | None = None
    seen: set[int] = field(default_factory=set)
    size: int = 0
    last: list[tuple[str, int, int]] = field(default_factory=list)
    extremes: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None


class Capture:
    """Hooks for one worker.

    Args:
        runner: vLLM's model runner, version 1 or 2.
        layers: the target model's decoder layers.
        layer_ids: indices into ``layers``, ascending and without duplicates. State ``k`` is what leaves decoder layer
            ``k`` with the residual added: transformers' ``hidden_states[k + 1]``, except that for the last layer it is
            the state *before* the final norm.
        depot: folder of the caller's :class:`~speculators_compat.handover.Depot`.
        max_tokens: the most tokens that one step computes.
        final_norm: if given, the last layer's state is taken after it.
    """

    def __init__(
        self,
        runner: Any,
        layers: torch.nn.ModuleList,
        layer_ids: list[int],
        depot: str,
        max_tokens: int,
        *,
        final_norm: torch.nn.Module | None = None,
    ) -> None:
        self._runner = runner
        self._ids = layer_ids
        self._max_tokens = max_tokens
        self._requests: dict[str, _Request] = {}
        self._lock = threading.Lock()
        self._step: _Step | None = None
        self._batch: Any = None  # the step's batch as model runner V2 prepares it
        self._failed = False
        self.on_cuda = torch.device(runner.device).type == "cuda"
        self._staging: dict[int, torch.Tensor] = {}
        self._read: dict[int, torch.cuda.Event] = {}
        self._steps: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
        if self.on_cuda:
            self.stream = torch.cuda.Stream()
            self.sender = Sender(depot, pin=_pin, unpin=_unpin)
            threading.Thread(target=self._finish_steps, name="speculators_compat capture", daemon=True).start()
        else:
            self.sender = Sender(depot)
        self._handles = []
        for i, k in enumerate(layer_ids):
            normed = final_norm is not None and k == len(layers) - 1
            module = final_norm if final_norm is not None and normed else layers[k]
            self._handles.append(module.register_forward_hook(self._hook(i, k, normed=normed)))
        self._journal = Journal()
        self._journal.wrap(runner, "execute_model", self._execute_model, adapter="capture")
        if not hasattr(runner, "input_batch"):  # model runner V2 lays out a new batch in every step
            self._journal.wrap(runner, "prepare_inputs", self._prepare_inputs, adapter="capture")

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._journal.undo()
        self._steps.put(None)
        if self.on_cuda:
            self.stream.synchronize()  # nothing may be copied into memory that is let go
        self.sender.close()

    def reset(self) -> None:
        """Forget all requests."""
        with self._lock:
            for request in self._requests.values():
                if request.parcel is not None:
                    self.sender.release(request.parcel)
            self._requests.clear()
            self._failed = False

    def _execute_model(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dummy = kwargs.get("dummy_run") or (len(args) > 2 and args[2])
        self._begin(None if dummy else args[0] if args else kwargs["scheduler_output"])
        output = wrapped(*args, **kwargs)
        self._end()
        return output

    def _prepare_inputs(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._batch = wrapped(*args, **kwargs)
        return self._batch

    def _begin(self, scheduler_output: Any) -> None:
        self._step = self._batch = None
        if scheduler_output is None:
            return
        computed = {}
        for new in scheduler_output.scheduled_new_reqs:
            with self._lock:
                # A request of embeddings has no token ids, and no states are promised for it.
                self._requests.setdefault(new.req_id, _Request(list(new.prompt_token_ids or ())))
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        ended = tuple(scheduler_output.finished_req_ids)
        step = _Step(dict(scheduler_output.num_scheduled_tokens), computed, ended)
        if scheduler_output.total_num_scheduled_tokens:
            self._step = step
        elif ended:
            self._queue(step)

    def _end(self) -> None:
        step, self._step = self._step, None
        if step is None or self._failed:
            return
        try:
            if len(step.seen) < len(self._ids):
                missing = sorted(set(self._ids) - step.seen)
                raise CompatError(
                    "SC502",
                    found=f"decoder layers {missing} ran without their forward hooks",
                    expected="each decoder layer called as a module",
                    why="their states cannot be seen",
                    mend="keep enforce_eager on: a compiled model or a replayed CUDA graph runs no hooks",
                )
            if self.on_cuda:
                with torch.cuda.stream(self.stream):
                    step.extremes = _to_pinned(step.extremes)
                    step.tokens = _to_pinned(step.tokens)
                    step.copied = torch.cuda.Event()
                    step.copied.record()
            self._queue(step)
        except Exception as error:
            self._fail(error)

    def running_step(self) -> _Step | None:
        """The forward pass that is running, with its layout; ``None`` in a profiling or warm-up pass."""
        step = self._step
        if step is None or self._failed:
            return None
        if step.spans is None:
            step.spans, step.tokens = self._layout(step)
        return step

    def _hook(self, index: int, layer_id: int, *, normed: bool = False) -> Any:
        def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
            try:
                step = self.running_step()
                if step is None:
                    return
                if not normed and layer_id in step.seen:
                    raise _called_again(module, layer_id)
                streams = (normed_output(output), None) if normed else left_layer(module, output)
                self._store(step, index, *streams)
                step.seen.add(layer_id)
            except Exception as error:
                # Raising here would take the worker down with the model in it; the caller is told instead.
                self._fail(error)

        return hook

    def _layout(self, step: _Step) -> tuple[list[_Span], torch.Tensor | None]:
        """Which rows are whose. Called inside the forward pass, when the runner's batch order is final."""
        if self._batch is not None:
            order, tokens = list(self._batch.req_ids), getattr(self._batch, "input_ids", None)
        else:
            order = [id for id in self._runner.input_batch.req_ids if id in step.scheduled]
            tokens = getattr(self._runner, "input_ids", None)
            tokens = getattr(tokens, "cpu", None) if hasattr(tokens, "np") else tokens
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
                    if position + wanted == len(request.prompt):
                        step.last.append((id, row + wanted - 1, step.size))
            row += count
            step.size += 1
        # The runner prepares the next step in the same buffers.
        return spans, tokens[:row].clone() if isinstance(tokens, torch.Tensor) else None

    def _store(self, step: _Step, index: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        spans = step.spans or []
        rows = max((span.row + span.count for span in spans), default=0)
        if hidden.shape[0] < rows:
            raise CompatError(
                "SC507",
                found=f"decoder layer {self._ids[index]} returned {hidden.shape[0]} rows",
                expected=f"at least {rows}",
                why="each rank computed only a part of the tokens (sequence parallelism or micro-batches)",
                mend="leave sequence parallelism and dual-batch overlap off",
            )
        if not spans:
            return
        if step.extremes is None:
            step.extremes = torch.zeros(len(self._ids), rows, dtype=hidden.dtype, device=hidden.device)
        if not self.on_cuda:
            for span in spans:
                piece = slice(span.row, span.row + span.count)
                target = self._target(span, hidden)[index, span.position : span.position + span.count]
                if residual is None:
                    target.copy_(hidden[piece])
                elif target.device == hidden.device:
                    torch.add(hidden[piece], residual[piece], out=target)
                else:
                    target.copy_(hidden[piece] + residual[piece])
                # vector_norm(ord=inf) is the same, twenty times as slow on a CPU.
                step.extremes[index, piece] = torch.maximum(target.amax(dim=-1), -target.amin(dim=-1))
            return
        staging = self._staging.get(index)
        if staging is None or staging.dtype != hidden.dtype:
            staging = self._staging[index] = hidden.new_empty(max(self._max_tokens, rows), hidden.shape[-1])
            self._read[index] = torch.cuda.Event()
        compute = torch.cuda.current_stream()
        compute.wait_event(self._read[index])  # the last step's copies out of it
        if residual is None:
            staging[:rows].copy_(hidden[:rows])
        else:
            torch.add(hidden[:rows], residual[:rows], out=staging[:rows])
        self.stream.wait_stream(compute)
        with torch.cuda.stream(self.stream):
            torch.linalg.vector_norm(staging[:rows], ord=float("inf"), dim=-1, out=step.extremes[index])
            for span in spans:
                piece = staging[span.row : span.row + span.count]
                target = self._target(span, hidden)[index, span.position : span.position + span.count]
                target.copy_(piece, non_blocking=True)
            self._read[index].record()

    def _target(self, span: _Span, like: torch.Tensor) -> torch.Tensor:
        request = self._requests[span.id]
        if request.buffer is None:
            shape = (len(self._ids), len(request.prompt), int(like.shape[-1]))
            request.buffer, request.parcel = self.sender.buffer(span.id, shape, like.dtype)
        return request.buffer

    def _queue(self, step: _Step) -> None:
        if self.on_cuda:
            self._steps.put(step)
        else:
            self._finish_or_fail(step)

    def _finish_steps(self) -> None:
        while (step := self._steps.get()) is not None:
            self._finish_or_fail(step)

    def _finish_or_fail(self, step: _Step) -> None:
        try:
            if not self._failed:
                self._finish(step)
        except Exception as error:
            self._fail(error)

    def _finish(self, step: _Step) -> None:
        """The step's rows are in shared memory: check them, and send the requests that are complete."""
        if step.copied is not None:
            step.copied.synchronize()
        tokens = step.tokens.tolist() if step.tokens is not None else None
        with self._lock:
            for span in step.spans or ():
                request = self._requests.get(span.id)
                if request is None:
                    continue  # reset in the meantime
                if tokens is not None:
                    _check_tokens(span, tokens, request.prompt)
                if step.extremes is not None:
                    _check_values(span, self._ids, step.extremes[:, span.row : span.row + span.count])
                request.done.append((span.position, span.position + span.count))
                if not request.missing() and request.parcel is not None:
                    del self._requests[span.id]
                    self.sender.send(request.parcel)
                elif span.position + span.count == len(request.prompt):
                    _unfinished(span.id, request)  # its last token is computed: nothing more will come
            for id in step.ended:
                request = self._requests.pop(id, None)
                if request is not None and request.prompt:
                    if request.parcel is not None:
                        self.sender.release(request.parcel)
                    _unfinished(id, request)

    def _fail(self, error: Exception) -> None:
        if self._failed:
            return  # what follows from the first error would only hide it
        self._failed = True
        if not isinstance(error, CompatError):
            error = CompatError(
                "SC514",
                found=f"{type(error).__name__}: {error}",
                expected="no error while capturing",
                why="the states of this step are lost",
                mend="report this with the versions that compat-check prints",
            )
        self.sender.fail(error)


def _called_again(layer: torch.nn.Module, layer_id: int) -> CompatError:
    return CompatError(
        "SC522",
        found=f"decoder layer {layer_id} ({type(layer).__name__}) ran twice in one forward pass",
        expected="once",
        why="which of its states is meant would be a guess",
        mend="report the model's architecture; leave dual-batch overlap off",
    )


def _check_tokens(span: _Span, tokens: list[int], prompt: list[int]) -> None:
    if tokens[span.row : span.row + span.count] != prompt[span.position : span.position + span.count]:
        raise CompatError(
            "SC506",
            found=f"request {span.id}: other tokens at rows {span.row} to {span.row + span.count - 1} of the step",
            expected=f"the prompt's tokens from position {span.position} on",
            why="the states in those rows belong to another request",
            mend="report this vLLM version; SPECULATORS_COMPAT_WAY=engine may work",
        )


def _check_values(span: _Span, layer_ids: list[int], extremes: torch.Tensor) -> None:
    largest = extremes.amax(dim=1)  # NaN if there is one
    if bool((largest > 0).all()) and bool(torch.isfinite(largest).all()):
        return
    index = next(i for i, value in enumerate(largest.tolist()) if not 0 < value < float("inf"))
    value = float(largest[index])
    what = "only zeros" if value == 0 else "NaN" if value != value else "infinite values"
    raise CompatError(
        "SC511",
        found=f"request {span.id}: {what} after decoder layer {layer_ids[index]}, "
        f"tokens {span.position} to {span.position + span.count - 1}",
        expected="finite states that are not all zero",
        why="a draft model trained on them would learn nothing, or diverge",
        mend="try dtype=bfloat16 instead of float16, or another attention backend; check the checkpoint",
    )


def _unfinished(id: str, request: _Request) -> None:
    raise CompatError(
        "SC503",
        found=f"request {id} ended without states for {request.missing()} of its {len(request.prompt)} tokens",
        expected="a state for every prompt token",
        why="states that are too short would be paired with the wrong loss mask",
        mend="leave enable_prefix_caching off: tokens found in the prefix cache are not computed again",
    )


def _to_pinned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.device.type == "cpu":
        return tensor
    tensor.record_stream(torch.cuda.current_stream())
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _pin(address: int, size: int) -> None:
    # Without it copies still work, only not at the same time as the model; so a refusal is no error.
    if int(torch.cuda.cudart().cudaHostRegister(address, size, 0)) != 0:
        _forget_error()


def _forget_error() -> None:
    """CUDA keeps what a call refused, and torch would take it for the next kernel's failure."""
    name = f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}"
    with contextlib.suppress(OSError, AttributeError):  # torch has it loaded; where it cannot be found nothing is worse
        ctypes.CDLL(name).cudaGetLastError()


def _unpin(address: int) -> None:
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:  # it never was registered
        _forget_error()
