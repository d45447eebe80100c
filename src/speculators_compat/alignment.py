"""Proof that captured states belong to their prompts, from what the engine computes anyway.

Extraction lets vLLM sample one greedy token for each prompt. For the last token of every prompt these must agree:

1. the last layer's row in the result and the row that left the last decoder layer, bit for bit;
2. that row after the model's final norm, and the row that the engine gave to its LM head for this prompt;
3. the largest logit of that row, and the token that the engine reports for the request.

Together: final norm and LM head, applied to the captured state, give the engine's own token. Nothing large is computed
again: a few rows are gathered in each step, by hooks on the last layer and on the norm after it, and by wrapping the
``compute_logits`` that vLLM calls; all tensor-parallel ranks run exactly what they ran before. A model whose final norm
is not found, or which does something else between its last layer and its LM head, is not judged: its samples count as
*not proved* with the reason.
"""

from __future__ import annotations

import queue
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import CompatError
from .patcher import Journal

if TYPE_CHECKING:
    import torch

    from .capture import Capture

#: Largest difference of two normalized rows that counts as rounding. Rows of other tokens or layers differ by far more.
TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 3e-2}
#: Tokens of the largest logits that are looked at; ties and near-ties beyond them cannot be told apart anyway.
TOP = 8
#: Names of final norms beside the decoder layers.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")
#: Share of the largest logit by which another one may be smaller and still be the maximum, by rounding.
LOGIT_ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Proof:
    """What a worker found for one request; :func:`judge` makes the verdict.

    Attributes:
        id: vLLM's request id.
        skipped: why there is nothing to judge; empty otherwise.
        dtype: of the states.
        row: checksum of the row that the result must hold for the last layer and the last token.
        fed: distance of what the model's final norm was given from the captured row.
        direct: the norm was given the very tensors that the last layer returned.
        headed: the model returned the very tensor that the norm returned.
        error: distance of the captured row after the final norm from the LM head's row.
        own: the same for the norm's own output in the engine's forward pass.
        twin: place in the step whose LM head row is nearest, if it is another one and within rounding; else -1.
        raw: distance of the captured row itself, without the norm, from the LM head's row.
        tokens, logits: the largest logits of the LM head's row.
    """

    id: str
    skipped: str = ""
    dtype: str = ""
    row: int = 0
    fed: float = 0.0
    direct: bool = False
    headed: bool = False
    error: float = 0.0
    own: float = 0.0
    twin: int = -1
    raw: float = 0.0
    tokens: tuple[int, ...] = ()
    logits: tuple[float, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """One sample's verdict: proved, not proved (``skipped`` says why), or a ``fault`` with its likely ``cause``."""

    skipped: str = ""
    fault: str = ""
    cause: str = ""


CAUSES = {
    "order": "rows were given to the wrong prompts (the order of the batch)",
    "layer": "the states are those of another layer or token (layer convention, or positions)",
    "norm": "the last layer's state is in another norm state than the one asked for",
}


def judge(proof: Proof, *, token: int | None = None, row: int | None = None) -> Verdict:
    """Compare a worker's findings with the result and the engine's answer.

    Args:
        token: the token that the engine reports for the request, if it is known and greedy.
        row: checksum (:func:`checksum`) of the last layer's last row in the result, if that layer was asked for.
    """
    tolerance = TOLERANCE.get(proof.dtype, max(TOLERANCE.values()))
    if proof.skipped:
        return Verdict(skipped=proof.skipped)
    if row is not None and row != proof.row:
        return Verdict(fault="the last layer's last row is not the one that left that layer", cause="layer")
    if not proof.fed <= tolerance and proof.direct:
        return Verdict(fault="its last state is not what the last layer handed on", cause="layer")
    if not proof.fed <= tolerance:
        return Verdict(skipped="the model's final norm is given something else than the last decoder layer's state")
    if not proof.error <= tolerance:
        if proof.twin >= 0:
            return Verdict(
                fault=f"its last state belongs to place {proof.twin} of the step, not to its own", cause="order"
            )
        if not proof.own <= tolerance and proof.headed:
            return Verdict(fault="the LM head's row for it is another one than its last", cause="order")
        if not proof.own <= tolerance:
            return Verdict(skipped="the model changes its states between the final norm and the LM head")
        cause = "norm" if proof.raw <= tolerance else "layer"
        return Verdict(
            fault=f"its last state after the final norm differs by {proof.error:.2g} from what the LM head got",
            cause=cause,
        )
    if token is not None and proof.tokens:
        floor = proof.logits[0] - _slack(proof)
        # Where even the last one kept is a near-tie, the maximum may be a token that was not kept.
        logit = dict(zip(proof.tokens, proof.logits, strict=True)).get(token, proof.logits[-1])
        if logit < floor:
            return Verdict(fault=f"its last state gives token {proof.tokens[0]}, the engine sampled {token}", cause="order")
    return Verdict()


def _slack(proof: Proof) -> float:
    share = LOGIT_ROUNDING.get(proof.dtype, max(LOGIT_ROUNDING.values()))
    return share * max(abs(proof.logits[0]), 1e-3)


def checksum(row: torch.Tensor) -> int:
    """Of a state's bytes, the same in the worker and in the caller's process."""
    import torch

    return zlib.crc32(row.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


@dataclass
class Report:
    """How many samples of a session were proved; the others by reason."""

    proved: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)

    def count(self, verdict: Verdict) -> None:
        """Add one sample."""
        if verdict.fault:
            self.failed[verdict.cause] += 1
        elif verdict.skipped:
            self.skipped[verdict.skipped] += 1
        else:
            self.proved += 1

    def systematic(self) -> str:
        """The likely cause, if samples fail so often that it cannot be chance; empty otherwise."""
        failed = sum(self.failed.values())
        if failed < 2 or failed <= self.proved:
            return ""
        return self.failed.most_common(1)[0][0]

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"proved": self.proved, "not_proved": dict(self.skipped), "failed": dict(self.failed)}


@dataclass
class _Pending:
    """Rows of the running step, one for each prompt that ends in it."""

    ids: list[str]
    places: list[int]
    size: int  # requests in the step
    index: torch.Tensor
    state: torch.Tensor
    added: bool = True  # whether the last layer left two addends
    returned: frozenset[int] = frozenset()  # addresses of what it returned
    direct: bool = False
    fed: torch.Tensor | None = None
    own: torch.Tensor | None = None
    norm: torch.nn.Module | None = None
    normed: int = 0  # address of what the norm returned
    headed: bool = False


def find_norms(model: Any, path: str) -> list[tuple[str, torch.nn.Module]]:
    """Modules that may be the final norm: norms beside the list of decoder layers.

    Which of them it is shows when the model runs: the one that is called after the last layer.
    """
    parent = model.get_submodule(path.rpartition(".")[0])
    return [(name, module) for name, module in parent.named_children() if "norm" in type(module).__name__.lower()]


def final_norm_of(model: Any, path: str) -> torch.nn.Module:
    """The final norm, where its name or its being the only one leaves no doubt.

    Raises:
        CompatError: SC409.
    """
    norms = dict(find_norms(model, path))
    named = [name for name in FINAL_NORMS if name in norms]
    names = named or list(norms)
    if len(names) != 1:
        raise CompatError(
            "SC409",
            found=f"{', '.join(norms) or 'no norm'} beside {path} in {type(model).__name__}",
            expected="one norm that is applied after the last decoder layer",
            why="the state after it was asked for (final_norm), and which module makes it would be a guess",
            mend="leave final_norm off, and apply the model's norm to the last layer's state when training",
        )
    return norms[names[0]]


def normed_output(output: Any) -> Any:
    """The normalized rows of what a final norm returned: vLLM's fused norms return the residual too."""
    return output[0] if isinstance(output, (tuple, list)) else output


class Alignment:
    """Collects proofs in one worker, beside a :class:`~speculators_compat.capture.Capture`.

    Args:
        capture: whose step and requests are looked at, and whose sender is used.
        model: the loaded model.
        path: where its decoder layers are.
        layers: the decoder layers.
        normed: the last layer's result is its state after the final norm.
    """

    def __init__(self, capture: Capture, model: Any, path: str, layers: Any, *, normed: bool = False) -> None:
        self._capture = capture
        self._normed = normed
        self._pending: _Pending | None = None
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._journal = Journal()
        norms = find_norms(model, path)
        self.reason = ""
        if not norms:
            self.reason = f"no final norm beside {path}"
        elif not hasattr(model, "compute_logits"):
            self.reason = f"{type(model).__name__} has no compute_logits"
        self._handles: list[Any] = []
        if self.reason:
            return
        self._handles.append(layers[len(layers) - 1].register_forward_hook(self._left_last_layer))
        for _, norm in norms:
            self._handles.append(norm.register_forward_pre_hook(self._enters_norm, with_kwargs=True))
            self._handles.append(norm.register_forward_hook(self._left_norm))
        self._handles.append(model.register_forward_hook(self._left_model))
        self._journal.wrap(model, "compute_logits", self._compute_logits, adapter="alignment")
        if capture.on_cuda:
            threading.Thread(target=self._finish, name="speculators_compat alignment", daemon=True).start()

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._journal.undo()
        self._queue.put(None)

    # ---- in the forward pass. Nothing here may raise: the model goes on whatever becomes of the proof.

    def _left_last_layer(self, module: Any, args: Any, output: Any) -> None:
        import torch

        from .residual import left_layer

        former, self._pending = self._pending, None
        if former is not None:
            self._skip(former.ids, "the engine computed no logits in that step")
        try:
            step = self._capture.running_step()
            if step is None or not step.last:
                return
            ids = [id for id, _, _ in step.last]
            try:
                hidden, residual = left_layer(module, output)
                index = torch.tensor([row for _, row, _ in step.last], pin_memory=self._capture.on_cuda)
                index = index.to(hidden.device, non_blocking=True)
                state = hidden.index_select(0, index)
                if residual is not None:
                    state = state + residual.index_select(0, index)
                places = [place for _, _, place in step.last]
                self._pending = _Pending(
                    ids, places, step.size, index, state, added=residual is not None, returned=_addresses(output)
                )
            except Exception as error:
                self._skip(ids, f"the rows could not be gathered ({type(error).__name__})")
        except Exception:
            self._pending = None

    def _enters_norm(self, module: Any, args: Any, kwargs: Any) -> None:
        import torch

        pending = self._pending
        if pending is None or pending.own is not None:
            return
        try:
            given = [_flat(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if not 1 <= len(given) <= 2 or any(value.dim() != 2 for value in given):
                return
            pending.direct = _addresses(given) == pending.returned
            rows = [value.index_select(0, pending.index) for value in given]
            # Some models hand on a residual that is in the hidden states already.
            pending.fed = rows[0] + rows[1] if len(rows) == 2 and pending.added else rows[0]
            pending.norm = module
        except Exception:
            pending.fed = None

    def _left_norm(self, module: Any, args: Any, output: Any) -> None:
        pending = self._pending
        if pending is None or pending.norm is not module or pending.own is not None:
            return
        try:
            normed = normed_output(output)
            pending.own = _flat(normed).index_select(0, pending.index)
            pending.normed = normed.data_ptr()
        except Exception:
            pending.own = None

    def _left_model(self, module: Any, args: Any, output: Any) -> None:
        pending = self._pending
        if pending is not None and pending.own is not None:
            pending.headed = _addresses(output) == {pending.normed}

    def _compute_logits(self, wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pending, self._pending = self._pending, None
        states = args[0] if args else kwargs.get("hidden_states")
        found: tuple[Any, ...] | None = None
        if pending is not None:
            try:
                found = self._compare(pending, states)
            except Exception as error:
                self._skip(pending.ids, f"the rows could not be compared ({type(error).__name__}: {error})")
        logits = wrapped(*args, **kwargs)
        if pending is not None and found is not None:
            try:
                self._hand_over(pending, found, logits)
            except Exception as error:
                self._skip(pending.ids, f"the logits could not be read ({type(error).__name__}: {error})")
        return logits

    def _compare(self, pending: _Pending, states: Any) -> tuple[Any, ...] | None:
        import torch

        if pending.norm is None or pending.fed is None or pending.own is None:
            self._skip(pending.ids, "no final norm was called after the last decoder layer")
            return None
        if states.dim() != 2 or states.shape[0] != pending.size:
            self._skip(pending.ids, f"the LM head got {tuple(states.shape)} for {pending.size} requests")
            return None
        if states.shape[1] != pending.state.shape[1] or pending.own.shape != pending.state.shape:
            self._skip(pending.ids, "the model changes its states between the final norm and the LM head")
            return None
        # vLLM's norms have a plain torch form; the fused one may be compiled at its first call. No hooks are to run.
        apply = getattr(pending.norm, "forward_native", pending.norm.forward)
        normed = normed_output(apply(pending.state.clone()))
        places = torch.tensor(pending.places, pin_memory=self._capture.on_cuda).to(states.device, non_blocking=True)
        head = _directions(states.index_select(0, places))
        mine = _directions(normed)
        distances = torch.cdist(mine, head, compute_mode="donot_use_mm_for_euclid_dist")
        distances.fill_diagonal_(float("inf"))
        nearest, twin = distances.min(dim=1)
        figures = torch.stack(
            [
                _distance(_directions(pending.fed), _directions(pending.state)),
                _distance(mine, head),
                _distance(_directions(pending.own), head),
                _distance(_directions(pending.state), head),
                nearest,
                twin.float(),
            ],
            dim=1,
        )
        return figures, (pending.own if self._normed else pending.state)

    def _hand_over(self, pending: _Pending, found: tuple[Any, ...], logits: Any) -> None:
        import torch

        figures, rows = found
        top = None
        if isinstance(logits, torch.Tensor) and logits.dim() == 2 and logits.shape[0] == pending.size:
            places = torch.tensor(pending.places, pin_memory=self._capture.on_cuda)
            places = places.to(logits.device, non_blocking=True)
            top = logits.index_select(0, places).topk(min(TOP, logits.shape[1]), dim=1)
        tensors = [figures, rows, *(top or ())]
        if not self._capture.on_cuda:
            self._send(pending, tensors)
            return
        # On the capture's stream: these copies wait for those of whole layers, and the model must not wait with them.
        stream = self._capture.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            copies = []
            for tensor in tensors:
                copies.append(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
                copies[-1].copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._queue.put((pending, copies, event, tensors))  # which must live until they are copied

    # ---- afterwards

    def _finish(self) -> None:
        while (item := self._queue.get()) is not None:
            pending, tensors, event, _ = item
            try:
                event.synchronize()
                self._send(pending, tensors)
            except Exception as error:
                self._skip(pending.ids, f"the proof could not be sent ({type(error).__name__}: {error})")

    def _send(self, pending: _Pending, tensors: list[Any]) -> None:
        figures, rows = tensors[0].tolist(), tensors[1]
        logits = tensors[2].tolist() if len(tensors) > 2 else [()] * len(figures)
        tokens = tensors[3].tolist() if len(tensors) > 2 else [()] * len(figures)
        dtype = str(rows.dtype).removeprefix("torch.")
        tolerance = TOLERANCE.get(dtype, max(TOLERANCE.values()))
        for number, id in enumerate(pending.ids):
            fed, error, own, raw, nearest, twin = figures[number]
            other = pending.places[int(twin)] if len(pending.ids) > 1 and nearest <= tolerance < error else -1
            self._capture.sender.prove(
                {
                    "id": id,
                    "dtype": dtype,
                    "row": checksum(rows[number]),
                    "fed": fed,
                    "direct": pending.direct,
                    "headed": pending.headed,
                    "error": error,
                    "own": own,
                    "twin": other,
                    "raw": raw,
                    "tokens": tokens[number],
                    "logits": logits[number],
                }
            )

    def _skip(self, ids: Sequence[str], reason: str) -> None:
        for id in ids:
            self._capture.sender.prove({"id": id, "skipped": reason})


def _flat(states: torch.Tensor) -> torch.Tensor:
    """Without the batch dimension that transformers' own layers keep in vLLM."""
    return states[0] if states.dim() == 3 and len(states) == 1 else states


def _addresses(tensors: Any) -> frozenset[int]:
    import torch

    given = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
    return frozenset(tensor.data_ptr() for tensor in given if isinstance(tensor, torch.Tensor))


def _directions(rows: torch.Tensor) -> torch.Tensor:
    """Rows of length 1: a model may scale its states, by a constant, before its LM head."""
    import torch

    return torch.nn.functional.normalize(rows.float(), dim=-1)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.linalg.vector_norm(a - b, dim=-1)


