"""Multimodal layer navigation: from any loaded model to its decoder layers.

What breaks: speculators 0.3 takes ``model.model`` and 0.4 ``model.get_language_model().model``; wrappers
such as ``KimiK25ForConditionalGeneration`` keep their decoder layers elsewhere
(``language_model.model.layers``).
Since: every vLLM; the wrappers differ, not the release. How it is mended: the decoder layers are the module
list whose length is the text config's layer count; vision and audio towers never count. Of several, the one
inside what vLLM itself calls the language model is taken, then the one at a known path. Anything else is
refused with the candidates. The final norm and the embedding are looked for beside the layers and outwards
from there; where they are in doubt there is none.
Upstream: https://github.com/vllm-project/vllm (``SupportsMultiModal.get_language_model``).
Retire when: speculators finds the decoder layers of wrappers by itself.
"""

from __future__ import annotations

import contextlib
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
#: What the norm after the last layer and the token embedding are called.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embedding", "embeddings", "tok_embeddings", "embed_in")
#: Parts of a path that lead away from the text decoder.
OTHER_TOWERS = frozenset(
    {
        "visual", "vision", "vision_model", "vision_tower", "vision_encoder", "vision_backbone", "vision_embed_tokens",
        "vision_resampler", "visual_tokenizer", "vit", "vit_model", "sam_model", "image_encoder", "vpm", "vte",
        "embed_vision", "audio", "audio_tower", "audio_encoder", "audio_model", "continuous_audio_tower",
        "whisper_encoder", "apm", "embed_audio", "speech_encoder", "mm_projector", "projector", "multi_modal_projector",
        "resampler", "qformer", "abstractor", "talker", "code2wav", "code_predictor", "mtp", "mtp_layers", "draft_model"
    }
)


@dataclass(frozen=True)
class DecoderStack:
    """A model's decoder layers and what stands around them.

    Attributes:
        path: where the layers are, for example ``language_model.model.layers``.
        layers: the list of decoder layers.
        norm_path: the norm after the last layer; ``None`` where that is in doubt.
        embedding_path: the token embedding; ``None`` where that is in doubt.
    """

    path: str
    layers: torch.nn.ModuleList
    norm_path: str | None = None
    embedding_path: str | None = None


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
    names = list(outer)
    if len(names) > 1:
        names = _in_language_model(model, names) or names
    if len(names) > 1:
        names = [path for path in KNOWN_PATHS if path in names] or names
    if len(names) != 1:
        shown = (n for n in lists if "." not in n or "layers" in n or n in outer)
        seen = ", ".join(f"{n} ({len(lists[n])})" for n in shown)
        raise CompatError(
            "SC501",
            found=f"{type(model).__name__} with {'no' if not outer else 'several'} fitting module lists; it has: "
            f"{seen or 'none'}",
            expected=f"exactly one list of {num_layers} decoder layers",
            why="states of other layers would be captured",
            mend="report the architecture with this list, so that its path can be added",
        )
    path = names[0]
    return DecoderStack(
        path,
        outer[path],
        norm_path=_beside(model, path, "norm", FINAL_NORMS),
        embedding_path=_beside(model, path, "embedding", EMBEDDINGS),
    )


def _in_language_model(model: Any, paths: list[str]) -> list[str]:
    """Those of the paths that lie in what a multimodal model of vLLM's calls its language model."""
    inner = None
    if hasattr(model, "get_language_model"):
        with contextlib.suppress(Exception):  # each model's own code; several raise for text-only use
            inner = model.get_language_model()
    prefix = next((name for name, module in model.named_modules() if module is inner), "")
    return [path for path in paths if prefix and path.startswith(prefix + ".")]


def _beside(model: Any, path: str, kind: str, names: tuple[str, ...]) -> str | None:
    """The module of a kind that is nearest to the layers: beside them, else beside what holds them, and so on."""
    holder = path
    while holder:
        holder = holder.rpartition(".")[0]
        children = dict(model.get_submodule(holder).named_children())
        found = [n for n, module in children.items() if kind in type(module).__name__.lower()]
        chosen = [n for n in names if n in found] or found
        if chosen:
            return ".".join(filter(None, (holder, chosen[0]))) if len(chosen) == 1 else None
    return None


class LayerNavigation(Adapter):
    id = "layer_navigation"
    seam = "where a loaded model keeps its decoder layers"
    why = "wrappers such as KimiK25ForConditionalGeneration have no model.model.layers: setup dies after the load"
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
