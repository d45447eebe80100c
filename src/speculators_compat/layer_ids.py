"""Which layer a layer id means, in both conventions.

================  ==================================  =============================  =====================
convention        id ``k`` is                         ids of a model of n layers     used by
================  ==================================  =============================  =====================
``after-layer``   the state that leaves layer ``k``   0 ... n-1                      speculators 0.3, 0.4
``boundary``      the state that enters layer ``k``   0 ... n                        EAGLE-3, vLLM,
                                                                                     speculators from 0.5
================  ==================================  =============================  =====================

After-layer ``k`` is boundary ``k + 1`` and transformers' ``hidden_states[k + 1]``. Boundary 0 is what enters the first
layer, the embeddings; no layer leaves it, so it has no after-layer id. The last one, after-layer ``n - 1`` or boundary
``n``, is the state *before* the model's final norm (transformers' last ``hidden_states`` entry is after it).

The same numbers therefore mean neighbouring layers. A draft model trained on one and served with the other loses
acceptance without any error: see :func:`default_layer_ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from .errors import InputError

if TYPE_CHECKING:
    from packaging.version import Version

Convention = Literal["after-layer", "boundary"]
AFTER_LAYER: Convention = "after-layer"
BOUNDARY: Convention = "boundary"
CONVENTIONS: tuple[Convention, ...] = (AFTER_LAYER, BOUNDARY)

#: What the trainer of each release line does with the last layer's state before its LM head.
TRAINER_NORM = {
    "0.3": "none: it wants the state after the final norm (final_norm)",
    "0.4": "the model's final norm: it wants the state before it",
    "0.5+": "the model's final norm: it wants the state before it",
}


def convention_of(speculators: str) -> Convention:
    """The convention of a speculators release, for example ``0.4.0.1``."""
    from packaging.version import Version

    return AFTER_LAYER if Version(speculators) < Version("0.5.dev0") else BOUNDARY


def trainer_format(speculators: Version | None) -> str:
    """The format of :mod:`~speculators_compat.dataio` for a release's trainer: ``pt``, from 0.5 on ``safetensors``."""
    return "pt" if speculators is None or convention_of(str(speculators)) == AFTER_LAYER else "safetensors"


def check(ids: Sequence[Any], num_layers: int, convention: Convention) -> list[int]:
    """Ids as a list, if all of them exist in this convention.

    Raises:
        InputError: SC411 with the translation, where the ids look like the other convention's.
    """
    limit = num_layers - 1 if convention == AFTER_LAYER else num_layers
    whole = all(isinstance(k, int) and not isinstance(k, bool) for k in ids)
    if ids and whole and all(0 <= k <= limit for k in ids):
        return list(ids)
    if whole and convention == AFTER_LAYER and num_layers in ids and all(1 <= k <= num_layers for k in ids):
        translated = [k - 1 for k in ids]
        mend = f"these are boundaries: pass {translated}, or name the convention (boundary)"
    else:
        mend = f"pass integers from 0 to {limit}"
    raise InputError(
        "SC411",
        found=f"layer ids {list(ids)} for a model of {num_layers} layers",
        expected=f"{convention} ids from 0 to {limit}",
        why="the states of another layer would be captured, without any error",
        mend=mend,
    )


def to_boundary(ids: Sequence[int], num_layers: int) -> list[int]:
    """After-layer ids as boundaries."""
    return [k + 1 for k in check(ids, num_layers, AFTER_LAYER)]


def to_after_layer(ids: Sequence[int], num_layers: int) -> list[int]:
    """Boundaries as after-layer ids.

    Raises:
        InputError: SC411 for an id that does not exist, and for boundary 0, which leaves no layer.
    """
    checked = check(ids, num_layers, BOUNDARY)
    if 0 in checked:
        raise InputError(
            "SC411",
            found=f"boundary 0 in {checked}",
            expected=f"boundaries from 1 to {num_layers}",
            why="boundary 0 is the embeddings, which no decoder layer returns",
            mend="leave 0 out",
        )
    return [k - 1 for k in checked]


def translate(ids: Sequence[int], num_layers: int, source: Convention, target: Convention) -> list[int]:
    """Ids of one convention in the other; order and duplicates are kept."""
    if source == target:
        return check(ids, num_layers, source)
    return to_boundary(ids, num_layers) if source == AFTER_LAYER else to_after_layer(ids, num_layers)


def default_layer_ids(speculators: str, num_layers: int) -> list[int]:
    """What a speculators release extracts if no ids are given, in its own convention; the last one is the target state.

    0.3 and 0.4 take ``[2, n // 2, n - 3, n - 1]`` and mean after-layer; releases from 0.5 on take
    ``[2, n // 2, n - 3]`` and ``n``, and mean boundaries, as vLLM does when it serves an EAGLE-3 head whose config
    names no layers. So a head trained on the defaults of 0.3 or 0.4 must name its layers in
    ``eagle_aux_hidden_state_layer_ids``, which neither release writes: ``to_boundary(ids)[:-1]``.

    Raises:
        InputError: SC411 where a model has too few layers for the defaults.
    """
    convention = convention_of(speculators)
    last = num_layers - 1 if convention == AFTER_LAYER else num_layers
    ids = [2, num_layers // 2, num_layers - 3, last]
    return check(ids, num_layers, convention)


def generator_defaults(num_layers: int, *, boundaries: bool) -> list[int]:
    """After-layer ids that ``VllmHiddenStatesGenerator`` takes where the script names none.

    Args:
        boundaries: whether this speculators' trainer counts boundaries, from 0.5 on; its defaults are other layers.

    Raises:
        InputError: SC411 where the model has too few layers for the defaults of 0.5 and later.
    """
    if boundaries:
        return to_after_layer(default_layer_ids("0.5", num_layers), num_layers)
    return [2, num_layers // 2, num_layers - 3, num_layers - 1]


def from_boundaries(ids: Sequence[Any]) -> list[int]:
    """Boundaries as after-layer ids, for a model whose number of layers is not known yet.

    Raises:
        InputError: SC411 for what is no boundary that a layer leaves.
    """
    whole = [k for k in ids if isinstance(k, int) and not isinstance(k, bool)]
    return to_after_layer(ids, max(whole, default=0))


def resolve(
    ids: Sequence[int] | None, num_layers: int | None, *, convention: Convention | None, output: str
) -> list[int] | None:
    """After-layer ids for the generator, from what the user asked for.

    Args:
        ids: ``None`` for the defaults of the trainer that reads the output.
        num_layers: ``None`` if it is not known before the model is loaded.
        convention: of ``ids``; ``None`` if the user did not say.
        output: ``pt`` for the trainer of speculators 0.3 and 0.4, ``safetensors`` for that of 0.5 and later.

    Returns:
        ``None`` for the generator's own choice.

    Raises:
        InputError: SC411 for ids that do not exist, or whose convention would be a guess.
    """
    if ids is None:
        if output == "pt":
            return None
        if num_layers is None:
            raise InputError(
                "SC411",
                found="no layer ids, and a model whose number of layers is not known before it is loaded",
                expected="layer ids, or a model folder",
                why="the trainer of speculators from 0.5 on wants boundaries 2, n // 2, n - 3 and n of n layers",
                mend="give layer ids and their convention",
            )
        return to_after_layer(default_layer_ids("0.5", num_layers), num_layers)
    if convention is None and output != "pt":
        shown = list(ids)
        raise InputError(
            "SC411",
            found=f"layer ids {shown} without a convention",
            expected="boundary or after-layer",
            why="the trainer of speculators from 0.5 on counts boundaries, the generator counts the layers left",
            mend=f"name the convention: boundary {shown} is after-layer {[k - 1 for k in shown]}; after-layer {shown} "
            f"is boundary {[k + 1 for k in shown]}",
        )
    if num_layers is not None:
        return translate(ids, num_layers, convention or AFTER_LAYER, AFTER_LAYER)
    return to_after_layer(ids, max(ids)) if convention == BOUNDARY else list(ids)
