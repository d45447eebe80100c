"""Checks and normalises what is passed to ``VllmHiddenStatesGenerator``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import InputError

log = logging.getLogger("speculators_compat")
#: Names under which model configs keep :func:`placeholder_tokens`.
PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "image_patch_id",
    "img_context_token_id",
    "img_token_id",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "media_placeholder_token_id",
    "vision_token_id",
)
#: Names under which prompts and rows of data sets carry images, video and audio.
MEDIA = frozenset(
    {
        "audio",
        "audios",
        "image",
        "image_grid_thw",
        "images",
        "input_audio_features",
        "input_features",
        "mm_data",
        "multi_modal_data",
        "multi_modal_embeds",
        "pixel_values",
        "pixel_values_videos",
        "video",
        "videos",
    }
)
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")


def check_model(model: str, load_format: str | None = None) -> None:
    """Refuse a model folder without config or weights; names on the hub are left to vLLM.

    Raises:
        InputError: SC405.
    """
    folder = Path(model)
    looks_local = model.startswith(("/", ".", "~")) or model.count("/") > 1
    if not folder.is_dir():
        if looks_local:
            _bad_model(f"{model} is not a folder")
        return
    if not (folder / "config.json").is_file() and not (folder / "params.json").is_file():
        _bad_model(f"{model} has no config.json")
    if load_format not in ("dummy", "sharded_state", "runai_streamer") and not any(
        any(folder.glob(pattern)) for pattern in WEIGHTS
    ):
        _bad_model(f"{model} has no weights ({', '.join(WEIGHTS)})")


def _bad_model(found: str) -> None:
    raise InputError(
        "SC405",
        found=found,
        expected="a model folder with config.json and weights, or a name on the hub",
        why="vLLM would fail after starting its workers",
        mend="pass the folder that holds config.json and the weight files",
    )


def check_layer_ids(layer_ids: Sequence[Any], num_layers: int) -> list[int]:
    """Layer ids as given, checked; order and duplicates are kept.

    Args:
        layer_ids: id ``k`` is the state that leaves decoder layer ``k``, counting from 0.
        num_layers: decoder layers in the target model.

    Raises:
        InputError: SC406.
    """
    wrong = [k for k in layer_ids if isinstance(k, bool) or not isinstance(k, int) or not 0 <= k < num_layers]
    if wrong or not layer_ids:
        boundaries = wrong == [num_layers] * len(wrong) and 0 not in layer_ids and bool(layer_ids)
        raise InputError(
            "SC406",
            found=f"layer ids {wrong} in {list(layer_ids)}" if layer_ids else "an empty list of layer ids",
            expected=f"integers from 0 to {num_layers - 1} (id k is the state that leaves decoder layer k)",
            why=f"the target model has {num_layers} decoder layers",
            mend="EAGLE-3 and vLLM count boundaries: boundary k is layer id k - 1 here"
            + (f"; if these are boundaries, pass {[k - 1 for k in layer_ids]}" if boundaries else "")
            + (', or configure(layer_convention="boundary")' if boundaries else ""),
        )
    if len(set(layer_ids)) < len(layer_ids):
        log.warning("layer ids %s hold duplicates; each is returned as often as it is named", list(layer_ids))
    return list(layer_ids)


def check_prefix_caching(vllm_args: Mapping[str, Any]) -> None:
    """Refuse prefix caching: a token found in the cache is not computed again, so its state cannot be captured.

    Raises:
        InputError: SC408.
    """
    if vllm_args.get("enable_prefix_caching"):
        raise InputError(
            "SC408",
            found="enable_prefix_caching=True",
            expected="False, the generator's own setting",
            why="states of tokens found in the prefix cache would be missing",
            mend="leave enable_prefix_caching out",
        )


def check_parallelism(vllm_args: Mapping[str, Any]) -> None:
    """Refuse ways to spread a model in which one process does not see every layer of every prompt.

    Tensor and expert parallelism are none: the residual stream is whole on every rank.

    Raises:
        InputError: SC404.
    """
    whys = {
        "pipeline_parallel_size": (
            "each pipeline rank sees its own decoder layers only; the others would be missing",
            "use tensor_parallel_size instead",
        ),
        "data_parallel_size": (
            "each replica sees its own prompts only, and has to be driven by a process of its own",
            "use tensor_parallel_size instead, or run one generator for each part of the data",
        ),
    }
    for name, (why, mend) in whys.items():
        if vllm_args.get(name, 1) != 1:
            raise InputError("SC404", found=f"{name}={vllm_args[name]}", expected="1", why=why, mend=mend)


def placeholder_tokens(config: Any) -> frozenset[int]:
    """Token ids in whose place a model puts images, video or audio.

    Args:
        config: a model's config, as an object or as a dictionary.
    """
    values = config if isinstance(config, Mapping) else vars(config)
    found = frozenset(values[name] for name in PLACEHOLDERS if type(values.get(name)) is int)
    inner = values.get("thinker_config")  # Qwen's omni models keep them there
    return found if inner is None else found | placeholder_tokens(inner)


def media(values: Mapping[Any, Any]) -> list[str]:
    """Names of the images, video and audio that a prompt or a row carries; empty for text alone."""

    def there(value: Any) -> bool:
        return value is not None and (not hasattr(value, "__len__") or len(value) > 0)

    return sorted(name for name in MEDIA.intersection(values) if there(values[name]))


def text_only(token_ids: Any, placeholders: Collection[int] = ()) -> list[Any]:
    """The prompts as a list, once none of them has an image, video or audio: looked at before any is computed.

    Args:
        token_ids: as for :func:`check_prompts`.
        placeholders: see :func:`placeholder_tokens`.

    Raises:
        InputError: SC407 naming the first such prompt.
    """
    if isinstance(token_ids, Mapping):
        _bad_prompt(f"a {type(token_ids).__name__} of {_few(token_ids)}", "a list of prompts", "pass its token ids")
    prompts = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Mapping):
            found = ", ".join(media(prompt))
            _bad_prompt(
                f"prompt {index} is a {type(prompt).__name__} " + (f"with {found}" if found else f"of {_few(prompt)}"),
                "a list of token ids" + (" of text alone: the generator hands no images to vLLM" if found else ""),
                "leave it out; without its images its states would be those of another input"
                if found
                else "pass its token ids",
            )
        if placeholders and isinstance(prompt, (list, tuple)):
            _refuse_placeholders(index, prompt, placeholders)
    return prompts


def check_prompts(
    token_ids: Any, *, vocab_size: int, max_tokens: int, placeholders: Collection[int] = ()
) -> Iterator[list[int]]:
    """Prompts as lists of ints, one by one, so that the engine can begin with the first while the others are looked at.

    Those longer than ``max_tokens`` are cut, as speculators does, and counted in the log.

    Args:
        token_ids: a list of lists of ints (or of 1-D tensors), or a 2-D tensor.
        placeholders: see :func:`placeholder_tokens`.

    Raises:
        InputError: SC407 naming the first prompt that cannot be used.
    """
    prompts = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if not prompts:
        _bad_prompt("an empty list of prompts", "at least one prompt", "remove the call, or check the data file")
    cut = 0
    for index, prompt in enumerate(prompts):
        ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
        if not isinstance(ids, (list, tuple)):
            _bad_prompt(f"prompt {index} is a {type(ids).__name__}", "a list of token ids", "tokenize it first")
        if not ids:
            _bad_prompt(f"prompt {index} is empty", "at least one token", "leave it out")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size:  # several times faster than the loop
            for position, token in enumerate(ids):
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                    _bad_prompt(
                        f"prompt {index} has {token!r} at position {position}",
                        f"token ids from 0 to {vocab_size - 1}, the target model's vocabulary",
                        "tokenize with the target model's own tokenizer",
                    )
        _refuse_placeholders(index, ids, placeholders)
        cut += len(ids) > max_tokens
        yield list(ids[:max_tokens])
    if cut:
        log.warning("%d of %d prompts were cut to %d tokens (max_model_len - 1)", cut, len(prompts), max_tokens)


def placeholders_absent(ids: Sequence[int], placeholders: Collection[int]) -> bool:
    """Whether a prompt is text alone."""
    return set(placeholders).isdisjoint(ids)


def _refuse_placeholders(index: int, ids: Sequence[int], placeholders: Collection[int]) -> None:
    with contextlib.suppress(TypeError):  # something that cannot be in a set is no token id: said elsewhere
        if placeholders and not placeholders_absent(ids, placeholders):
            _bad_prompt(
                f"prompt {index} has a place for an image, video or audio",
                "text alone: the generator hands no images to vLLM",
                "leave it out; states from that place on would be those of another input",
            )


def _few(values: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, list(values)[:5])) or "nothing"


def _bad_prompt(found: str, expected: str, mend: str) -> None:
    raise InputError(
        "SC407", found=found, expected=expected, why="the target model cannot compute states for it", mend=mend
    )
