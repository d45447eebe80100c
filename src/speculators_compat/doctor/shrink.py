"""A small copy of a model: the same architecture and code, a few small layers, no weights.

Sizes that kernels know (head sizes, MLA ranks) stay; counts and widths shrink. Everything that names the
text hidden size elsewhere (projectors, vision towers) follows it.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .facts import TEXT_CONFIGS, ModelFacts

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_TOWER_LAYERS = (
    "num_hidden_layers",
    "depth",
    "num_layers",
    "vt_num_hidden_layers",
    "encoder_layers",
    "layers",
)
#: Counts of blocks in a tower that are listed by index.
_TOWER_LISTS = ("deepstack_visual_indexes", "fullatt_block_indexes", "feature_layers")
_EXPERT_KEYS = (
    "n_routed_experts",
    "num_local_experts",
    "num_experts",
    "moe_num_experts",
    "num_routed_experts",
)
_TOP_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_TOWER_DEPTH = 2
_MAX_LAYERS = 16


@dataclass(frozen=True)
class Plan:
    """What the small copy is.

    Attributes:
        notes: what it leaves out, in words.
    """

    config: dict[str, Any]
    layers: int
    hidden: int
    notes: tuple[str, ...]


class CannotShrink(Exception):
    """No small copy can be made; the message says why."""


def shrink(config: Mapping[str, Any], *, tp: int, cpu: bool) -> Plan:
    """The config of a small copy.

    Args:
        tp: the tensor parallel size that everything must divide by.
        cpu: for vLLM's CPU build: no quantization, and float32.
    """
    small: dict[str, Any] = copy.deepcopy(dict(config))
    text = _text(small)
    facts = ModelFacts(config)
    if facts.layers is None or facts.hidden_size is None:
        raise CannotShrink("config.json names no layer count or no hidden size")
    old_layers, old_hidden = facts.layers, facts.hidden_size
    layers = _layers(text, old_layers)
    hidden = _attention(text, facts, tp, cpu)
    _widths(text, facts, hidden, tp, cpu)
    for key in _LAYER_KEYS:
        if key in text:
            text[key] = layers
    for key, value in list(text.items()):
        per_layer = isinstance(value, list) or (isinstance(value, str) and key.endswith("pattern"))
        if per_layer and len(value) == old_layers:
            text[key] = value[:layers]
    for key in ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers"):
        if text.get(key):
            text[key] = 0
    if isinstance(text.get("max_window_layers"), int):
        text["max_window_layers"] = min(text["max_window_layers"], layers)
    notes = []
    _follow(small, text, old_hidden, hidden)
    if cpu:
        if any(
            part.pop(key, None)
            for part in (small, text)
            for key in ("quantization_config", "compression_config")
        ):
            notes.append("without quantization, which needs a GPU")
        for part in (small, text):
            for key in ("torch_dtype", "dtype"):
                if key in part:
                    part[key] = "float32"
    return Plan(small, layers, hidden, tuple(notes))


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The text decoder's part of a config that may be written to."""
    for name in TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, dict):
            deeper = _text(inner)
            if any(key in deeper for key in _LAYER_KEYS):
                return deeper
    return config


def _layers(text: dict[str, Any], old: int) -> int:
    """As few layers as hold one of each kind, and four for speculators' default layer ids."""
    need = 4

    def number(key: str) -> int:
        value = text.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else 0

    need = max(need, number("first_k_dense_replace") + 3, number("num_dense_layers") + 3)
    for key in ("full_attention_interval", "sliding_window_pattern", "moe_layer_freq", "decoder_sparse_step"):
        need = max(need, number(key))
    for period, offset in (
        ("attn_layer_period", "attn_layer_offset"),
        ("expert_layer_period", "expert_layer_offset"),
    ):
        need = max(need, number(period), number(offset) + 1)
    for value in text.values():
        if (
            isinstance(value, (list, str))
            and len(value) == old
            and (isinstance(value, str) or _hashable(value))
        ):
            kinds = set(value)
            if 1 < len(kinds) <= 6:
                need = max(need, max(value.index(kind) for kind in kinds) + 1)
    return min(old, need, _MAX_LAYERS) if need <= _MAX_LAYERS else min(old, need)


def _hashable(values: list[Any]) -> bool:
    return all(isinstance(value, (str, int, float, bool)) for value in values)


def _attention(text: dict[str, Any], facts: ModelFacts, tp: int, cpu: bool) -> int:
    """Shrink the heads; returns the new hidden size.

    GPU kernels for MLA know certain numbers of heads, so these stay.
    """
    heads, kv = facts.heads, facts.kv_heads
    if not heads:
        return max(256, 64 * tp)
    dim = facts.head_dim or 64
    if facts.is_mla:
        count = max(4, tp) if cpu else heads
        _set(text, ("num_attention_heads", "n_head", "n_heads"), count)
        _set(text, ("num_key_value_heads",), count)
        return 256
    group = heads // kv if kv and heads % kv == 0 else 1
    new_kv = max(2, tp) if kv and kv > 1 else 1
    count = new_kv * min(group, 2) if kv and kv > 1 else max(2, tp)
    _set(text, ("num_attention_heads", "n_head", "n_heads"), count)
    _set(text, ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"), new_kv)
    # Right too where the head size is the hidden size divided by the heads.
    return count * dim


def _widths(text: dict[str, Any], facts: ModelFacts, hidden: int, tp: int, cpu: bool) -> None:
    _set(text, ("hidden_size", "n_embd", "d_model", "dim"), hidden)
    unit = max(facts.weight_block or 64, 64 if cpu else 128) * tp  # GPU kernels work in tiles of 128
    width = -(-2 * hidden // unit) * unit
    for key, value in list(text.items()):
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if key.endswith("intermediate_size") or key in (
            "ffn_dim",
            "n_inner",
            "ffn_hidden_size",
            "ffn_hidden_dim",
        ):
            if value:
                text[key] = min(value, width)
        elif key in ("hidden_size_per_layer_input", "altup_lauxid"):
            text[key] = min(value, 64)
    if facts.experts:
        groups = text.get("n_group")
        groups = groups if isinstance(groups, int) and groups > 1 else 1
        top = next((text[key] for key in _TOP_KEYS if isinstance(text.get(key), int)), 2)
        fewest = 8 if cpu else 32
        experts = max(fewest, (4 if cpu else 8) * groups if groups > 1 else fewest, tp)
        _set(text, _EXPERT_KEYS, min(experts, facts.experts))
        _set(text, _TOP_KEYS, min(top, 4 if cpu else 8, facts.experts))


def _set(config: dict[str, Any], keys: tuple[str, ...], value: int) -> None:
    for key in keys:
        if isinstance(config.get(key), int):
            config[key] = value


def _follow(config: dict[str, Any], text: dict[str, Any], old_hidden: int, hidden: int) -> None:
    """Let the other parts follow the text decoder, and shorten the towers."""
    for key, value in list(config.items()):
        if value is text:
            continue
        if isinstance(value, dict) and key not in ("quantization_config", "auto_map", "rope_scaling"):
            inner_text = any(value.get(name) is text for name in TEXT_CONFIGS)
            if not inner_text and ("vision" in key or "audio" in key or "vis" in key or "tower" in key):
                for name in _TOWER_LAYERS:
                    if isinstance(value.get(name), int) and value[name] > _TOWER_DEPTH:
                        value[name] = _TOWER_DEPTH
                for name in _TOWER_LISTS:
                    if isinstance(value.get(name), list) and value[name]:
                        value[name] = [_TOWER_DEPTH - 1]
            _follow(value, text, old_hidden, hidden)
        elif config is not text and value == old_hidden and not isinstance(value, bool):
            config[key] = hidden


#: Kimi-K2.5's processor is code beside the config. A folder of config and tokenizer alone gets this in its
#: place: text prompts never reach it, but vLLM asks for one when it starts.
_KIMI_PROCESSOR = '''\
"""Stands for the model's image processor: a rehearsal has text only."""

import numpy as np
import torch
from transformers import BaseImageProcessor, BatchFeature

GRID = 4


class RehearsalImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values", "grid_thws"]

    def __init__(self, patch_size=14, num_frames_per_chunk=4, **kwargs):
        super().__init__(**kwargs)
        self.patch_size = patch_size
        self.num_frames_per_chunk = num_frames_per_chunk

    def media_tokens_calculator(self, media):
        return (GRID // 2) ** 2

    def split_video_chunks(self, video):
        step = self.num_frames_per_chunk
        frames = list(video)
        return [{"type": "video_chunk", "video_chunk": frames[i : i + step]} for i in range(0, len(frames),
        step)]

    def preprocess(self, medias, return_tensors=None, **kwargs):
        pixels, grids = [], []
        for media in medias:
            frames = [media["image"]] if media["type"] == "image" else media["video_chunk"]
            shape = (len(frames) * GRID * GRID, 3, self.patch_size, self.patch_size)
            pixels.append(torch.from_numpy(np.zeros(shape, dtype=np.float32)))
            grids.append([len(frames), GRID, GRID])
        return BatchFeature(data={"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)})
'''


def write_copy(source: Path, target: Path, plan: Plan) -> tuple[str, ...]:
    """Fill ``target`` with the small config and links to everything of ``source`` but config and weights.

    Returns:
        What was supplied because ``source`` does not have it, in words.
    """
    target.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir()):
        left_out = (
            entry.name == "config.json" or entry.suffix in _WEIGHTS or entry.name.endswith(".index.json")
        )
        if entry.is_file() and not left_out:
            os.symlink(os.path.realpath(entry), target / entry.name)
    (target / "config.json").write_text(json.dumps(plan.config, indent=1))
    architectures = plan.config.get("architectures") or []
    if (
        "KimiK25ForConditionalGeneration" in architectures
        and not (target / "preprocessor_config.json").exists()
    ):
        (target / "rehearsal_image_processor.py").write_text(_KIMI_PROCESSOR)
        processor = {
            "image_processor_type": "RehearsalImageProcessor",
            "auto_map": {"AutoImageProcessor": "rehearsal_image_processor.RehearsalImageProcessor"},
            # For the image processor that vLLM has of its own since 0.29.
            "media_proc_cfg": {
                "patch_size": 14,
                "merge_kernel_size": 2,
                "temporal_merge_kernel_size": 4,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
                "in_patch_limit": 16,
                "in_patch_limit_each_frame": 16,
                "in_patch_limit_video": None,
                "patch_limit_on_one_side": 4,
                "fixed_output_tokens": None,
                "sample_fps": 2.0,
                "max_num_frames_each_video": None,
                "timestamp_mode": "hh:mm:ss.fff",
            },
        }
        (target / "preprocessor_config.json").write_text(json.dumps(processor))
        return ("with a stand-in for the image processor",)
    return ()
