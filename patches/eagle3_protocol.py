"""EAGLE-3 protocol: auxiliary hidden states of models whose class does not declare ``SupportsEagle3``.

What breaks: vLLM's model runners refuse such a model after the load ("Model does not support EAGLE3
interface"), and vLLM up to 0.19 refuses the method itself for model types that are not on a list in its
source.
Since: every vLLM; the list went in 0.20. How it is mended: where a runner asks ``supports_eagle3(model)``
and the class says no, the model object is given what the protocol asks for. Its forward pass stays: hooks
on the decoder layers keep what leaves them, and a hook on the model returns it beside the hidden states, as
native models do. A model whose decoder layers cannot be found, a boundary that does not exist, and pipeline
parallelism are refused; the check is never just silenced. The list is lifted because the runner's question
decides. Models that declare the protocol keep their own implementation.

A *boundary* counts as in vLLM and EAGLE-3: boundary ``k`` is the state that enters decoder layer ``k``,
which is what left layer ``k - 1``; boundary 0 is what enters the first layer; the last one, equal to the
number of layers, is the state before the final norm. States are returned in ascending order of their
boundaries, each once, as native models do.

Upstream: vllm/model_executor/models/interfaces.py (``SupportsEagle3``), vllm/config/speculative.py.
Retire when: every decoder model in vLLM declares ``SupportsEagle3``.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import types
from typing import TYPE_CHECKING, Any, ClassVar

from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.patches.layer_navigation import DecoderStack, find_decoder_layers
from speculators_compat.surface import Surface

if TYPE_CHECKING:
    import torch

    from speculators_compat.patcher import Journal

log = logging.getLogger("speculators_compat")
#: What decoder layers call the states they are given.
HIDDEN = ("hidden_states", "hidden_state", "x")
SPECULATIVE = "vllm.config.speculative"


class AuxStates:
    """What ``SupportsEagle3`` asks of a model, for one model object whose class does not have it.

    Args:
        model: the model that the runner calls.
        stack: its decoder layers.
    """

    def __init__(self, model: Any, stack: DecoderStack) -> None:
        self._name = type(model).__name__
        self._layers = stack.layers
        self._boundaries: tuple[int, ...] = ()
        self._seen: dict[int, torch.Tensor] = {}
        self._layer_handles: list[Any] = []
        self._model_handles = [
            model.register_forward_pre_hook(self._begin),
            model.register_forward_hook(self._end),
        ]

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """Return the states at these boundaries from now on; none for an empty tuple.

        Raises:
            CompatError: SC520 for a boundary that does not exist, SC404 under pipeline parallelism.
        """
        count = len(self._layers)
        wrong = [k for k in layers if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k <= count]
        if wrong:
            raise CompatError(
                "SC520",
                found=f"boundaries {wrong} in {list(layers)}",
                expected=f"integers from 0 to {count}: boundary k is the state that enters layer k",
                why=f"{self._name} has {count} decoder layers",
                mend="correct eagle_aux_hidden_state_layer_ids (speculators 0.3 and 0.4 call boundary k "
                "layer k - 1)",
            )
        if (ranks := _pipeline_ranks()) > 1:
            raise CompatError(
                "SC404",
                found=f"pipeline_parallel_size={ranks}",
                expected="1",
                why="each pipeline rank sees its own decoder layers only; the others would be missing",
                mend="use tensor parallelism (tensor_parallel_size) instead",
            )
        self._unhook_layers()
        self._boundaries = tuple(sorted(set(layers)))
        for k in self._boundaries:
            if k:
                handle = self._layers[k - 1].register_forward_hook(self._leaving(k))
            else:
                handle = self._layers[0].register_forward_pre_hook(self._entering, with_kwargs=True)
            self._layer_handles.append(handle)

    def default_layers(self) -> tuple[int, ...]:
        """The boundaries that vLLM's native models use unless told otherwise."""
        count = len(self._layers)
        return (2, count // 2, count - 3)

    def close(self) -> None:
        """Remove all hooks."""
        self._unhook_layers()
        for handle in self._model_handles:
            handle.remove()

    def _unhook_layers(self) -> None:
        for handle in self._layer_handles:
            handle.remove()
        self._layer_handles.clear()
        self._seen.clear()

    def _begin(self, module: Any, args: Any) -> None:
        self._seen.clear()

    def _entering(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._seen[0] = entered_layer(module, args, kwargs)

    def _leaving(self, boundary: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            from speculators_compat.residual import left_layer

            hidden, residual = left_layer(module, output)
            # A copy: the next layer's fused norm writes to both.
            self._seen[boundary] = hidden.clone() if residual is None else hidden + residual

        return hook

    def _end(self, module: Any, args: Any, output: Any) -> Any:
        import torch

        if not self._boundaries:
            return None
        states, self._seen = self._seen, {}
        if not isinstance(output, torch.Tensor):
            raise CompatError(
                "SC521",
                found=f"{self._name} returned {type(output).__name__}",
                expected="the hidden states alone, beside which auxiliary states can be returned",
                why="which part of it the model runner needs would be a guess",
                mend="report the model's architecture",
            )
        missing = [k for k in self._boundaries if k not in states]
        if missing:
            raise CompatError(
                "SC502",
                found=f"the decoder layers at boundaries {missing} ran without their forward hooks",
                expected="each decoder layer called as a module",
                why="their states cannot be seen",
                mend="use enforce_eager: a compiled model runs no hooks",
            )
        aux = [states[k] for k in self._boundaries]
        for k, state in zip(self._boundaries, aux, strict=True):
            if state.shape[0] != output.shape[0]:
                raise CompatError(
                    "SC507",
                    found=f"{state.shape[0]} rows at boundary {k}, {output.shape[0]} rows of hidden states",
                    expected="a row for each token",
                    why="each rank computed a part of the tokens only (as sequence parallelism does)",
                    mend="leave sequence parallelism and dual-batch overlap off",
                )
        return output, aux


def entered_layer(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A copy of the state with which a decoder layer was called.

    Raises:
        CompatError: SC508 if its parameters do not say which of them that is.
    """
    import torch

    given = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
    floats = {n: v for n, v in given.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    names = [n for n in floats if n in HIDDEN] or [n for n in floats if n != "residual"]
    if len(names) != 1:
        raise CompatError(
            "SC508",
            found=f"{type(layer).__name__} is called with {', '.join(given)}",
            expected="one parameter for the hidden states",
            why="which of these is the residual stream would be a guess",
            mend="report the model's architecture",
        )
    hidden, residual = floats[names[0]], floats.get("residual")
    return hidden.clone() if residual is None else hidden + residual


def equipped(model: Any) -> bool:
    """Whether this adapter gave the model object its auxiliary states."""
    method = vars(model).get("set_aux_hidden_state_layers")
    return isinstance(getattr(method, "__self__", None), AuxStates)


def native(model: Any) -> bool:
    """Whether the model's own class implements ``SupportsEagle3``."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    return bool(supports_eagle3(model)) and not equipped(model)


def equip(model: Any, num_layers: int, journal: Journal, *, adapter: str) -> None:
    """Give a model object what ``supports_eagle3()`` looks for.

    Args:
        num_layers: decoder layers according to vLLM's own model config.

    Raises:
        CompatError: SC501 if its decoder layers cannot be found.
    """
    if equipped(model):
        return
    states = AuxStates(model, find_decoder_layers(model, num_layers))
    attributes = {
        "supports_eagle3": True,
        "has_own_lm_head": False,
        "has_own_embed_tokens": False,
        "set_aux_hidden_state_layers": states.set_aux_hidden_state_layers,
        "get_eagle3_aux_hidden_state_layers": states.default_layers,
        "get_eagle3_default_aux_hidden_state_layers": states.default_layers,
    }
    journal.extend(model, attributes, states.close, adapter=adapter)
    log.info("%s does not declare SupportsEagle3: its auxiliary states are captured", type(model).__name__)


def _pipeline_ranks() -> int:
    from vllm.distributed.parallel_state import get_pp_group, model_parallel_is_initialized

    return int(get_pp_group().world_size) if model_parallel_is_initialized() else 1


def _num_layers(model: Any) -> int:
    """Decoder layers as vLLM counts them, in the middle of loading the model."""
    from vllm.config import get_current_vllm_config

    from speculators_compat.worker import num_layers

    with contextlib.suppress(AssertionError):  # vLLM's own refusal where no config is set
        config = get_current_vllm_config().model_config
        if config is not None:
            return num_layers(config)
    from vllm.transformers_utils.config import get_hf_text_config

    return int(get_hf_text_config(model.config).num_hidden_layers)


class Eagle3Protocol(Adapter):
    """Mends the question of one module; :attr:`trigger` is that module."""

    id = "eagle3_protocol"
    seam = "supports_eagle3(model), asked by vLLM's model runner"
    why = "a model that does not declare SupportsEagle3 is refused after the load, although it has the states"
    since = "every vLLM"
    how = "equips the model object with hooks that return true states; refuses where layers are not found"
    upstream = "vllm/model_executor/models/interfaces.py: SupportsEagle3"
    retire_when = "every decoder model in vLLM declares SupportsEagle3"
    trigger = "vllm.v1.worker.gpu_model_runner"
    required = False  # the generator's own capture does without the protocol

    def probe(self, surface: Surface) -> Probe:
        if not surface.has_module(self.trigger) or not surface.has(f"{self.trigger}:supports_eagle3"):
            return Probe(State.NOT_APPLICABLE, f"{self.trigger} does not ask for the protocol here")
        parameters = surface.parameters("vllm.model_executor.models.interfaces:supports_eagle3")
        if parameters is None or parameters.missing(["model"]) or parameters.unknown(["model"]):
            return Probe(State.DRIFTED, "supports_eagle3() no longer takes a model alone")
        return Probe(State.APPLIED, "models are equipped when the runner asks")

    def apply(self, context: Context) -> None:
        journal = context.journal

        def ask(wrapped: Any, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            if wrapped(*args, **kwargs):
                return True
            model = args[0] if args else kwargs["model"]
            if isinstance(model, type):
                return False  # a class has no layers to look at
            equip(model, _num_layers(model), journal, adapter=self.id)
            return bool(wrapped(model))

        journal.wrap(context.module, "supports_eagle3", ask, adapter=self.id)


class Eagle3ProtocolV2(Eagle3Protocol):
    id = "eagle3_protocol_v2"
    seam = "supports_eagle3(model), asked by vLLM's model runner V2"
    since = "vLLM 0.17"
    trigger = "vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils"


class Eagle3AllowList(Adapter):
    id = "eagle3_allow_list"
    seam = "the list of model types for which vLLM's config admits the method eagle3"
    why = "the method is refused for model types that are not listed, whatever their class can do"
    since = "vLLM before 0.20"
    how = "empties the list, so that the runner's question whether the model supports EAGLE-3 decides"
    upstream = "vllm/config/speculative.py: eagle3_target_supported"
    retire_when = "vLLM 0.19 is no longer supported"
    trigger = SPECULATIVE
    required = False
    #: Two entries that every such list has had.
    listed: ClassVar[frozenset[str]] = frozenset({"llama", "qwen"})

    def probe(self, surface: Surface) -> Probe:
        lists = surface.text_lists(f"{SPECULATIVE}:SpeculativeConfig._verify_args")
        if lists is None:
            return Probe(State.NOT_APPLICABLE, "vLLM's config does not check the target model here")
        if not any(self.listed <= set(texts) for texts in lists):
            return Probe(State.NOT_NEEDED, "the method is admitted for every model type")
        return Probe(State.APPLIED, "every model type is admitted; the model runner decides")

    def apply(self, context: Context) -> None:
        # Pydantic compiled this very function into the validator: a replaced attribute would not be seen.
        function = context.module.SpeculativeConfig._verify_args
        code: types.CodeType = function.__code__
        # The empty text is contained in every model type.
        constants = tuple(("",) if self._is_list(value) else value for value in code.co_consts)
        if constants == code.co_consts:
            raise RuntimeError("the list of model types is no constant of SpeculativeConfig._verify_args")
        context.journal.replace_code(function, code.replace(co_consts=constants), adapter=self.id)

    def _is_list(self, value: Any) -> bool:
        return isinstance(value, tuple) and self.listed <= set(value)


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [Eagle3Protocol(), Eagle3ProtocolV2(), Eagle3AllowList()]
