"""Server's states: as many as were asked for, from models that declare ``SupportsEagle3`` and return fewer.

What breaks: `extract_hidden_states` asks the model for states at boundaries, and speculators' trainer needs the last one,
the state before the final norm. Some models that declare the interface never return it: ``DeepseekV2Model``, and the
wrappers around it, look at boundaries before each layer only. The engine ends in its first forward pass: ``The expanded
size of the tensor (3) must match the existing size (2)``. Where one state comes for two or more, it is written for all of
them, without any error.
Since: vLLM 0.18; which model is right differs from release to release. How it is mended: hooks on the decoder layers watch
the first forward pass. A model that returns as many states as it was asked for keeps its own, and the hooks go; otherwise
the states are those that the hooks saw, as for models without the interface. Only in eager mode: a compiled model runs no
hooks, and keeps its own error.
Upstream: vllm/model_executor/models/deepseek_v2.py, kimi_k25.py.
Retire when: every model that declares the interface returns the last boundary too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from speculators_compat.adapter import Adapter, Context
from speculators_compat.hookspecs import hookimpl
from speculators_compat.patches.eagle3_protocol import AuxStates, Eagle3Protocol, _num_layers, equipped, log
from speculators_compat.patches.layer_navigation import DecoderStack, find_decoder_layers

if TYPE_CHECKING:
    from speculators_compat.patcher import Journal


class CompletedStates(AuxStates):
    """Watches what a model with the interface returns, and completes it."""

    def __init__(self, model: Any, stack: DecoderStack) -> None:
        super().__init__(model, stack)
        self._native = model.set_aux_hidden_state_layers
        self._counted = False

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        super().set_aux_hidden_state_layers(layers)
        self._counted = False
        self._native(layers)

    def _end(self, module: Any, args: Any, output: Any) -> Any:
        own: Any = None
        hidden = output
        if isinstance(output, (tuple, list)) and len(output) == 2 and isinstance(output[1], (tuple, list)):
            hidden, own = output
        if not self._boundaries or (own is not None and len(own) == len(self._boundaries)):
            if self._boundaries and not self._counted:
                self._unhook_layers()
            self._counted = True
            return None
        if not self._counted:
            self._counted = True
            count = 0 if own is None else len(own)
            log.info("%s returns %d of %d states: hooks supply them", self._name, count, len(self._boundaries))
        return super()._end(module, args, hidden)


def complete(model: Any, num_layers: int, journal: Journal, *, adapter: str) -> None:
    """Watch a model object that implements the interface itself. Once for each."""
    method = vars(model).get("set_aux_hidden_state_layers")
    if isinstance(getattr(method, "__self__", None), AuxStates):
        return
    states = CompletedStates(model, find_decoder_layers(model, num_layers))
    attributes = {"set_aux_hidden_state_layers": states.set_aux_hidden_state_layers}
    journal.extend(model, attributes, states.close, adapter=adapter)


def _compiled(model: Any) -> bool:
    """Whether a part of the model is compiled, as vLLM's decorator ``support_torch_compile`` notes."""
    return any(getattr(module, "do_not_compile", True) is False for module in model.modules())


class ServerStates(Eagle3Protocol):
    id = "server_states"
    seam = "the states that a model with SupportsEagle3 returns to vLLM's model runner"
    why = "some models return fewer states than asked for; the engine ends, or one state is written for all, silently"
    since = "vLLM 0.18"
    how = "counts them in the first forward pass; hooks on the decoder layers supply what is missing"
    upstream = "vllm/model_executor/models/deepseek_v2.py"
    retire_when = "every model that declares the interface returns the last boundary too"
    required = False

    def apply(self, context: Context) -> None:
        journal = context.journal

        def ask(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            answer = bool(wrapped(*args, **kwargs))
            model = args[0] if args else kwargs["model"]
            if answer and not isinstance(model, type) and not equipped(model) and not _compiled(model):
                complete(model, _num_layers(model), journal, adapter=self.id)
            return answer

        journal.wrap(context.module, "supports_eagle3", ask, adapter=self.id)


class ServerStatesV2(ServerStates):
    id = "server_states_v2"
    seam = "the states that a model with SupportsEagle3 returns to vLLM's model runner V2"
    trigger = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils"


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [ServerStates(), ServerStatesV2()]
