"""Models, data and a vLLM made of a few files, and one check at a time on them."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import Version

from speculators_compat.detect import Installed
from speculators_compat.doctor import CHECKS, Options, Result
from speculators_compat.doctor.base import perform
from speculators_compat.doctor.context import Context

KIMI = Path(__file__).parent / "fixtures" / "kimi_k25"
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 8,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
REGISTRY = """\
import sys
_TEXT_GENERATION_MODELS = {
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("mistral", "MistralForCausalLM"),
    "PlainForCausalLM": ("plain", "PlainForCausalLM"),
    "FarForCausalLM": ("vllm.models.far", "FarForCausalLM"),
    "LostForCausalLM": ("nowhere", "LostForCausalLM"),
}
_MULTIMODAL_MODELS: dict = {"KimiK25ForConditionalGeneration": ("plain", "KimiK25ForConditionalGeneration")}
_SPECULATIVE_DECODING_MODELS = {"EagleLlama": ("llama_eagle", "EagleLlama")}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS}
_PREVIOUSLY_SUPPORTED_MODELS = {"MotifForCausalLM": "0.10.2"}
raise RuntimeError("imported")
"""


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def fake_vllm(folder: Path) -> Path:
    """A vLLM that can be read, and raises when it is imported."""
    models = "model_executor/models"
    return write(
        folder / "vllm",
        {
            "__init__.py": "raise RuntimeError('imported')",
            "envs.py": 'names = {"VLLM_USE_V1": 1, "VLLM_ATTENTION_BACKEND": 2, "VLLM_PLUGINS": 3}',
            "transformers_utils/config.py": '_CONFIG_REGISTRY = Lazy(\n    kimi_k25="KimiK25Config",\n)\n',
            f"{models}/registry.py": REGISTRY,
            f"{models}/llama.py": "class LlamaForCausalLM(Module, SupportsEagle3): ...",
            f"{models}/mistral.py": (
                "from .llama import LlamaForCausalLM as Llama\nclass MistralForCausalLM(Llama): ..."
            ),
            f"{models}/plain.py": (
                "class PlainForCausalLM(Module): ...\nclass "
                "KimiK25ForConditionalGeneration(PlainForCausalLM): ..."
            ),
            "models/far/__init__.py": "from .model import FarForCausalLM",
            "models/far/model.py": "class Base(SupportsEagle3): ...\nclass FarForCausalLM(Base): ...",
            "model_executor/layers/quantization/__init__.py": (
                'QuantizationMethods = Literal["awq", "fp8", "compressed-tensors"]'
            ),
        },
    )


def installed(vllm: Path | None, distribution: str = "vllm") -> dict[str, Installed]:
    location = None if vllm is None else str(vllm)
    version = Version("0.16.0")
    return {"vllm": Installed("vllm", distribution, version, str(version), location, None)}


def tensors(names: Mapping[str, list[int]], dtype: str = "BF16") -> bytes:
    """A whole safetensors file with two-byte values."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in names.items():
        count = 2
        for extent in shape:
            count *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + count]}
        end += count
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def make_model(folder: Path, config: Mapping[str, Any] | None = None, *, shards: int = 2) -> Path:
    """A model folder with nothing wrong in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**LLAMA, **(config or {})}))
    vocab = {f"t{k}": k for k in range(200)}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": [{"id": 200, "content": "<s>"}]}
        )
    )
    (folder / "tokenizer_config.json").write_text("{}")
    weight_map = {}
    for number in range(1, shards + 1):
        name = f"model-{number:05}-of-{shards:05}.safetensors"
        content = {f"w{number}.a": [4, 4], f"w{number}.b": [2]}
        (folder / name).write_bytes(tensors(content))
        weight_map.update(dict.fromkeys(content, name))
    index = {"metadata": {"total_size": 36 * shards}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def run(id: str, vllm: Path | None = None, *, distribution: str = "vllm", **options: Any) -> Result:
    """Make one check. What it may print must be complete, and fit one line each."""
    options = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
    result = perform(CHECKS[id], Context(Options(**options), installed(vllm, distribution)))
    outcome = result.outcome
    assert outcome.found
    assert result.seconds >= 0
    told = [outcome.expected, outcome.why, outcome.mend]
    assert all(told) if result.status in ("warning", "failed") else not any(told)
    assert result.to_json()["title"]
    return result


GOOD_LINES: list[Any] = [
    {"input_ids": list(range(k, k + 4)), "loss_mask": [0, 1, 1, 1]} for k in range(1, 21)
]
