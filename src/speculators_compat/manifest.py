"""What a data set says about itself: which model, which layers, made how.

Fingerprints are cheap: of weights, names, sizes and headers are read, never all of the data.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .layer_ids import AFTER_LAYER

BEFORE_NORM = "before final norm"
AFTER_NORM = "after final norm"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tiktoken.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
WEIGHT_ENDINGS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
#: Of weights that are no safetensors files, this much is read from either end.
EDGE = 2**16
#: A longer safetensors header is no header.
MAX_HEADER = 2**27


def weights_fingerprint(folder: Path) -> str | None:
    """Of names, sizes and headers (safetensors: tensor names, types, shapes; else the first and last bytes)."""
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_ENDINGS and path.is_file())
    index = folder / "model.safetensors.index.json"
    digest = hashlib.blake2b(digest_size=32)
    for path in [*files, *([index] if index.is_file() else [])]:
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with open(path, "rb") as stream:
            if path.suffix == ".safetensors" and size > 8:
                head = stream.read(8)
                (length,) = struct.unpack("<Q", head)
                digest.update(head + stream.read(min(length, MAX_HEADER)))
                # Headers of two checkpoints of one architecture are alike; a little data tells them apart.
                digest.update(stream.read(EDGE))
            elif path == index:
                digest.update(stream.read())
            else:
                digest.update(stream.read(EDGE))
            if size > 2 * EDGE:
                stream.seek(-EDGE, 2)
                digest.update(stream.read())
    return digest.hexdigest() if files else None


def tokenizer_hash(folder: Path) -> str | None:
    """Of the tokenizer's files; ``None`` without any."""
    digest = hashlib.sha256()
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    for path in files:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest() if files else None


def number_of_layers(config: dict[str, Any]) -> int | None:
    """Decoder layers by a model's config."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            if isinstance(source.get(name), int):
                return int(source[name])
    return None


def describe_layers(layer_ids: Sequence[int], num_layers: int | None, *, final_norm: bool) -> list[dict[str, Any]]:
    """Each captured layer in both conventions, in the order of the data."""
    return [
        {
            AFTER_LAYER: k,
            "boundary": k + 1,
            "state": AFTER_NORM if final_norm and k + 1 == num_layers else BEFORE_NORM if k + 1 == num_layers else "",
        }
        for k in layer_ids
    ]


def describe_run(generator: Any, **more: Any) -> dict[str, Any]:
    """What the manifest tells about a run, beside the settings that decide the values."""
    from . import settings
    from .activation import status

    state = status()
    current = settings.current()
    session = getattr(generator, "session", None)
    report = dict(getattr(session, "report", {}))
    ids = getattr(generator, "layer_ids", None)
    vllm = getattr(generator, "vllm_config", None)
    model = getattr(vllm, "model_config", None)
    facts: dict[str, Any] = {
        "layer_ids": ids,
        "matrix_row": state.row,
        "way": state.way,
        "adapters": {adapter.id: str(adapter.state) for adapter in state.adapters},
        "vllm_args": current.vllm_args,
        "captured": report,
        **more,
    }
    if ids is not None:
        facts["layer_convention"], facts["boundaries"] = AFTER_LAYER, [k + 1 for k in ids]
        facts["layers_captured"] = describe_layers(ids, report.get("num_layers"), final_norm=current.final_norm)
    if model is not None:
        facts["engine"] = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "enforce_eager": bool(model.enforce_eager),
            "max_model_len": model.max_model_len,
            "quantization": model.quantization,
            "trust_remote_code": bool(model.trust_remote_code),
        }
    return json.loads(json.dumps(facts, default=str))  # type: ignore[no-any-return]


def alignment_report(generator: Any, former: Any = None) -> dict[str, Any] | None:
    """How many samples were proved to belong to their prompts, in this run and in the ones that it resumes.

    Args:
        former: the manifest's entry so far; the answer where no generator was needed.
    """
    session = getattr(generator, "session", None)
    if session is None:
        return former if isinstance(former, dict) else None
    report: dict[str, Any] = session.alignment.to_dict()
    if isinstance(former, dict):
        report["proved"] += former.get("proved", 0)
        for part in ("not_proved", "failed"):
            for reason, count in former.get(part, {}).items():
                report[part][reason] = report[part].get(reason, 0) + count
    return report
