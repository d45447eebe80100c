"""What leaves a decoder layer: which of the tensors that it returns make up the residual stream.

vLLM's decoder layers have three habits:

* ``hidden_states`` alone, or ``(hidden_states, None)``: that is the stream;
* ``(hidden_states, residual)`` where the next layer's first norm adds the two (a fused add and norm): the
  stream is their sum;
* ``(hidden_states, residual)`` where the layer has added the residual already and the next layer overwrites
  what it is given (Cohere, EXAONE 4, Granite hybrid, Phi-MoE, StableLM): the stream is ``hidden_states``,
  and the sum would count the residual twice.

The last two look alike from outside. What tells them apart is whether the layer's own forward pass reads the
``residual`` it is given before it assigns that name; its byte code says so, whatever the model. Layers with
several streams (hyper connections) return more tensors and are refused.
"""

from __future__ import annotations

import dis
import functools
import inspect
from typing import TYPE_CHECKING, Any

from .errors import CompatError

if TYPE_CHECKING:
    import torch

RESIDUAL = "residual"
#: Parameters of layers that are given one stream only.
SINGLE = frozenset({"self", "hidden_states", "hidden_state", "x", "positions", "position_ids"})
#: Instructions that read or assign a local variable.
VARIABLE = ("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE", "STORE_FAST", "STORE_DEREF")


@functools.cache
def adds_residual(kind: Any) -> bool | None:
    """Whether layers of this class add the residual that they are given to the hidden states.

    Returns:
        ``None`` if the class's forward pass does not say.
    """
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    if code is None:
        return None
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if RESIDUAL not in parameters:
        catches_all = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
        return False if set(parameters) <= SINGLE and not catches_all else None
    for instruction in dis.get_instructions(code):
        if not instruction.opname.startswith(VARIABLE):
            continue
        # Newer Pythons load or store two variables at once, named in the order of execution.
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        steps = [part for part in instruction.opname.split("_") if part in ("LOAD", "STORE")]
        for step, name in zip(steps, names, strict=False):
            if name == RESIDUAL:
                return step == "LOAD"
    return False  # never mentioned


def left_layer(layer: Any, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What left a decoder layer, as two addends of the residual stream (the second may be absent).

    Args:
        layer: the decoder layer.
        output: what it returned.

    Returns:
        Tensors of shape (rows, hidden size), the layer's own: they must be read before the model goes on.

    Raises:
        CompatError: SC508 for any other kind of output.
    """
    import torch

    hidden, *others = output if isinstance(output, (tuple, list)) and output else (output,)
    if isinstance(hidden, torch.Tensor) and hidden.dim() == 3 and len(hidden) == 1:
        hidden = hidden[0]  # transformers' own layers in vLLM keep a batch dimension
    residual = others[0] if others else None
    # More tensors are more streams; a cache that is handed on to the next layer is none.
    plain = not any(isinstance(other, torch.Tensor) for other in others[1:])
    if isinstance(hidden, torch.Tensor) and hidden.dim() == 2 and plain:
        if residual is None:
            return hidden, None
        kind: Any = type(layer)
        adds = adds_residual(kind)
        if isinstance(residual, torch.Tensor) and residual.shape == hidden.shape and adds is not None:
            return hidden, residual if adds else None
    raise CompatError(
        "SC508",
        found=f"{type(layer).__name__} returned {_describe(output)}",
        expected="hidden states, or hidden states and a residual that the next layer adds or overwrites",
        why="which of these is the residual stream would be a guess",
        mend="report the model's architecture",
    )


def _describe(output: Any) -> str:
    if isinstance(output, (tuple, list)):
        return f"({', '.join(map(_describe, output))})"
    shape = getattr(output, "shape", None)
    return type(output).__name__ if shape is None else f"{type(output).__name__} of shape {tuple(shape)}"
