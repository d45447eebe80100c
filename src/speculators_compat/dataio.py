"""Reading prepared prompts and writing hidden states so that nothing is lost and nothing wrong is kept.

Input: JSONL, one object a line, ``{"input_ids": [int, ...], "loss_mask": [0 or 1, ...]}``.
Output, in one of two formats:

``pt``
    what the trainer of speculators 0.3 and 0.4 reads: one ``data_N.pt`` a sample, where N is the line number
    counted from 0, and ``sample_lengths.json``, by which the trainer of 0.4 plans its batches.
``safetensors``
    what the trainer of speculators 0.5 and later reads: ``hidden_states/hs_N.safetensors`` with ``token_ids`` and
    ``hidden_states`` (tokens, layers, hidden size), where N counts the usable lines from 0, and beside them the
    Arrow data set whose row N has the same tokens, their loss mask, and the line they came from.

With either: ``manifest.json``, which says how the data was made, and ``checksums.sha256``, as ``sha256sum -c`` reads it.

Every file appears whole or not at all: temporary file in the same folder, fsync, rename, fsync of the folder.
A run that continues another trusts only the samples that still load and fit.

Nothing here imports torch until a sample is written or an old one is checked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import hashlib
import importlib
import json
import os
import re
import shutil
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from speculators_compat import claims
from speculators_compat.detect import detect_all
from speculators_compat.errors import CompatError, CompatWarning
from speculators_compat.manifest import (
    AFTER_NORM,
    BEFORE_NORM,
    number_of_layers,
    tokenizer_hash,
    weights_fingerprint,
)
from speculators_compat.prompts import media, placeholder_tokens, placeholders_absent

__all__ = [
    "DataFile",
    "ModelFolder",
    "Progress",
    "Sample",
    "SampleWriter",
    "Skipped",
    "Tally",
    "batches",
    "check_data_file",
    "check_model_folder",
    "find_finished",
    "installed_versions",
    "make_settings",
    "read_samples",
]

MANIFEST = "manifest.json"
LENGTHS = "sample_lengths.json"
LOCK = ".lock"
# SHA-256, because processors have instructions for it: three times as fast there as BLAKE2b.
CHECKSUMS = "checksums.sha256"
MANIFEST_FORMAT = 2
LAYER_CONVENTION = "after-layer"
FORMATS = ("pt", "safetensors")

# A longer line is skipped unread: a file that is one huge JSON array must not be taken into memory.
MAX_LINE_BYTES = 64 * 2**20
# Hidden states are put together for a safetensors file in pieces that stay in the processor's cache.
PIECE_BYTES = 2**20
# Where the vocabulary's size is not known, ids are still kept well inside an int32.
MAX_TOKEN_ID = 2**31 - 1

# vLLM arguments that decide how the work is done but not what comes out: a resumed run may change them.
FREE_VLLM_ARGS = frozenset(
    {
        "block_size",
        "disable_log_stats",
        "distributed_executor_backend",
        "enable_chunked_prefill",
        "enable_expert_parallel",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "max_num_batched_tokens",
        "max_num_seqs",
        "num_gpu_blocks_override",
        "pipeline_parallel_size",
        "tensor_parallel_size",
    }
)

_DATA_NAME = {
    "pt": re.compile(r"data_(0|[1-9][0-9]*)\.pt"),
    "safetensors": re.compile(r"hs_(0|[1-9][0-9]*)\.safetensors"),
}
#: Files of the Arrow data set, in the order in which they appear: a data set without the last one does not load.
_ARROW_STATE = ("dataset_info.json", "state.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_T = TypeVar("_T")


# --------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Sample:
    """One prompt, cut to the longest length allowed.

    ``index`` is the line number counted from 0; ``ordinal`` counts the usable lines. ``loss_mask`` is None where the
    line has none. ``original_length`` is the number of tokens before the cut.
    """

    index: int
    input_ids: list[int]
    loss_mask: list[int] | None
    original_length: int
    ordinal: int | None = field(default=None, compare=False)

    @property
    def line(self) -> int:
        """Line number as editors count, from 1."""
        return self.index + 1

    @property
    def truncated(self) -> bool:
        return self.original_length > len(self.input_ids)


@dataclass(frozen=True)
class Skipped:
    """A line (counted from 1) that can't be used: the kind of fault, and the particular one."""

    line: int
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason} ({self.detail})" if self.detail else self.reason


class _BadLine(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


def read_samples(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    limit: int | None = None,
    strict: bool = False,
    placeholders: Collection[int] = (),
) -> Iterator[Sample | Skipped]:
    """Stream a JSONL file: a :class:`Sample` for each good line, a :class:`Skipped` for each bad one.

    Blank lines are passed over, but count as lines. One line is in memory at a time.

    Args:
        path: the JSONL file.
        vocab_size: token ids from here on are refused.
        max_seq_len: longer samples are cut to this many tokens, their loss mask too.
        limit: stop after this many good samples.
        strict: raise SC601 at the first bad line instead of passing it on as skipped.
        placeholders: token ids in whose place the model puts images; samples with them are refused.
    """
    good = 0
    with _open_data(path) as stream:
        index = -1
        while limit is None or good < limit:
            try:
                raw = stream.readline(MAX_LINE_BYTES)
            except OSError as error:
                raise _unreadable(path, error) from error
            if not raw:
                return
            index += 1
            try:
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    while raw and not raw.endswith(b"\n"):
                        raw = stream.readline(MAX_LINE_BYTES)
                    raise _BadLine(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
                if not raw.strip():
                    continue
                sample = _parse(raw, index, vocab_size, max_seq_len)
                if not placeholders_absent(sample.input_ids, placeholders):
                    raise _BadLine("input_ids holds a place for an image, video or audio")
            except _BadLine as bad:
                skipped = Skipped(index + 1, bad.reason, bad.detail)
                if strict:
                    raise CompatError(
                        "SC601",
                        found=f"{os.fspath(path)}, line {skipped.line}: {skipped}",
                        expected='one object a line, {"input_ids": [int, ...], "loss_mask": [0 or 1, ...]}',
                        why="strict reading was asked for, so a bad line ends the run",
                        mend="correct the line, or leave --strict out to have bad lines skipped and reported",
                    ) from None
                yield skipped
                continue
            yield dataclasses.replace(sample, ordinal=good)
            good += 1


def _parse(raw: bytes, index: int, vocab_size: int | None, max_seq_len: int | None) -> Sample:
    try:
        record = json.loads(raw.decode("utf-8-sig" if index == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise _BadLine("not UTF-8", f"byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _BadLine("not JSON", f"{error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; nesting without end
        raise _BadLine("not JSON", type(error).__name__) from None
    if not isinstance(record, dict):
        raise _BadLine("not an object", f"a {type(record).__name__}")
    if "input_ids" not in record:
        raise _BadLine("lacks input_ids", f"has {', '.join(sorted(record)[:5]) or 'no fields'}"[:120])
    if found := media(record):
        raise _BadLine("holds an image, video or audio", ", ".join(found))
    ids = record["input_ids"]
    if not isinstance(ids, list):
        raise _BadLine("input_ids is not a list", f"a {type(ids).__name__}")
    if not ids:
        raise _BadLine("input_ids is empty")
    if set(map(type, ids)) != {int}:  # type() and not isinstance(): True and False are no token ids
        at = next(i for i, value in enumerate(ids) if type(value) is not int)
        raise _BadLine(
            "input_ids holds something other than an integer", f"a {type(ids[at]).__name__} at {at}"
        )
    if min(ids) < 0:
        at = next(i for i, value in enumerate(ids) if value < 0)
        raise _BadLine("input_ids holds a negative number", f"{ids[at]} at {at}")
    bound = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if max(ids) >= bound:
        at = next(i for i, value in enumerate(ids) if value >= bound)
        shown = str(ids[at]) if ids[at] < 2**63 else "a number over 2**63"
        raise _BadLine("input_ids holds a token id outside the vocabulary", f"{shown} at {at}, size {bound}")

    mask = record.get("loss_mask")
    if mask is not None:
        if not isinstance(mask, list):
            raise _BadLine("loss_mask is not a list", f"a {type(mask).__name__}")
        if len(mask) != len(ids):
            raise _BadLine("loss_mask has another length than input_ids", f"{len(mask)}, not {len(ids)}")
        if not set(map(type, mask)) <= {int, bool} or not set(mask) <= {0, 1}:
            raise _BadLine("loss_mask holds something other than 0 and 1")
        mask = [int(value) for value in mask[:max_seq_len]]
    return Sample(index, ids[:max_seq_len], mask, len(ids))


def batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Lists of ``size`` items, the last one perhaps shorter."""
    batch: list[_T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


@dataclass
class Tally:
    """Counts for the summary at the end: pass the items of :func:`read_samples` through :meth:`samples`."""

    good: int = 0
    truncated: int = 0
    without_mask: int = 0
    skipped: int = 0
    reasons: dict[str, tuple[int, list[str]]] = field(default_factory=dict)

    SHOWN = 3

    def samples(self, items: Iterable[Sample | Skipped]) -> Iterator[Sample]:
        """Pass on the good samples, counting everything."""
        for item in items:
            if isinstance(item, Sample):
                self.good += 1
                self.truncated += item.truncated
                self.without_mask += item.loss_mask is None
                yield item
            else:
                self.skipped += 1
                count, first = self.reasons.get(item.reason, (0, []))
                if count < self.SHOWN:
                    first.append(f"line {item.line}" + (f" ({item.detail})" if item.detail else ""))
                self.reasons[item.reason] = (count + 1, first)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "lines_read": {
                "usable": self.good,
                "truncated": self.truncated,
                "without_loss_mask": self.without_mask,
                "skipped": {reason: count for reason, (count, _) in self.reasons.items()},
            }
        }

    def reason_lines(self) -> list[str]:
        """One line a reason: how often, and where first."""
        return [
            f"{count} x {reason}: {', '.join(first)}" + (", ..." if count > len(first) else "")
            for reason, (count, first) in sorted(self.reasons.items(), key=lambda entry: -entry[1][0])
        ]


# ------------------------------------------------------------------------------------ checks before the start


@dataclass(frozen=True)
class DataFile:
    """Identity of the data file, so that a resumed run can tell whether it is still the same."""

    path: str
    sha256: str
    bytes: int
    lines: int


def check_data_file(
    path: str | os.PathLike[str],
    *,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    strict: bool = False,
    placeholders: Collection[int] = (),
) -> DataFile:
    """Make sure that the file is readable and has at least one good line, and fingerprint it.

    Raises:
        CompatError: SC605, or SC601 where ``strict`` and a line before the first good one is bad.
    """
    digest, size, lines, last = hashlib.sha256(), 0, 0, b"\n"
    with _open_data(path) as stream:
        try:
            while block := stream.read(2**20):
                digest.update(block)
                size += len(block)
                lines += block.count(b"\n")
                last = block[-1:]
        except OSError as error:
            raise _unreadable(path, error) from error
    lines += last != b"\n"
    tally = Tally()
    items = read_samples(
        path,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        limit=1,
        strict=strict,
        placeholders=placeholders,
    )
    if not list(tally.samples(items)):
        raise CompatError(
            "SC605",
            found=f"{os.fspath(path)}: no usable line among {lines}. " + "; ".join(tally.reason_lines()),
            expected='at least one line {"input_ids": [int, ...], "loss_mask": [0 or 1, ...]}',
            why="there is nothing to extract hidden states for",
            mend="give the tokenized file (JSONL), not the raw text or a JSON array; see the reasons above",
        )
    return DataFile(os.path.abspath(path), digest.hexdigest(), size, lines)


def _open_data(path: str | os.PathLike[str]) -> Any:
    try:
        if not os.path.isfile(path) and os.path.exists(path):
            raise OSError(errno.EINVAL, "not a regular file")
        return open(path, "rb")
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: str | os.PathLike[str], error: OSError) -> CompatError:
    return CompatError(
        "SC605",
        found=f"{os.fspath(path)}: {error.strerror or error}",
        expected="a readable JSONL file with the tokenized prompts",
        why="the prompts are read from it, several times",
        mend="check the path given as --prepared-data and its permissions",
    )


@dataclass(frozen=True)
class ModelFolder:
    """What was learnt about the model before the start; only its ``path`` for a name on a model hub."""

    path: str
    vocab_size: int | None = None
    config_sha256: str | None = None
    num_layers: int | None = None
    weights: str | None = None
    tokenizer_sha256: str | None = None
    placeholders: frozenset[int] = frozenset()


def check_model_folder(path: str) -> ModelFolder:
    """Make sure that a local model folder has a config and all its weights. A hub name passes unchecked.

    Raises:
        CompatError: SC606.
    """
    folder = Path(path)
    if not folder.exists() and _HUB_ID.fullmatch(path) and not folder.parent.is_dir():
        return ModelFolder(path)

    def wrong(found: str) -> CompatError:
        return CompatError(
            "SC606",
            found=f"{path}: {found}",
            expected="a folder with config.json and complete weights, or a name on the Hugging Face hub",
            why="vLLM would fail on it, but only after minutes",
            mend="check --model-path; where a download was cut short, run it again",
        )

    if not folder.is_dir():
        raise wrong("not a folder" if folder.exists() else "no such folder")
    try:
        raw = (folder / "config.json").read_bytes()
        config = json.loads(raw)
        if not isinstance(config, dict):
            raise wrong("config.json is not an object")
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            endings = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
            names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in endings)
        if not names:
            raise wrong("no weights (*.safetensors, *.bin, *.pt, *.pth, *.gguf)")
        for name in names:
            weights = folder / name
            if not weights.is_file():
                raise wrong(f"{name} is missing, one of {len(names)} files of weights")
            if weights.stat().st_size < 1024 and (
                not (head := weights.read_bytes()) or head.startswith(b"version https://git-lfs")
            ):
                raise wrong(f"{name} is empty or only a git-lfs pointer")
    except FileNotFoundError as error:
        raise wrong(f"no {Path(error.filename or 'config.json').name}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise wrong(f"{type(error).__name__}: {error}") from error
    text = config.get("text_config")
    vocab = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    try:
        return ModelFolder(
            path,
            vocab if isinstance(vocab, int) else None,
            hashlib.sha256(raw).hexdigest(),
            number_of_layers(config),
            weights_fingerprint(folder),
            tokenizer_hash(folder),
            placeholder_tokens(config),
        )
    except OSError as error:
        raise wrong(f"{error.filename}: {error.strerror}") from error


def installed_versions() -> dict[str, str | None]:
    """Versions of what decides the values, by import package, without importing any of it."""
    from speculators_compat import __version__

    versions: dict[str, str | None] = {"speculators_compat": __version__}
    for package, installed in detect_all().items():
        name = installed.distribution or package
        versions[package] = None if installed.raw_version is None else f"{name} {installed.raw_version}"
    return versions


def make_settings(
    model: ModelFolder,
    data: DataFile,
    *,
    layer_ids: Sequence[int] | None,
    max_seq_len: int,
    vllm_args: Mapping[str, Any] | None = None,
    final_norm: bool = False,
    output: str = "pt",
) -> dict[str, Any]:
    """What decides the values written. A run may continue another only where all of it agrees.

    Args:
        layer_ids: after-layer ids, see :mod:`speculators_compat.layer_ids`; ``None`` for the generator's choice.
        final_norm: the last layer's state is taken after the model's final norm.
        output: ``pt`` or ``safetensors``.
    """
    free = vllm_args or {}
    return {
        "format": output,
        "model": {
            "path": os.path.abspath(model.path) if model.config_sha256 else model.path,
            "config_sha256": model.config_sha256,
            "weights": model.weights,
            "tokenizer_sha256": model.tokenizer_sha256,
        },
        "data": {"sha256": data.sha256, "bytes": data.bytes},
        "layer_ids": "default" if layer_ids is None else list(layer_ids),
        "layer_convention": LAYER_CONVENTION,
        "norm_state": AFTER_NORM if final_norm else BEFORE_NORM,
        "max_seq_len": max_seq_len,
        "dtype": str(free.get("dtype", "auto")),
        "vllm_args": {key: value for key, value in sorted(free.items()) if key not in FREE_VLLM_ARGS},
        "versions": installed_versions(),
    }


# --------------------------------------------------------------------------------------------------- writing


def find_finished(output_dir: str | os.PathLike[str], *, layers: int | None = None, output: str = "pt") -> dict[int, int]:
    """Finished samples of a folder: number and tokens of each.

    Only files that load and fit count: right keys, equal lengths, and ``layers`` layers where it is given.
    """
    return _scan(samples_folder(Path(output_dir), output), layers, output)[0]


def samples_folder(folder: Path, output: str) -> Path:
    """Where the samples lie in an output folder."""
    return folder / "hidden_states" if output == "safetensors" else folder


def _scan(folder: Path, layers: int | None, output: str) -> tuple[dict[int, int], list[Path]]:
    finished: dict[int, int] = {}
    damaged: list[Path] = []
    length_of = _validated_length if output == "pt" else _validated_safetensors
    for entry in sorted(folder.iterdir()):
        match = _DATA_NAME[output].fullmatch(entry.name)
        if match:
            length = length_of(entry, layers)
            if length is None:
                damaged.append(entry)
            else:
                finished[int(match[1])] = length
    return finished, damaged


def _validated_safetensors(path: Path, layers: int | None) -> int | None:
    from safetensors import safe_open

    try:
        # Opening checks the header and that the file has exactly the bytes it promises.
        with safe_open(path, framework="pt") as data:
            states, ids = data.get_slice("hidden_states"), data.get_slice("token_ids")
            length, found, _ = states.get_shape()
            good = (
                set(data.keys()) == {"hidden_states", "token_ids"}
                and length > 0
                and ids.get_shape() == [length]
                and ids.get_dtype() == "I64"
                and (layers is None or found == layers)
                and states.get_dtype() in ("F64", "F32", "F16", "BF16")
            )
    except Exception:  # whatever a damaged or foreign file raises
        return None
    return int(length) if good else None


def _validated_length(path: Path, layers: int | None) -> int | None:
    import torch

    try:
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        ids, mask, states = data["input_ids"], data["loss_mask"], data["hidden_states"]
        length = int(ids.shape[0])
        hidden = states[0].shape[1]
        good = (
            len(data) == 3
            and length > 0
            and ids.dtype == mask.dtype == torch.long
            and ids.shape == mask.shape == (length,)
            and isinstance(states, list)
            and (layers is None or len(states) == layers)
            and all(state.shape == (length, hidden) and state.dtype == states[0].dtype for state in states)
            and states[0].is_floating_point()
        )
    except Exception:  # whatever a damaged or foreign file raises
        return None
    return length if good else None


class SampleWriter:
    """Writes samples to a folder, and knows which are finished there already.

    Args:
        output_dir: made where it is missing.
        settings: what decides the values, see :func:`make_settings`. A folder that holds samples made with
            other settings is refused with SC604.
        checksums: keep ``checksums.sha256``; it costs a pass over each sample's bytes.

    Raises:
        CompatError: SC602 no space, SC603 can't write, SC604 other settings, SC607 folder in use.
    """

    def __init__(
        self, output_dir: str | os.PathLike[str], settings: Mapping[str, Any], *, checksums: bool = True
    ) -> None:
        self.folder = Path(output_dir)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.output = str(self.settings.get("format", "pt"))
        self.samples = samples_folder(self.folder, self.output)
        self._sums: dict[str, str] | None = {} if checksums else None
        self.damaged: list[str] = []
        self.written = 0
        self.written_tokens = 0
        self.written_bytes = 0
        self._layers: int | None = None
        self._form: list[Any] | None = None  # dtype and hidden size of all samples
        self._warned = False
        self._changing = threading.Lock()
        self._lock: int | None = None
        self._claim: claims.Claim | None = None
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self._take_lock()
            self.samples.mkdir(mode=0o755, exist_ok=True)
            for leftover in [*self.folder.glob("*.tmp"), *self.samples.glob("*.tmp")]:
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink(missing_ok=True)
            self._recorded = self._read_manifest()
            self._form = self._recorded.get("form")
            self.finished, damaged = _scan(self.samples, self._expected_layers(), self.output)
            for path in damaged:
                path.unlink()
                self.damaged.append(path.name)
            self._read_checksums()
        except OSError as error:
            self._release_lock()
            raise _write_error(Path(error.filename or self.folder), 0, error) from error
        except BaseException:
            self._release_lock()
            raise
        self.resumed = len(self.finished)
        try:
            self._write_manifest(complete=False)
            self._write_lengths()
        except BaseException:
            self._release_lock()
            raise

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is None:
            self.close()
        else:  # the first error is the one to report
            with contextlib.suppress(CompatError):
                self.close(complete=False)

    def is_finished(self, sample: Sample) -> bool:
        """Whether the sample is on disk, whole."""
        return self.finished.get(self._number(sample)) == len(sample.input_ids)

    def _number(self, sample: Sample) -> int:
        if self.output == "pt":
            return sample.index
        return sample.index if sample.ordinal is None else sample.ordinal

    def _path(self, number: int) -> Path:
        return self.samples / (f"data_{number}.pt" if self.output == "pt" else f"hs_{number}.safetensors")

    def record(self, **facts: Any) -> None:
        """Note facts in the manifest that a resumed run need not share, as the adapters applied."""
        self.note(**facts)
        self._write_manifest(complete=False)

    def noted(self, name: str) -> Any:
        """What the manifest has under a name."""
        return self._recorded.get(name)

    def note(self, **facts: Any) -> None:
        """The same, but written only with the manifest's next version."""
        self._recorded.update(json.loads(json.dumps(facts, default=str)))

    def write(self, sample: Sample, result: Mapping[str, Any]) -> int:
        """Write one sample with its hidden states; returns the bytes written.

        Args:
            sample: the prompt as it was sent.
            result: the generator's answer, with ``input_ids`` and ``hidden_states``.

        Raises:
            CompatError: SC608 the answer doesn't fit the prompt; SC602 no space; SC603 can't write.
        """
        content = self.begin(sample, result)
        self.finish(content)
        return content.count

    def finish(self, content: Content) -> None:
        """Write what :meth:`begin` made. May be called from several threads, each with a sample of its own.

        Raises:
            CompatError: SC602, SC603.
        """
        content.write()
        try:
            with self._changing:
                if self._claim is not None:
                    self._claim.check()
            content.publish()
            with self._changing:
                if content.digest is not None:
                    self._add_checksum(content.path, content.digest.hexdigest())
                self.finished[content.number] = content.length
                self.written += 1
                self.written_tokens += content.length
                self.written_bytes += content.count
        except BaseException:
            content.discard()
            raise

    def begin(self, sample: Sample, result: Mapping[str, Any]) -> Content:
        """A sample to be written by :meth:`finish`: checked, nothing is on the disk yet.

        Raises:
            CompatError: SC608 the answer doesn't fit the prompt.
        """
        import torch

        ids = torch.tensor(sample.input_ids, dtype=torch.long)
        states = self._checked_states(sample, ids, result)
        if sample.loss_mask is None and not self._warned:
            self._warned = True
            warnings.warn(
                f"line {sample.line} has no loss_mask: all ones are written, here and wherever it is "
                "missing, so every token will be trained on",
                CompatWarning,
                stacklevel=4,
            )
        mask = (
            torch.ones_like(ids)
            if sample.loss_mask is None
            else torch.tensor(sample.loss_mask, dtype=torch.long)
        )

        def produce(out: _Output) -> None:
            if self.output == "pt":
                torch.save({"input_ids": ids, "hidden_states": states, "loss_mask": mask}, out)
            else:
                write_safetensors(out, ids, states)

        size = sum(tensor.numel() * tensor.element_size() for tensor in (ids, mask, *states))
        number = self._number(sample)
        digest = hashlib.sha256() if self._sums is not None else None
        return Content(self._path(number), produce, size, digest, number, len(sample.input_ids))

    def close(self, *, complete: bool = True) -> None:
        """Write ``sample_lengths.json`` and the final manifest, and let go of the folder."""
        if self._lock is None:
            return
        try:
            self._write_lengths()
            self._write_checksums()
            self._write_manifest(complete=complete)
        finally:
            self._release_lock()

    def write_dataset(self, samples: Iterable[Sample]) -> int:
        """Write the Arrow data set that the trainer of speculators 0.5 and later reads beside the samples.

        Args:
            samples: all usable lines again, in their order.

        Returns:
            The number of rows: those whose samples are finished, up to the first that is not.

        Raises:
            CompatError: SC610 without the ``datasets`` package; SC602, SC603.
        """
        try:
            from datasets import Dataset, Features, Sequence, Value
            from datasets.arrow_writer import ArrowWriter
        except ImportError as error:
            raise CompatError(
                "SC610",
                found=f"the Arrow data set can't be written: {error}",
                expected="the datasets package, which speculators from 0.5 on depends on too",
                why="its trainer reads the tokens and loss masks from there; the hidden states are written",
                mend="pip install datasets, then repeat the same command",
            ) from None
        whole = Sequence(Value("int64"))
        features = Features(
            {"input_ids": whole, "loss_mask": whole, "seq_len": Value("int64"), "line": Value("int64")}
        )
        scratch = self.folder / "dataset.tmp"
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            rows = 0
            with ArrowWriter(features=features, path=str(scratch / "rows.arrow")) as arrow:
                for sample in samples:
                    if sample.ordinal != rows or not self.is_finished(sample):
                        break
                    ids = sample.input_ids
                    mask = [1] * len(ids) if sample.loss_mask is None else sample.loss_mask
                    arrow.write({"input_ids": ids, "loss_mask": mask, "seq_len": len(ids), "line": sample.line})
                    rows += 1
                arrow.finalize()
            if rows:
                data = Dataset.from_file(str(scratch / "rows.arrow"))
                data.set_format("torch")
                data.save_to_disk(str(scratch / "saved"))
                for name in _ARROW_STATE:
                    (self.folder / name).unlink(missing_ok=True)
                for old in self.folder.glob("data-*.arrow"):
                    old.unlink()
                made = sorted(path.name for path in (scratch / "saved").iterdir())
                for name in sorted(made, key=lambda name: (name in _ARROW_STATE, name)):
                    os.replace(scratch / "saved" / name, self.folder / name)
                _sync_folder(self.folder)
            shutil.rmtree(scratch)
        except OSError as error:
            raise _write_error(self.folder, 0, error) from error
        return rows

    # ---- the result

    def _checked_states(self, sample: Sample, ids: Any, result: Mapping[str, Any]) -> list[Any]:
        import torch

        def wrong(found: str, expected: str) -> CompatError:
            return CompatError(
                "SC608",
                found=f"sample of line {sample.line} ({self._path(self._number(sample)).name}): {found}",
                expected=expected,
                why="hidden states that belong to other tokens train a draft model badly without any error",
                mend="nothing was written for it; run compat-check, and report this with its output",
            )

        got = torch.as_tensor(result["input_ids"], dtype=torch.long).cpu()
        if not torch.equal(got, ids):
            raise wrong(
                f"the answer is for other token ids ({tuple(got.shape)} of them)",
                f"the {len(ids)} token ids that were sent",
            )
        given = list(result["hidden_states"])
        if not given or (self._layers is not None and len(given) != self._layers):
            raise wrong(f"{len(given)} layers", f"{self._layers or 'at least 1'} layers")
        states: list[Any] = []
        storages: set[int] = set()
        for position, state in enumerate(given):
            if state.dim() != 2 or state.shape[0] != len(ids):
                raise wrong(
                    f"layer number {position} has shape {tuple(state.shape)}", f"({len(ids)}, hidden size)"
                )
            form = [str(state.dtype), int(state.shape[1])]  # as JSON gives it back
            if form != (self._form or form):
                raise wrong(f"layer number {position} is {form}", f"{self._form}, as all samples before")
            self._form = form
            state = state.detach().cpu().contiguous()
            storage = state.untyped_storage()
            # torch.save writes whole storages: a view would drag its whole batch into the file.
            if storage.nbytes() != state.numel() * state.element_size() or storage.data_ptr() in storages:
                state = state.clone()
            storages.add(state.untyped_storage().data_ptr())
            states.append(state)
        self._layers = len(states)
        if "layers" not in self._recorded:
            self._recorded.update(layers=len(states), form=self._form)
            self._write_manifest(complete=False)
        return states

    # ---- manifest, lengths, lock

    def _expected_layers(self) -> int | None:
        ids = self.settings.get("layer_ids")
        layers = len(ids) if isinstance(ids, list) else self._recorded.get("layers")
        self._layers = layers if isinstance(layers, int) else None
        return self._layers

    def _read_manifest(self) -> dict[str, Any]:
        path = self.folder / MANIFEST
        has_data = any(
            pattern.fullmatch(entry.name)
            for output, pattern in _DATA_NAME.items()
            if samples_folder(self.folder, output).is_dir()
            for entry in samples_folder(self.folder, output).iterdir()
        )
        if not has_data:
            return {}

        def refuse(found: str, expected: str) -> CompatError:
            return CompatError(
                "SC604",
                found=found,
                expected=expected,
                why="samples made in different ways must not be mixed in one data set",
                mend="repeat the command with the old settings, or give another --output-dir",
            )

        try:
            manifest = json.loads(path.read_bytes())
            old, recorded = manifest["settings"], manifest["recorded"]
            if not isinstance(old, dict) or not isinstance(recorded, dict):
                raise TypeError("settings or recorded is not an object")
        except FileNotFoundError:
            raise refuse(
                f"{self.folder} holds samples but no {MANIFEST}",
                "an empty folder, or one of an earlier run",
            ) from None
        except (ValueError, KeyError, TypeError) as error:
            raise refuse(
                f"{path} can't be read: {type(error).__name__}: {error}", "the file as written"
            ) from None
        diff = _diff(_flat(old), _flat(self.settings))
        if diff:
            raise refuse(
                f"{self.folder} was made with other settings:\n" + "\n".join(f"    {line}" for line in diff),
                "the same settings as in the run to be resumed",
            )
        return recorded

    def _write_manifest(self, *, complete: bool) -> None:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._recorded.setdefault("started", now)
        self._recorded["updated"] = now
        manifest = {
            "format": MANIFEST_FORMAT,
            "complete": complete,
            "samples": len(self.finished),
            "tokens": sum(self.finished.values()),
            "settings": self.settings,
            "recorded": self._recorded,
        }
        _write_json(self.folder / MANIFEST, manifest)

    # ---- checksums: lines are appended as samples appear; at the end the file is written anew, in order

    def _read_checksums(self) -> None:
        if self._sums is None:
            return
        known: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / CHECKSUMS).read_text(errors="replace").splitlines():
                digest, _, name = line.partition("  ")
                if len(digest) == 64:
                    known[name] = digest
        for number in self.finished:
            path = self._path(number)
            name = str(path.relative_to(self.folder))
            # A kill may fall between a sample's appearance and its line.
            self._sums[name] = known.get(name) or file_checksum(path)
        self._write_checksums()

    def _add_checksum(self, path: Path, digest: str) -> None:
        assert self._sums is not None
        name = str(path.relative_to(self.folder))
        self._sums[name] = digest
        try:
            with open(self.folder / CHECKSUMS, "a") as stream:
                stream.write(f"{digest}  {name}\n")
        except OSError as error:
            raise _write_error(self.folder / CHECKSUMS, 200, error) from error

    def _write_checksums(self) -> None:
        if self._sums is None:
            return
        names = sorted(self._sums, key=lambda name: (len(name), name))
        content = "".join(f"{self._sums[name]}  {name}\n" for name in names).encode()
        _write_atomically(
            self.folder / CHECKSUMS, lambda out: out.write(content), expected_bytes=len(content)
        )
        self._recorded["checksums"] = {
            "file": CHECKSUMS,
            "algorithm": "SHA-256",
            "of_the_file": hashlib.blake2b(content).hexdigest(),
        }

    def _write_lengths(self) -> None:
        if self.output != "pt":
            return  # the Arrow data set has them
        _write_json(
            self.folder / LENGTHS, {str(index): self.finished[index] for index in sorted(self.finished)}
        )

    def _take_lock(self) -> None:
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            # lockf and not flock: the lock must not live on in a worker process that was forked.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise claims.in_use(self.folder) from None
            # a file system without locks: the claim is all there is
        self._claim = claims.take(self.folder)

    def _release_lock(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            flat.update(_flat(item, f"{prefix}{key}."))
        elif item != {}:
            flat[prefix + key] = item
    return flat


def _diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return [
        f"{key}: {json.dumps(old.get(key))} in the folder, {json.dumps(new.get(key))} now" for key in keys
    ]


# ---------------------------------------------------------------------------------------------- atomic files


class _Output:
    """The file given to torch.save: counts bytes and keeps the real error, which torch may hide."""

    digest: Any = None

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.count = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            count = int(self._stream.write(data))
        except OSError as error:
            self.error = self.error or error
            raise
        self.count += count
        if self.digest is not None:
            self.digest.update(data)
        return count

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self.error = self.error or error
            raise


def write_safetensors(out: Any, ids: Any, states: Sequence[Any]) -> None:
    """Write what the trainer of speculators 0.5 and later reads, without a second copy of the states in memory.

    ``token_ids`` of shape (tokens,), I64, and ``hidden_states`` of shape (tokens, layers, hidden size). Layout:
    https://huggingface.co/docs/safetensors ("Format"): the header's length as a little-endian 64-bit number, the header
    as JSON, then the tensors' bytes.

    Args:
        out: has ``write``.
        states: for each layer a contiguous CPU tensor of shape (tokens, hidden size).
    """
    import torch

    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    (tokens, hidden), dtype = states[0].shape, states[0].dtype
    begin, row = 8 * tokens, len(states) * hidden * states[0].element_size()
    header = {
        "token_ids": {"dtype": "I64", "shape": [tokens], "data_offsets": [0, begin]},
        "hidden_states": {
            "dtype": names[dtype],
            "shape": [tokens, len(states), hidden],
            "data_offsets": [begin, begin + tokens * row],
        },
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    out.write(ids.numpy().data)
    step = max(1, PIECE_BYTES // row)
    for first in range(0, tokens, step):
        piece = torch.stack([state[first : first + step] for state in states], dim=1)
        out.write(piece.view(torch.uint8).numpy().data)


def file_checksum(path: Path) -> str:
    """SHA-256 of a file, as ``sha256sum`` prints it."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(2**22):
            digest.update(block)
    return digest.hexdigest()


@dataclass
class Content:
    """A file to be: written under another name first, so that it appears whole or not at all."""

    path: Path
    produce: Callable[[_Output], object]
    size: int
    digest: Any = None
    number: int = 0
    length: int = 0
    count: int = 0

    @property
    def temporary(self) -> Path:
        # Not "*.pt.tmp.pt" or the like: the trainer takes every file whose name ends in "pt".
        return self.path.with_name(self.path.name + ".tmp")

    def write(self) -> None:
        """Make the temporary file, and have it on the disk."""
        out: _Output | None = None
        try:
            self.temporary.unlink(missing_ok=True)
            handle = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            with os.fdopen(handle, "wb") as stream:
                out = _Output(stream)
                out.digest = self.digest
                self.produce(out)
                stream.flush()
                os.fsync(handle)
            self.count = out.count
        except BaseException as error:
            self._failed(error, out)

    def publish(self) -> None:
        """Give the file its name."""
        try:
            os.replace(self.temporary, self.path)
            _sync_folder(self.path.parent)
        except BaseException as error:
            self._failed(error, None)

    def discard(self) -> None:
        """Remove the temporary file."""
        with contextlib.suppress(OSError):
            self.temporary.unlink(missing_ok=True)

    def _failed(self, error: BaseException, out: _Output | None) -> NoReturn:
        self.discard()
        cause = error if isinstance(error, OSError) else out.error if out is not None else None
        if cause is None:
            raise error
        raise _write_error(self.path, self.size, cause) from cause


def _write_atomically(path: Path, produce: Callable[[_Output], object], *, expected_bytes: int) -> None:
    content = Content(path, produce, expected_bytes)
    content.write()
    content.publish()


def _write_json(path: Path, value: object) -> None:
    content = (json.dumps(value, indent=1) + "\n").encode()
    _write_atomically(path, lambda out: out.write(content), expected_bytes=len(content))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that can't sync a folder
            raise
    finally:
        os.close(handle)


def _write_error(path: Path, size: int, error: OSError) -> CompatError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free = f", {shutil.disk_usage(path.parent).free:,} bytes free"
        except OSError:
            free = ""
        return CompatError(
            "SC602",
            found=f"{path}: {error.strerror or error}{free}",
            expected=f"room for {size:,} bytes" if size else "room for the output",
            why="the sample can't be written; all samples before it are on disk, whole",
            mend="free some space or raise the quota, then repeat the same command: it resumes",
        )
    return CompatError(
        "SC603",
        found=f"{path}: {error.strerror or error}",
        expected="an output folder that can be made and written to" + (f" ({size:,} bytes)" if size else ""),
        why="the samples are written there",
        mend="check --output-dir and its permissions, then repeat the same command: it resumes",
    )


# -------------------------------------------------------------------------------------------------- progress


class Progress:
    """Samples done, tokens/s and time left: with tqdm where it is installed, else a line in ten seconds."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.total = total
        self.done = min(done, total)
        self.tokens = 0
        self._initial = self.done
        self._start = self._shown = time.monotonic()
        self._end = 0.0
        self._bar: Any = None
        with contextlib.suppress(ImportError):
            tqdm = importlib.import_module("tqdm")
            self._bar = tqdm.tqdm(total=total, initial=self.done, unit="sample", dynamic_ncols=True)

    @property
    def rate(self) -> float:
        """Tokens a second since the start, until :meth:`close`: vLLM may take seconds to shut down."""
        return self.tokens / max((self._end or time.monotonic()) - self._start, 1e-9)

    def advance(self, samples: int, tokens: int) -> None:
        self.done += samples
        self.tokens += tokens
        now = time.monotonic()
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.rate:,.0f} tokens/s", refresh=False)
            self._bar.update(samples)
        elif now - self._shown >= 10:
            self._shown = now
            each = (now - self._start) / max(self.done - self._initial, 1)
            left = datetime.timedelta(seconds=round(each * max(self.total - self.done, 0)))
            print(
                f"{self.done}/{self.total} samples, {self.rate:,.0f} tokens/s, {left} left", file=sys.stderr
            )

    def close(self) -> None:
        self._end = time.monotonic()
        if self._bar is not None:
            self._bar.close()
