"""What a model's ``config.json`` says, read as plain data: no transformers, no code of the model's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..layer_ids import BOUNDARY, convention_of

if TYPE_CHECKING:
    from packaging.version import Version

#: Where wrappers keep the config of their text decoder, outermost first.
TEXT_CONFIGS = (
    "thinker_config",
    "text_config",
    "language_config",
    "llm_config",
    "decoder_config",
    "language_model_config",
)
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts")
_OTHER_TOWERS = (
    "vision_config",
    "audio_config",
    "visual",
    "vision_tower_config",
    "vit_config",
    "speech_config",
)
BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
#: Where decoder layers are in wrappers that :data:`KNOWN_PATHS` cannot be chosen from by traits alone.
_PATHS = {
    "KimiK25ForConditionalGeneration": "language_model.model.layers",
    "GPT2LMHeadModel": "transformer.h",
    "BloomForCausalLM": "transformer.h",
    "FalconForCausalLM": "transformer.h",
    "GPTJForCausalLM": "transformer.h",
    "GPTNeoXForCausalLM": "gpt_neox.layers",
    "OPTForCausalLM": "model.decoder.layers",
    "MambaForCausalLM": "backbone.layers",
    "Mamba2ForCausalLM": "backbone.layers",
    "ChatGLMModel": "transformer.encoder.layers",
    "MPTForCausalLM": "transformer.blocks",
    "DbrxForCausalLM": "transformer.blocks",
    "Qwen2_5OmniModel": "thinker.language_model.model.layers",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The innermost text decoder's part of a config; the config itself where it is not nested."""
    for name in TEXT_CONFIGS:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            deeper = text_config(inner)
            if _first(deeper, _LAYERS) is not None:
                return deeper
    return config


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = config.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model, from its config alone.

    Attributes:
        config: all of ``config.json``.
    """

    config: Mapping[str, Any]

    @cached_property
    def text(self) -> Mapping[str, Any]:
        return text_config(self.config)

    @cached_property
    def architectures(self) -> tuple[str, ...]:
        names = self.config.get("architectures")
        return tuple(n for n in names if isinstance(n, str)) if isinstance(names, list) else ()

    @property
    def architecture(self) -> str:
        return self.architectures[0] if self.architectures else ""

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def layers(self) -> int | None:
        return _first(self.text, _LAYERS)

    @property
    def hidden_size(self) -> int | None:
        return _first(self.text, _HIDDEN)

    @property
    def heads(self) -> int | None:
        return _first(self.text, _HEADS)

    @property
    def kv_heads(self) -> int | None:
        kv = _first(self.text, _KV_HEADS)
        if kv is None and self.text.get("multi_query") is True:
            return 1
        return kv if kv is not None else self.heads

    @property
    def head_dim(self) -> int | None:
        given = _first(self.text, ("head_dim", "attention_head_dim"))
        if given is None and self.hidden_size and self.heads:
            return self.hidden_size // self.heads
        return given

    @property
    def experts(self) -> int | None:
        experts = _first(self.text, _EXPERTS)
        return experts if experts and experts > 1 else None

    @property
    def vocab_size(self) -> int | None:
        inner = _first(self.text, ("vocab_size", "padded_vocab_size"))
        return inner if inner is not None else _first(self.config, ("vocab_size",))

    @property
    def max_positions(self) -> int | None:
        """The longest sequence by the config, as vLLM derives it, scaling included."""
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
        positions = _first(self.text, names)
        scaling = self.text.get("rope_scaling") or self.text.get("rope_parameters")
        if positions is None or not isinstance(scaling, Mapping):
            return positions
        kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
        if kind in ("su", "longrope", "llama3", "mrope", "default", None) or not isinstance(
            factor, (int, float)
        ):
            return positions
        if kind == "yarn":
            positions = _first(scaling, ("original_max_position_embeddings",)) or positions
        return int(positions * factor)

    @property
    def dtype(self) -> str | None:
        for config in (self.text, self.config):
            for name in ("dtype", "torch_dtype"):
                value = config.get(name)
                if isinstance(value, str) and value != "auto":
                    return value.removeprefix("torch.")
        return None

    @cached_property
    def quantization(self) -> Mapping[str, Any] | None:
        for config in (self.config, self.text):
            for name in ("quantization_config", "compression_config"):
                value = config.get(name)
                if isinstance(value, Mapping):
                    return value
        return None

    @property
    def quant_method(self) -> str | None:
        quantization = self.quantization
        return (
            None if quantization is None else str(quantization.get("quant_method", "")).lower() or "unnamed"
        )

    @property
    def is_mla(self) -> bool:
        return _first(self.text, ("kv_lora_rank",)) is not None and self.text.get("kv_lora_rank") is not None

    @property
    def is_multimodal(self) -> bool:
        return any(isinstance(self.config.get(name), Mapping) for name in _OTHER_TOWERS) or any(
            isinstance(self.config.get("thinker_config", {}), Mapping)
            and isinstance(self.config.get("thinker_config", {}).get(name), Mapping)
            for name in _OTHER_TOWERS
        )

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers are no softmax attention over everything (state space, linear attention)."""
        text = self.text
        kinds = text.get("layer_types") or text.get("layers_block_type")
        other = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid"}
        if isinstance(kinds, list) and other & {str(kind) for kind in kinds}:
            return True
        return any(
            text.get(name)
            for name in (
                "mamba_d_state",
                "ssm_state_size",
                "linear_num_value_heads",
                "hybrid_override_pattern",
                "linear_attn_config",
            )
        )

    @property
    def traits(self) -> list[str]:
        """A few words each, for the report."""
        words = []
        if self.experts:
            words.append(f"{self.experts} experts")
        words += [
            word
            for word, there in (
                ("MLA", self.is_mla),
                ("hybrid", self.is_hybrid),
                ("multimodal", self.is_multimodal),
            )
            if there
        ]
        if self.quant_method:
            words.append(f"quantized ({self.quantization_name})")
        return words

    @property
    def quantization_name(self) -> str:
        """The quantization with its bits, where the config tells: ``compressed-tensors, 4-bit int``."""
        quantization = self.quantization or {}
        for group in _values(quantization.get("config_groups")):
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if isinstance(weights, Mapping) and weights.get("num_bits"):
                return f"{self.quant_method}, {weights['num_bits']}-bit {weights.get('type', '')}".rstrip()
        bits = quantization.get("bits")
        return f"{self.quant_method}, {bits}-bit" if isinstance(bits, int) else str(self.quant_method)

    @property
    def weight_block(self) -> int | None:
        """Into how long pieces quantization cuts a weight's input dimension, if it does."""
        quantization = self.quantization or {}
        block = quantization.get("weight_block_size")
        if isinstance(block, list) and block and all(isinstance(b, int) for b in block):
            return int(max(block))
        for group in _values(quantization.get("config_groups")):
            weights = group.get("weights") if isinstance(group, Mapping) else None
            if (
                isinstance(weights, Mapping)
                and isinstance(weights.get("group_size"), int)
                and weights["group_size"] > 0
            ):
                return int(weights["group_size"])
        size = quantization.get("group_size")
        return size if isinstance(size, int) and size > 0 else None

    @property
    def layer_path(self) -> str | None:
        """Where the decoder layers are expected in vLLM's module; the loaded model decides."""
        if self.architecture in _PATHS:
            return _PATHS[self.architecture]
        if "thinker_config" in self.config:
            return "thinker.language_model.model.layers"
        if self.is_multimodal:
            return "language_model.model.layers"
        return "model.layers"

    @property
    def auto_map(self) -> Mapping[str, Any]:
        value = self.config.get("auto_map")
        return value if isinstance(value, Mapping) else {}


def default_layer_ids(layers: int, speculators: Version | None = None) -> list[int]:
    """The layers that the generator captures where none are named, each by the layer that is left.

    Args:
        speculators: what is installed; its trainer expects other layers from 0.5 on.
    """
    if speculators is not None and convention_of(str(speculators)) == BOUNDARY:
        return [1, layers // 2 - 1, layers - 4, layers - 1]  # boundaries 2, n // 2, n - 3 and n
    return [2, layers // 2, layers - 3, layers - 1]


def _values(mapping: Any) -> Iterator[Any]:
    return iter(mapping.values()) if isinstance(mapping, Mapping) else iter(())
