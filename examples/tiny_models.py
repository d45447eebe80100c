# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random float32 weights, and a transformers reference for them.

The `architectures` entries are the real ones, so vLLM runs its real classes:

- `llama`        LlamaForCausalLM
- `mistral`      MistralForCausalLM (sliding window)
- `qwen3_moe`    Qwen3MoeForCausalLM (mixture of experts)
- `deepseek_v3`  DeepseekV3ForCausalLM (MLA, mixture of experts)
- `kimi_k25`     KimiK25ForConditionalGeneration around the same DeepSeek-V3 weights

Building needs torch, safetensors and tokenizers; the reference needs transformers. vLLM is
never imported. Every tensor is drawn from its own generator, seeded by its name, so the same
seed gives the same tensor whatever else is in the model.

    python tiny_models.py KIND FOLDER
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "KINDS",
    "build_deepseek_v3",
    "build_kimi_k25",
    "build_llama",
    "build_mistral",
    "build_qwen3_moe",
    "load_reference",
    "reference_hidden_states",
]

Shapes = dict[str, tuple[int, ...]]

VOCAB_SIZE = 512
BOS, EOS, PAD, MEDIA_PAD = 0, 1, 2, 3
SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|media_pad|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|kimi_k25_video_placeholder|>",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':\\n' + m['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
LANGUAGE_PREFIX = "language_model."


def build_llama(folder: str | os.PathLike[str], *, num_layers: int = 6, seed: int = 0) -> Path:
    """Write a LlamaForCausalLM: hidden 128, 4 heads of 32, 2 KV heads, float32.

    Tensor names and shapes: transformers `models/llama/modeling_llama.py`.
    """
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_common_config(num_layers),
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,  # two, so that two tensor-parallel ranks get one each
        "head_dim": 32,  # vLLM's CPU attention knows 32 and 64, not 16
        "attention_bias": False,
        "mlp_bias": False,
    }
    return _write(folder, config, _draw(_llama_shapes(config), seed))


def build_mistral(folder: str | os.PathLike[str], *, num_layers: int = 6, seed: int = 0) -> Path:
    """Write a MistralForCausalLM with a sliding window of 32 tokens, otherwise as `build_llama`."""
    path = build_llama(folder, num_layers=num_layers, seed=seed)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    _write_json(path / "config.json", config)
    return path


def build_qwen3_moe(folder: str | os.PathLike[str], *, num_layers: int = 5, seed: int = 0) -> Path:
    """Write a Qwen3MoeForCausalLM: hidden 128, 4 heads of 32 with normed queries and keys, 8 experts, float32.

    Tensor names and shapes: transformers `models/qwen3_moe/modeling_qwen3_moe.py` (one tensor per expert, as in the
    released checkpoints).
    """
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **_common_config(num_layers),
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
    }
    return _write(folder, config, _draw(_qwen3_moe_shapes(config), seed))


def build_deepseek_v3(
    folder: str | os.PathLike[str], *, num_layers: int = 5, seed: int = 0, **changes: Any
) -> Path:
    """Write a DeepseekV3ForCausalLM: hidden 128, MLA with heads of 64, 8 experts, float32.

    Layer 0 is dense, the others are mixtures of experts. `changes` replace config entries. Tensor
    names and shapes: transformers `models/deepseek_v3/modeling_deepseek_v3.py` (one tensor per
    expert, as in the released checkpoints).
    """
    config = _deepseek_v3_config(num_layers) | changes
    return _write(folder, config, _draw(_deepseek_v3_shapes(config), seed))


def build_kimi_k25(
    folder: str | os.PathLike[str], *, num_layers: int = 5, seed: int = 0, **changes: Any
) -> Path:
    """Write a KimiK25ForConditionalGeneration: 2 vision layers of width 64, float32.

    The language tensors are those of `build_deepseek_v3` with the same arguments (`changes` too), under
    `language_model.`. Vision names and shapes: vLLM `models/kimi_k25.py` and `kimi_k25_vit.py`.
    The config and image processor classes travel with the checkpoint (`auto_map`).
    """
    text_config = _deepseek_v3_config(num_layers) | changes
    vision_config: dict[str, Any] = {
        "model_type": "kimi_k25_vision",
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "merge_kernel_size": [2, 2],
        "video_attn_type": "spatial_temporal",
        "merge_type": "sd2_tpool",
        "mm_projector_type": "patchmerger",
        "mm_hidden_size": text_config["hidden_size"],
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
    }
    config: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config"},
        "text_config": text_config,
        "vision_config": vision_config,
        "media_placeholder_token_id": MEDIA_PAD,
        "use_unified_vision_chunk": True,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    language = _draw(_deepseek_v3_shapes(text_config), seed)
    tensors = {LANGUAGE_PREFIX + name: tensor for name, tensor in language.items()}
    tensors.update(_draw(_kimi_vision_shapes(vision_config), seed))

    path = _write(folder, config, tensors)
    (path / "configuration_kimi_k25.py").write_text(_CONFIG_CODE)
    write_kimi_image_processor(path, vision_config["patch_size"], vision_config["init_pos_emb_time"])
    return path


def write_kimi_image_processor(path: Path, patch_size: int = 14, frames: int = 4) -> None:
    """Write the image processor that vLLM's Kimi-K2.5 loads, even for text."""
    (path / "image_processing_kimi_k25.py").write_text(_IMAGE_PROCESSOR_CODE)
    processor = {
        "image_processor_type": "KimiK25ImageProcessor",
        "auto_map": {"AutoImageProcessor": "image_processing_kimi_k25.KimiK25ImageProcessor"},
        "patch_size": patch_size,
        "num_frames_per_chunk": frames,
        # Read by the image processor that vLLM has of its own since 0.29 instead of the one above.
        "media_proc_cfg": {
            "patch_size": patch_size,
            "merge_kernel_size": 2,
            "temporal_merge_kernel_size": frames,
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
    _write_json(path / "preprocessor_config.json", processor)


KINDS: dict[str, Callable[..., Path]] = {
    "llama": build_llama,
    "mistral": build_mistral,
    "deepseek_v3": build_deepseek_v3,
    "kimi_k25": build_kimi_k25,
}


def load_reference(folder: str | os.PathLike[str]) -> Any:
    """Load the transformers causal LM of a folder: float32, eager attention, eval mode.

    For `kimi_k25` this is the DeepSeek-V3 text model of the wrapper, which transformers knows.
    """
    from transformers import AutoModelForCausalLM

    path = Path(folder)
    config = json.loads((path / "config.json").read_text())
    if config["model_type"] == "kimi_k25":
        # A folder of its own rather than load_state_dict: transformers 5 fuses the experts
        # while it loads, and only from_pretrained does that.
        with tempfile.TemporaryDirectory() as scratch:
            _write_weights(Path(scratch), config["text_config"], _language_tensors(path))
            return load_reference(scratch)

    model, info = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation="eager", output_loading_info=True
    )
    # transformers only warns and goes on with fresh random numbers.
    wrong = [key for key in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[key]]
    if wrong:
        details = {key: info[key] for key in wrong}
        raise ValueError(f"{path}: weights do not fit: {details}")
    return model.float().eval()


def reference_hidden_states(
    folder: str | os.PathLike[str], prompts: Sequence[Sequence[int]], layer_ids: Sequence[int]
) -> list[list[Tensor]]:
    """Return, per prompt and per layer id k, the state that leaves decoder layer k.

    Each tensor is float32 [len(prompt), hidden]. It is transformers' `hidden_states[k + 1]`,
    except for the last layer, where that entry is already normalised: there the value before
    the final norm is returned. One prompt at a time, no cache, order and repeats kept.
    """
    import torch

    model = load_reference(folder)
    layers = model.model.layers
    last = len(layers) - 1
    for layer_id in layer_ids:
        if not 0 <= layer_id <= last:
            raise ValueError(f"layer id {layer_id} is not in 0..{last}")

    before_norm: list[Tensor] = []

    def keep(_module: Any, _args: Any, output: Any) -> None:
        before_norm.append(output[0] if isinstance(output, tuple) else output)

    results: list[list[Tensor]] = []
    handle = layers[last].register_forward_hook(keep)
    try:
        for prompt in prompts:
            before_norm.clear()
            with torch.inference_mode():
                output = model(
                    torch.tensor([list(prompt)]), output_hidden_states=True, use_cache=False
                )
            states = [*output.hidden_states[: last + 1], before_norm[0]]
            results.append([states[layer_id + 1][0].clone() for layer_id in layer_ids])
    finally:
        handle.remove()
    return results


# --------------------------------------------------------------------------- configs


def _common_config(num_layers: int) -> dict[str, Any]:
    """Return the config entries that Llama and DeepSeek-V3 share."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }


def _deepseek_v3_config(num_layers: int) -> dict[str, Any]:
    """Return the DeepSeek-V3 config, alone or as Kimi's `text_config`."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **_common_config(num_layers),
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,  # 32 + 32: the head size without MLA must be 32 or 64
        "v_head_dim": 32,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        # vLLM makes room for e_score_correction_bias only with these two.
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
    }


# --------------------------------------------------------------------------- tensor shapes


def _llama_shapes(config: dict[str, Any]) -> Shapes:
    """Return name -> shape of every Llama tensor ([out, in] for projections)."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    shapes = _outer_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (queries, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (keys, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (keys, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, queries)
        shapes.update(_mlp_shapes(prefix + "mlp.", hidden, config["intermediate_size"]))
    return shapes


def _qwen3_moe_shapes(config: dict[str, Any]) -> Shapes:
    """Return name -> shape of every Qwen3-MoE tensor: Llama's, with normed queries and keys, and experts."""
    shapes = {name: shape for name, shape in _llama_shapes(config).items() if ".mlp." not in name}
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
        shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
        shapes[prefix + "mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            shapes.update(_mlp_shapes(f"{prefix}mlp.experts.{expert}.", hidden, config["moe_intermediate_size"]))
    return shapes


def _deepseek_v3_shapes(config: dict[str, Any]) -> Shapes:
    """Return name -> shape of every DeepSeek-V3 tensor ([out, in] for projections)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    experts, expert_size = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes = _outer_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_a_proj.weight"] = (q_rank, hidden)
        shapes[prefix + "self_attn.q_a_layernorm.weight"] = (q_rank,)
        shapes[prefix + "self_attn.q_b_proj.weight"] = (heads * (nope + rope), q_rank)
        shapes[prefix + "self_attn.kv_a_proj_with_mqa.weight"] = (kv_rank + rope, hidden)
        shapes[prefix + "self_attn.kv_a_layernorm.weight"] = (kv_rank,)
        shapes[prefix + "self_attn.kv_b_proj.weight"] = (heads * (nope + value), kv_rank)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, heads * value)
        if layer < config["first_k_dense_replace"]:
            shapes.update(_mlp_shapes(prefix + "mlp.", hidden, config["intermediate_size"]))
            continue
        shapes[prefix + "mlp.gate.weight"] = (experts, hidden)
        shapes[prefix + "mlp.gate.e_score_correction_bias"] = (experts,)
        shared = expert_size * config["n_shared_experts"]
        shapes.update(_mlp_shapes(prefix + "mlp.shared_experts.", hidden, shared))
        for expert in range(experts):
            shapes.update(_mlp_shapes(f"{prefix}mlp.experts.{expert}.", hidden, expert_size))
    return shapes


def _kimi_vision_shapes(config: dict[str, Any]) -> Shapes:
    """Return name -> shape of the vision tower and projector, by their checkpoint names.

    `mm_projector.proj.0` and `.2` are what vLLM calls `linear_1` and `linear_2`.
    """
    width, inner, patch = config["hidden_size"], config["intermediate_size"], config["patch_size"]
    merged = width * math.prod(config["merge_kernel_size"])
    position = (config["init_pos_emb_height"], config["init_pos_emb_width"], width)
    shapes: Shapes = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": position,
    }
    affine: list[tuple[str, tuple[int, ...], int]]
    affine = [("vision_tower.encoder.final_layernorm", (width,), width)]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"vision_tower.encoder.blocks.{layer}."
        affine += [
            (prefix + "norm0", (width,), width),
            (prefix + "norm1", (width,), width),
            (prefix + "wqkv", (3 * width, width), 3 * width),
            (prefix + "wo", (width, width), width),
            (prefix + "mlp.fc0", (inner, width), inner),
            (prefix + "mlp.fc1", (width, inner), width),
        ]
    affine += [
        ("mm_projector.pre_norm", (width,), width),
        ("mm_projector.proj.0", (merged, merged), merged),
        ("mm_projector.proj.2", (config["mm_hidden_size"], merged), config["mm_hidden_size"]),
    ]
    for name, weight, bias in affine:
        shapes[name + ".weight"] = weight
        shapes[name + ".bias"] = (bias,)
    return shapes


def _outer_shapes(config: dict[str, Any]) -> Shapes:
    """Return name -> shape of what stands around the decoder layers."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def _mlp_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    """Return name -> shape of one gated MLP."""
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


# --------------------------------------------------------------------------- weights and files


def _draw(shapes: Shapes, seed: int) -> dict[str, Tensor]:
    """Draw float32 tensors, scaled so that every layer moves the residual stream visibly."""
    import torch

    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        # crc32, not hash(): hash() of a string differs from process to process.
        generator = torch.Generator().manual_seed((seed << 32) + zlib.crc32(name.encode()))
        noise = torch.randn(shape, generator=generator, dtype=torch.float32)
        if name.endswith("e_score_correction_bias"):
            # Not negative: transformers masks the losing groups with 0, vLLM with -inf, and
            # those agree only while every score plus bias is above 0.
            tensor = 0.1 * noise.abs()
        elif name.endswith(".bias"):
            tensor = 0.1 * noise
        elif len(shape) == 1:  # a norm's weight
            tensor = 1.0 + 0.1 * noise
        elif name.endswith(("embed_tokens.weight", "pos_emb.weight")):
            tensor = noise
        else:
            # The router's logits are spread wide so that its choices are not close calls.
            gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
            tensor = noise * (gain / math.sqrt(math.prod(shape[1:])))
        tensors[name] = tensor.contiguous()
    return tensors


def _language_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the `language_model.` tensors of a wrapper checkpoint, without that prefix."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return {
        name.removeprefix(LANGUAGE_PREFIX): tensor
        for name, tensor in tensors.items()
        if name.startswith(LANGUAGE_PREFIX)
    }


def _write(
    folder: str | os.PathLike[str], config: dict[str, Any], tensors: dict[str, Tensor]
) -> Path:
    """Write config, weights and tokenizer, and return the folder."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    _write_weights(path, config, tensors)
    write_tokenizer(path)
    return path


def _write_weights(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors."""
    from safetensors.torch import save_file

    _write_json(path / "config.json", config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(path: Path) -> None:
    """Write a byte-level tokenizer without merges: 8 special ids, 256 bytes, spare ids to 512."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    byte_tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *byte_tokens]
    # Every id the model can score has a token, so that any prompt of ids can be turned to text.
    tokens += [f"<spare{index}>" for index in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    # Written by hand: transformers 5 would name a class here that transformers 4 lacks.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[BOS],
        "eos_token": SPECIAL_TOKENS[EOS],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": list(SPECIAL_TOKENS[MEDIA_PAD:]),
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    _write_json(path / "tokenizer_config.json", settings)


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


# --------------------------------------------------------------------------- Kimi's own code

_CONFIG_CODE = '''\
"""Config of the tiny Kimi-K2.5 checkpoint (transformers does not know this model type)."""

from transformers import DeepseekV3Config, PretrainedConfig


class KimiK25VisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiK25Config(PretrainedConfig):
    model_type = "kimi_k25"
    sub_configs = {"text_config": DeepseekV3Config, "vision_config": KimiK25VisionConfig}

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        if not isinstance(text_config, PretrainedConfig):
            text_config = DeepseekV3Config(**(text_config or {}))
        if not isinstance(vision_config, PretrainedConfig):
            vision_config = KimiK25VisionConfig(**(vision_config or {}))
        self.text_config = text_config
        self.vision_config = vision_config
        super().__init__(**kwargs)
'''

_IMAGE_PROCESSOR_CODE = '''\
"""Image processor of the tiny Kimi-K2.5 checkpoint: every frame becomes 4 x 4 patches."""

import numpy as np
import torch
from transformers import BaseImageProcessor, BatchFeature

GRID = 4  # patches per side; a 2 x 2 merge leaves 4 media tokens per chunk


class KimiK25ImageProcessor(BaseImageProcessor):
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
        return [
            {"type": "video_chunk", "video_chunk": frames[start : start + step]}
            for start in range(0, len(frames), step)
        ]

    def _patches(self, frame):
        side = GRID * self.patch_size
        pixels = np.asarray(frame.convert("RGB").resize((side, side)), dtype=np.float32)
        pixels = torch.from_numpy(pixels / 127.5 - 1.0)
        grid = pixels.view(GRID, self.patch_size, GRID, self.patch_size, 3)
        return grid.permute(0, 2, 4, 1, 3).reshape(-1, 3, self.patch_size, self.patch_size)

    def preprocess(self, medias, return_tensors=None, **kwargs):
        """Return pixel_values [patches, 3, patch, patch] and grid_thws [medias, 3]."""
        pixels, grids = [], []
        for media in medias:
            frames = [media["image"]] if media["type"] == "image" else media["video_chunk"]
            pixels += [self._patches(frame) for frame in frames]
            grids.append([len(frames), GRID, GRID])
        data = {"pixel_values": torch.cat(pixels), "grid_thws": torch.tensor(grids)}
        return BatchFeature(data=data)
'''


def main(argv: Sequence[str] | None = None) -> None:
    """Build one kind into one folder."""
    parser = argparse.ArgumentParser(description="Build a tiny checkpoint with random weights.")
    parser.add_argument("kind", choices=sorted(KINDS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, help="number of decoder layers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    extra = {} if args.layers is None else {"num_layers": args.layers}
    print(KINDS[args.kind](args.folder, seed=args.seed, **extra))


if __name__ == "__main__":
    main()
