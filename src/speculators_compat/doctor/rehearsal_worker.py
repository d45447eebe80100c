"""What a rehearsal does inside vLLM's workers. It shares no code with the capture that it is to prove.

The witness looks at what *enters* the layer after the captured one, where the capture looks at what leaves
it, and it is asked for one prompt at a time, so that no row has to be attributed to a request.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

#: Set for the processes of a rehearsal.
REHEARSAL = "SPECULATORS_COMPAT_REHEARSAL"


def speaking_weights(module: ModuleType) -> None:
    """Make vLLM's dummy weights large enough that every layer moves the states.

    vLLM draws them from +-0.001, norms included: what leaves any layer is then all but the embedding, and
    states of a wrong layer would not be noticed.
    """
    loader: Any = module.DummyModelLoader
    original = loader.load_weights

    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        original(self, model, model_config)
        draw_weights(model)

    loader.load_weights = load_weights


def draw_weights(model: Any) -> None:
    """Redraw all weights from generators seeded by their names: every process draws the same."""
    import torch

    for name, tensor in model.state_dict().items():
        if tensor.device.type == "meta" or not tensor.numel():
            continue
        seed = zlib.crc32(name.encode())
        generator = torch.Generator(device="cpu").manual_seed(seed)
        if not tensor.is_floating_point():
            if tensor.dtype in (torch.int8, torch.uint8, torch.int32):  # packed quantized weights
                info = torch.iinfo(tensor.dtype)
                values = torch.randint(
                    info.min, info.max, tensor.shape, generator=generator, dtype=torch.int64
                )
                tensor.copy_(values.to(tensor.dtype))
            continue
        if tensor.element_size() < 2 or "scale" in name:
            continue  # vLLM's own draw suits quantized weights
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            value = 0.1 * noise.abs()
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif tensor.dim() < 2:
            if "norm" not in name:
                continue  # decay rates and the like, which have a range of their own
            value = 1 + 0.1 * noise
        elif "embed" in name:
            value = noise
        else:
            value = noise / math.sqrt(math.prod(tensor.shape[1:]) if tensor.dim() == 2 else tensor.shape[-1])
        tensor.copy_(value)


class Witness:
    """Hooks of its own, on what enters the next layer and on what leaves this one."""

    def __init__(self, model: Any, path: str | None, num_layers: int, hidden: int, ids: list[int]) -> None:
        self.hidden = hidden
        self.seen: dict[str, list[Any]] = {}
        name, layers = _stack(model, path, num_layers)
        self.path = name
        parent = model.get_submodule(name.rpartition(".")[0]) if "." in name else model
        for k in sorted(set(ids)):
            layers[k].register_forward_hook(self._leaving(f"{k} leaves"))
            after = layers[k + 1] if k + 1 < num_layers else _final_norm(parent)
            if after is not None:
                after.register_forward_pre_hook(self._entering(f"{k} enters"), with_kwargs=True)

    def _leaving(self, key: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, output: Any) -> None:
            self._keep(key, output if isinstance(output, (tuple, list)) else (output,))

        return hook

    def _entering(self, key: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            self._keep(key, (*args, *kwargs.values()))

        return hook

    def _keep(self, key: str, values: Any) -> None:
        # The residual stream is spread over hidden states and residual: their sum is the state.
        parts = [
            v
            for v in values
            if hasattr(v, "is_floating_point") and v.is_floating_point() and v.shape[-1] == self.hidden
        ]
        if parts:
            self.seen.setdefault(key, []).append(sum(part.detach().float() for part in parts).cpu())


def _stack(model: Any, path: str | None, num_layers: int) -> tuple[str, Any]:
    """The decoder layers: where they are expected, or else the outermost list of that length."""
    if path is not None:
        try:
            found = model.get_submodule(path)
            if len(found) == num_layers:
                return path, found
        except (AttributeError, TypeError):
            pass
    towers = ("vis", "audio", "tower", "talker", "mtp")
    fitting = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__ == "ModuleList"
        and len(module) == num_layers
        and not any(t in name for t in towers)
    ]
    if not fitting:
        raise LookupError(f"{type(model).__name__} has no list of {num_layers} layers")
    return min(fitting, key=lambda entry: entry[0].count("."))


def _final_norm(parent: Any) -> Any:
    for name in ("norm", "final_layernorm", "ln_f", "final_norm", "norm_f", "final_layer_norm"):
        if hasattr(parent, name):
            return getattr(parent, name)
    return None


def install(worker: Any, path: str | None, num_layers: int, hidden: int, ids: list[int]) -> str:
    """Put the witness into a worker; returns where it found the layers."""
    runner = worker.model_runner
    model = runner.get_model() if hasattr(runner, "get_model") else runner.model
    worker._rehearsal_witness = Witness(model, path, num_layers, hidden, ids)
    return str(worker._rehearsal_witness.path)


def take(worker: Any, file: str) -> bool:
    """Write what was seen since the last time, on rank 0."""
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank

    seen, worker._rehearsal_witness.seen = worker._rehearsal_witness.seen, {}
    if get_tensor_model_parallel_rank():
        return False
    torch.save({key: torch.cat(parts) for key, parts in seen.items()}, file)
    return True
