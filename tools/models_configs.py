"""Tiny configs for vLLM's architectures; imported in a vLLM environment.

:func:`plan` gives, for an architecture, a ``config.json`` of a model small enough for one CPU core, and the name of the
transformers class of the same architecture where there is one. The config comes from the model's own config class -
transformers' or vLLM's - shrunk by the sizes in :data:`SIZES`; architectures whose class exists only as code in a
checkpoint get a class that takes every size and switch that vLLM's implementation reads (:data:`GENERIC`).
"""

from __future__ import annotations

import contextlib
import inspect
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 512
LAYERS = 4
HIDDEN = 128
#: What a size is called in configs, and what it becomes. Head size 32: CPU attention kernels know 32 and 64.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim"), HIDDEN),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "attention_head_dim", "global_head_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "mlp_hidden_size", "feed_forward_size"), 256),
    **dict.fromkeys(("intermediate_size_mlp", "shared_expert_intermediate_size", "dense_intermediate_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "moe_top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_groups"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"), 1024),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id", "eod_token_id"), 1),
    "image_token_id": 9,
    "image_token_index": 9,
    "video_token_id": 10,
    "audio_token_id": 11,
    "audio_token_index": 11,
    "vision_start_token_id": 12,
    "vision_end_token_id": 13,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "sliding_window": 16,
    "attention_window_size": 16,
    "sliding_window_size": 16,
    "attention_chunk_size": 128,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
    "expert_layer_period": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_dt_rank": 8,
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "mamba_headdim": 32,
    "n_mamba_heads": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "time_step_rank": 8,
    "chunk_size": 32,
    "mamba_chunk_size": 32,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "conv_L_cache": 3,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
    "rotary_dim": 32,
    "lru_width": 128,
    "word_embed_proj_dim": HIDDEN,
    "ffn_dim": 256,
    "block_ff_dim": 256,
    "block_dim": HIDDEN,
    "patch_size": 14,
    "image_size": 56,
    "torch_dtype": "float32",
    "dtype": "float32",
}
#: Sizes of towers beside the text decoder, which are not built.
TOWER = {
    **SIZES,
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers", "n_layers"), 2),
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "encoder_embed_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 64),
    "num_key_value_heads": 2,
    "out_hidden_size": HIDDEN,
    "projection_dim": HIDDEN,
    "vision_output_dim": HIDDEN,
    "text_hidden_size": HIDDEN,
    "num_experts": 2,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
}
TOWERS = ("vision", "audio", "visual", "vit", "speech", "projector", "image", "video", "talker", "code2wav", "dac")
#: Where hybrids keep the kinds of their layers, as a pattern rather than a list by layer.
PATTERNS = {"hybrid_override_pattern": "M*-M", "layers_block_type": None, "block_types": None}

#: What vLLM's implementations read from configs of classes that exist only as code in a checkpoint.
GENERIC: dict[str, Any] = {
    **SIZES,
    "hidden_act": "silu",
    "hidden_activation": "silu",
    "activation_function": "silu",
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "norm_epsilon": 1e-5,
    "initializer_range": 0.02,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "qkv_bias": False,
    "mlp_bias": False,
    "bias": False,
    "use_qk_norm": False,
    "use_cache": True,
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "partial_rotary_factor": 1.0,
    "attention_dropout": 0.0,
}
for _name in ("sliding_window", "sliding_window_size", "attention_window_size", "q_lora_rank", "kv_lora_rank"):
    GENERIC.pop(_name, None)
for _name in [n for n in GENERIC if n.startswith(("index_", "mamba_", "linear_", "ssm_"))]:
    GENERIC.pop(_name)
for _name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "image_token_id"):
    GENERIC.pop(_name, None)


#: What vLLM's implementations read from wrappers whose config class exists only as code in a checkpoint.
WRAPPER: dict[str, Any] = {
    "image_token_id": 9,
    "image_token_index": 9,
    "video_token_id": 10,
    "audio_token_id": 11,
    "image_seq_length": 16,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
    "projector_hidden_act": "gelu",
    "projector_type": "mlp",
    "multimodal_projector_bias": True,
    "spatial_merge_size": 2,
    "downsample_ratio": 0.5,
    "select_layer": -1,
    "ps_version": "v2",
    "vision_config": {
        **TOWER,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "drop_path_rate": 0.0,
        "hidden_act": "gelu",
        "initializer_factor": 1.0,
        "in_channels": 3,
        "layer_norm_eps": 1e-6,
        "num_channels": 3,
        "norm_type": "layer_norm",
        "qk_normalization": False,
        "qkv_bias": True,
        "rms_norm_eps": 1e-6,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "use_bias": False,
        "window_size": 28,
    },
}


@dataclass
class Plan:
    """How a tiny model of an architecture is made.

    Attributes:
        config: for ``config.json``; complete, ``architectures`` included.
        transformers: class of the same architecture in transformers, whose random weights and states are used.
        twin: class in transformers of the same text decoder, where the architecture itself has none there.
        reference: config for that class; its own config file's if empty.
        prefix: what the checkpoint's names have before the twin's.
        renames: texts to replace in the twin's names.
        tokens: special tokens that the model asks its tokenizer for.
        files: other files of the checkpoint, by name; their content is JSON.
        env: environment variables of vLLM's.
        differs: why vLLM computes something else than transformers, where that is known.
        lengths: of the prompts, where this vLLM cannot run the usual ones on a CPU.
        aids: what stands in for parts that the CPU build lacks, see ``models_cell.AIDS``.
        code: whether the config class must come as code beside the config.
        args: arguments for vLLM.
        note: where the config comes from.
    """

    config: dict[str, Any]
    transformers: str = ""
    twin: str = ""
    reference: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    renames: list[list[str]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    differs: str = ""
    lengths: list[int] = field(default_factory=list)
    aids: list[str] = field(default_factory=list)
    code: bool = False
    args: dict[str, Any] = field(default_factory=dict)
    note: str = ""


class NoPlan(Exception):
    """No config can be made; the text says why."""


def _load_special() -> dict[str, dict[str, Any]]:
    return dict(json.loads((Path(__file__).parent / "models_special.json").read_text()))


SPECIAL = _load_special()


def plan(architecture: str) -> Plan:
    """The plan for an architecture of this vLLM's registry.

    Raises:
        NoPlan: there is no config class and no entry in ``models_special.json``.
    """
    special = SPECIAL.get(architecture, {})
    if _vllm() < 20:  # with transformers 4
        special = {**special, **special.get("old", {})}
    made = _plan(architecture, special)
    made.renames = special.get("renames", made.renames)
    made.tokens = special.get("tokens", made.tokens)
    made.files = special.get("files", made.files)
    made.env = special.get("env", made.env)
    made.differs = special.get("differs", made.differs)
    made.lengths = special.get("lengths", made.lengths)
    made.aids = special.get("aids", made.aids)
    for name in special.get("drop", ()):
        made.config.pop(name, None)
    large = [size for size in _values(made.config, "hidden_size") if size > 1024]
    if large:
        raise NoPlan(f"its config class does not become small: hidden size {large[0]}")
    return made


def _values(config: dict[str, Any], name: str) -> list[int]:
    """All integers of that name in a config and its sub-configs."""
    found = [config[name]] if isinstance(config.get(name), int) else []
    return found + [n for inner in config.values() if isinstance(inner, dict) for n in _values(inner, name)]


def _plan(architecture: str, special: dict[str, Any]) -> Plan:
    like = special.get("like")
    if like:
        made = plan(like)
        made.config = {**made.config, "architectures": [architecture], **special.get("set", {})}
        made.transformers = special.get("transformers", "" if "transformers" in special else made.transformers)
        return made
    if "skip" in special:
        raise NoPlan(special["skip"])
    model_type = special.get("model_type") or _model_type(architecture)
    if model_type is None and "otherwise" in special:
        return _plan(architecture, special["otherwise"])
    if "wraps" in special:
        inner = plan(special["wraps"])
        text = {**inner.config, **special.get("text", {})}
        config = {**WRAPPER, special.get("as", "text_config"): text, **special.get("put", {})}
        config.update(model_type=special.get("model_type", "generic"), architectures=[architecture])
        config["torch_dtype"] = "float32"
        return Plan(
            config,
            twin=special.get("twin", inner.transformers or inner.twin),
            reference=_merged({**text, **inner.reference}, special.get("reference", {})),
            prefix=special.get("prefix", "language_model."),
            code=not special.get("known"),
            args={**inner.args, **special.get("args", {})},
            note=f"a wrapper of {special['wraps']}",
        )
    if "generic" in special and (special.get("code") or model_type is None):
        config = {**GENERIC, **special["generic"], "model_type": special.get("model_type", "generic")}
        made = Plan(config, code=True, note="sizes that vLLM reads")
    elif model_type is not None:
        kind = _config_class(model_type, upstream=special.get("upstream", False))
        known = _parameters(kind)
        put = {**{k: v for k, v in special.get("generic", {}).items() if k in known}, **special.get("set", {})}
        made = Plan(shrunk(kind, put), note=f"config class of {model_type}")
        made.config.update({k: v for k, v in special.get("generic", {}).items() if k not in known})
        made.config["model_type"] = model_type
        made.transformers = special.get("transformers", _transformers_class(architecture))
    else:
        raise NoPlan("its config class exists only as code in a checkpoint, and is not described here")
    made.config.update(architectures=[architecture], torch_dtype="float32")
    made.config.update(special.get("put", {}))
    made.args.update(special.get("args", {}))
    made.prefix = special.get("prefix", "")
    if "twin" in special:
        made.transformers, made.twin = "", special["twin"]
        text = made.config.get(special.get("as", "text_config"), {})
        made.reference = _merged(text or made.config, special.get("reference", {}))
    elif special.get("reference"):
        made.reference = _merged(made.config, special["reference"])
    return made


def _vllm() -> int:
    """The minor version of this vLLM."""
    import vllm

    return int(vllm.__version__.split(".")[1])


def _merged(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A config with changes; a dotted name reaches into a sub-config."""
    made = dict(config)
    for name, value in changes.items():
        outer, _, inner = name.partition(".")
        made[outer] = _merged(made[outer], {inner: value}) if inner else value
    return made


def _model_type(architecture: str) -> str | None:
    """The model type whose config class goes with the architecture."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    found = []
    for name in dir(modeling_auto):
        if name.endswith("_MAPPING_NAMES"):
            for model_type, names in getattr(modeling_auto, name).items():
                if architecture in (names if isinstance(names, (list, tuple)) else (names,)):
                    found.append(model_type)
    whole = [t for t in found if t in CONFIG_MAPPING_NAMES and not t.endswith("_text")]
    # llama rather than code_llama, gpt2 rather than gpt-sw3
    return min(whole or found, key=len, default=None)


def _transformers_class(architecture: str) -> str:
    import transformers

    return architecture if hasattr(transformers, architecture) else ""


def _config_class(model_type: str, upstream: bool = False) -> Any:
    """vLLM's config class where it has one, unless transformers' is asked for."""
    from transformers import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    with_code = _CONFIG_REGISTRY
    if model_type in with_code and not upstream:
        return with_code[model_type]
    return CONFIG_MAPPING[model_type]


def _parameters(kind: Any) -> set[str]:
    names = {n for n, p in inspect.signature(kind.__init__).parameters.items() if p.kind is not p.VAR_KEYWORD}
    return (names | set(getattr(kind, "__dataclass_fields__", {}))) - {"self", "args"}


def shrunk(kind: Any, put: dict[str, Any], tower: bool = False) -> dict[str, Any]:
    """A config of a class, all sizes small, its sub-configs too.

    Args:
        put: values by name; a dotted name reaches into a sub-config.
    """
    from transformers import AutoConfig

    sizes = TOWER if tower else SIZES
    names = _parameters(kind)
    reverse = dict(getattr(kind, "attribute_map", None) or {})
    # A size may be known by its general name only (``hidden_size`` for ``n_embd``).
    wanted: dict[str, Any] = {n: sizes[n] for n in names if n in sizes}
    wanted.update({old: sizes[new] for new, old in reverse.items() if new in sizes and old in names - wanted.keys()})
    for name in ("q_lora_rank", "sliding_window", "index_topk", "kv_lora_rank", "rotary_dim"):
        default = _default(kind, name)
        if name in wanted and default in (None, False):
            wanted.pop(name)
    if "kv_lora_rank" in wanted and "num_key_value_heads" in names:
        wanted["num_key_value_heads"] = sizes["num_attention_heads"]
    for name, pattern in PATTERNS.items():
        if name in names and pattern is not None:
            wanted[name] = pattern
    for name, inner in (getattr(kind, "sub_configs", None) or {}).items():
        nested = {k.partition(".")[2]: v for k, v in put.items() if k.startswith(name + ".")}
        if inner is AutoConfig:  # any class will do: the one that this class takes by itself
            with contextlib.suppress(Exception):
                nested.setdefault("model_type", getattr(kind(), name).model_type)
        if name == "text_config" or name == "vision_config" or name in names:
            made = _sub_config(inner, nested, tower or any(word in name for word in TOWERS))
            if made is not None:
                wanted[name] = made
    # A name that this release's class does not know (transformers 4 and 5 differ) is left out.
    wanted.update({k: v for k, v in put.items() if "." not in k and (k in names or not k.startswith("rope_"))})
    try:
        made = kind(**wanted).to_dict()
    except Exception as error:
        raise NoPlan(f"{kind.__name__} refuses small sizes: {type(error).__name__}: {error}") from error
    made.pop("transformers_version", None)
    return _fitted(made, tower)


def _sub_config(kind: Any, put: dict[str, Any], tower: bool) -> dict[str, Any] | None:
    from transformers import AutoConfig, PretrainedConfig

    if kind is AutoConfig or not hasattr(kind, "to_dict"):
        model_type = put.get("model_type")
        if model_type is None:
            return None
        kind = _config_class(model_type)
        made = shrunk(kind, {k: v for k, v in put.items() if k != "model_type"}, tower)
    else:
        made, model_type = shrunk(kind, put, tower), getattr(kind, "model_type", "")
    common = set(PretrainedConfig().to_dict()) - _parameters(kind)  # some classes refuse them
    made = {k: v for k, v in made.items() if k not in common}
    if not tower and _vllm() < 20:  # transformers 5 finds it by the type
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            made.setdefault("architectures", [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]])
    return {**made, "model_type": model_type} if model_type else made


def _default(kind: Any, name: str) -> Any:
    parameter = inspect.signature(kind.__init__).parameters.get(name)
    if parameter is not None and parameter.default is not inspect.Parameter.empty:
        return parameter.default
    return getattr(kind, name, "unknown")


def _fitted(config: dict[str, Any], tower: bool) -> dict[str, Any]:
    """Lists by layer get the right length; layers of every kind that the model has stay where there is room."""
    counts = (config.get(n) for n in ("num_hidden_layers", "n_layer", "num_layers"))
    layers = next((count for count in counts if isinstance(count, int)), 0)
    for name, value in list(config.items()):
        by_layer = name in ("layer_types", "mlp_layer_types", "layers_block_type", "no_rope_layers", "block_types")
        if by_layer and isinstance(value, list) and layers and len(value) != layers:
            kinds = list(dict.fromkeys(value))
            config[name] = (kinds + value[len(kinds) :] + kinds * layers)[:layers]
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict) and "mrope_section" in value:
            half = int(16 * value.get("partial_rotary_factor", 1.0))  # of a head of 32
            if sum(value["mrope_section"]) != half:
                config[name] = {**value, "mrope_section": [half // 4, half * 3 // 8, half * 3 // 8]}
        if name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY and not tower:
            config[name] = 9
    return config


CODE = '''\
"""Config of a tiny model whose own config class exists only as code in a checkpoint."""

from transformers import CONFIG_MAPPING, PretrainedConfig


def inner(value):
    kind = CONFIG_MAPPING[value["model_type"]] if value.get("model_type") in CONFIG_MAPPING else Inner
    return kind(**value)


class GenericConfig(PretrainedConfig):
    model_type = "{model_type}"

    def __init__(self, **kwargs):
        for name, value in list(kwargs.items()):
            if name.endswith("_config") and isinstance(value, dict) and name not in ("quantization_config",):
                kwargs[name] = inner(value)
            if name == "block_configs":
                kwargs[name] = [Block({{n: Block(v) for n, v in block.items()}}) for block in value]
        super().__init__(**kwargs)
        for name, value in kwargs.items():
            if not hasattr(self, name):
                setattr(self, name, value)

    def get_text_config(self, *args, **kwargs):
        return getattr(self, "language_config", None) or super().get_text_config(*args, **kwargs)


class Inner(GenericConfig):
    pass


class Block(dict):
    """A dictionary whose entries are attributes too, and that is JSON all the same."""

    def __getattr__(self, name):
        if name not in self:
            raise AttributeError(name)
        return self[name]
'''


def write(folder: Path, made: Plan) -> None:
    """Write the config, and its class where it needs one."""
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(made.config)
    if made.code:
        config["auto_map"] = {"AutoConfig": "configuration_tiny.GenericConfig"}
        (folder / "configuration_tiny.py").write_text(CODE.format(model_type=config["model_type"]))
    for name, content in {"config.json": config, **made.files}.items():
        (folder / name).write_text(json.dumps(content, indent=1, default=str))
