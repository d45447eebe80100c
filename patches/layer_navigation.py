"""Multimodal layer navigation: from any loaded model to its decoder layers.

What breaks: speculators 0.3 takes ``model.model`` and 0.4 ``model.get_language_model().model``; wrappers such as
``KimiK25ForConditionalGeneration`` keep their decoder layers elsewhere (``language_model.model.layers``).
Since: every vLLM; the wrappers differ, not the release.
How it is mended: the decoder layers are the module list whose length is the text config's layer count. Known paths only
decide between several; vision and audio towers never count. Anything ambiguous is refused with the candidates.
Upstream: https://github.com/vllm-project/vllm (``SupportsMultiModal.get_language_model``).
Retire when: speculators finds the decoder layers of wrappers by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from speculators_compat import settings
from speculators_compat.adapter import Adapter, Context, Probe, State
from speculators_compat.errors import CompatError
from speculators_compat.hookspecs import hookimpl
from speculators_compat.surface import Surface

if TYPE_CHECKING:
    import torch

#: Where decoder layers are known to be, most usual first.
KNOWN_PATHS = (
    "model.layers",
    "language_model.model.layers",
    "model.language_model.layers",
    "model.language_model.model.layers",
    "language_model.model.language_model.layers",
    "thinker.language_model.model.layers",
    "transformer.h",
    "transformer.blocks",
    "transformer.encoder.layers",
    "backbone.layers",
    "model.decoder.layers",
    "gpt_neox.layers",
)
#: Parts of a path that lead away from the text decoder.
OTHER_TOWERS = frozenset(
    "visual vision vision_model vision_tower vision_encoder vit image_encoder audio audio_tower audio_encoder "
    "audio_model speech_encoder mm_projector multi_modal_projector resampler talker code2wav code_predictor "
    "mtp mtp_layers draft_model".split()
)


@dataclass(frozen=True)
class DecoderStack:
    """The decoder layers and where they were found, for example ``language_model.model.layers``."""

    path: str
    layers: torch.nn.ModuleList


def find_decoder_layers(model: Any, num_layers: int) -> DecoderStack:
    """The target model's decoder layers.

    Args:
        model: a loaded vLLM model (any :class:`torch.nn.Module`).
        num_layers: decoder layers according to vLLM's own model config.

    Raises:
        CompatError: SC501 if there is no such stack of layers, or more than one.
    """
    import torch

    if LayerNavigation.id in settings.without():  # for diagnosis: where speculators itself looks
        return DecoderStack("model.layers", model.model.layers)
    lists = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m)}
    fitting = {
        name: layers
        for name, layers in lists.items()
        if len(layers) == num_layers and not OTHER_TOWERS & set(name.split("."))
    }
    # A list inside a layer (experts, say) can have the same length by chance.
    outer = {n: m for n, m in fitting.items() if not any(n.startswith(o + ".") for o in fitting)}
    known = [path for path in KNOWN_PATHS if path in outer]
    names = [next(iter(outer))] if len(outer) == 1 else known
    if len(names) != 1:
        seen = ", ".join(f"{n} ({len(m)})" for n, m in lists.items() if "." not in n or "layers" in n or n in outer)
        raise CompatError(
            "SC501",
            found=f"{type(model).__name__} with {'no' if not outer else 'several'} fitting module lists; it has: "
            f"{seen or 'none'}",
            expected=f"exactly one list of {num_layers} decoder layers",
            why="states of other layers would be captured",
            mend="report the architecture with this list, so that its path can be added",
        )
    return DecoderStack(names[0], outer[names[0]])


class LayerNavigation(Adapter):
    id = "layer_navigation"
    seam = "where a loaded model keeps its decoder layers"
    why = "wrappers such as KimiK25ForConditionalGeneration have no model.model.layers, so capture setup dies after the load"
    since = "every vLLM"
    how = "finds the module list as long as the text config's layer count; refuses when that is ambiguous"
    upstream = "vLLM's SupportsMultiModal.get_language_model"
    retire_when = "speculators finds the decoder layers of wrappers by itself"

    def probe(self, surface: Surface) -> Probe:
        return Probe(State.APPLIED, "in the workers, once the model is loaded")

    def apply(self, context: Context) -> None:
        """Nothing to change here: the worker extension calls :func:`find_decoder_layers`."""


@hookimpl
def speculators_compat_adapters() -> list[Adapter]:
    return [LayerNavigation()]
