"""Shards of a data set: parts that are extracted at the same time, on one machine or on many, and merged.

    python examples/extract_hidden_states.py ... --output-dir states --shard $SLURM_ARRAY_TASK_ID/8
    python -m speculators_compat.shards states

Shard ``I/N`` holds every N-th usable line of the data, beginning with the I-th, counted from 0. It is a folder of its own,
``states/shard-I-of-N``, with samples, manifest and claim like any other output folder, so shards may share the output
folder or have one each. The merge moves the samples into the output folder, which is then what one run without shards
would have made: it is used, verified and resumed in the same way. Samples merged earlier count as finished, whatever the
division, so a shard that failed can be made again with another N.

``states/shards.json`` holds what all shards must agree in. The first one writes it; one that differs is refused before
anything is loaded.

Exit status of the merge: 0 everything is there, 1 samples are missing or the shards do not fit, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import claims, dataio
from .errors import CompatError, InputError

PLAN = "shards.json"
PLAN_FORMAT = 1
_FOLDER = re.compile(r"shard-(0|[1-9][0-9]*)-of-([1-9][0-9]*)")
#: What shards record about their engine that must be the same in all; the settings are compared as a whole.
_RECORDED = ("layer_ids", "layers", "form", "layers_captured", "engine.dtype", "engine.quantization", "captured.model")
#: Missing lines that a message names.
_SHOWN = 20


@dataclass(frozen=True)
class Shard:
    """One part of the data; ``index`` counts from 0."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def folder(self) -> str:
        """Its folder's name in the output folder."""
        return f"shard-{self.index}-of-{self.count}"

    def holds(self, sample: dataio.Sample) -> bool:
        """Whether a sample, as :func:`dataio.read_samples` yields it, is in this part."""
        assert sample.ordinal is not None
        return sample.ordinal % self.count == self.index

    def share(self, total: int) -> int:
        """How many of ``total`` usable lines are in this part."""
        return max(0, -(-(total - self.index) // self.count))


def parse(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """The shard that ``I/N`` names.

    Raises:
        InputError: SC850 if there is none, or if ``I`` comes from a Slurm job array that is not numbered from 0.
    """

    def wrong(found: str, mend: str) -> InputError:
        return InputError(
            "SC850",
            found=found,
            expected="I/N with I from 0 to N-1, for example 0/8 to 7/8",
            why="samples would be left out without an error",
            mend=mend,
        )

    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        hint = "; is SLURM_ARRAY_TASK_ID set?" if re.match(r"\s*/", text) else ""
        raise wrong(f"--shard {text}{hint}", "--shard $SLURM_ARRAY_TASK_ID/8 in a job array, --shard 0/8 by hand")
    index, count = int(match[1]), int(match[2])
    if count < 1:
        raise wrong(f"--shard {text}: no parts", "give the number of shards behind the slash")
    task, last = (environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in ("ID", "MAX"))
    counted_from_1 = task == str(index) and last == str(count)
    if index >= count or counted_from_1:
        where = f", from a job array that ends with {last}" if counted_from_1 else ""
        raise wrong(
            f"--shard {text}{where}",
            f"sbatch --array=0-{count - 1}, or --shard $((SLURM_ARRAY_TASK_ID - 1))/{count}"
            if index == count or counted_from_1
            else f"give a shard from 0/{count} to {count - 1}/{count}",
        )
    return Shard(index, count)


def where(output_dir: str | os.PathLike[str], shard: Shard | None) -> Path:
    """The folder that a run writes to."""
    return Path(output_dir) / shard.folder if shard is not None else Path(output_dir)


def folders(output_dir: Path) -> dict[Shard, Path]:
    """The shards in an output folder, in their order."""
    found = {}
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in output_dir.iterdir():
            match = _FOLDER.fullmatch(entry.name)
            if match and entry.is_dir():
                found[Shard(int(match[1]), int(match[2]))] = entry
    return dict(sorted(found.items(), key=lambda item: (item[0].count, item[0].index)))


# ------------------------------------------------------------------------------------------------- extraction


class ShardWriter(dataio.SampleWriter):
    """A :class:`dataio.SampleWriter` that also counts as finished what was merged earlier.

    Attributes:
        merged: samples in the output folder: number and tokens.
    """

    merged: dict[int, int]

    def is_finished(self, sample: dataio.Sample) -> bool:
        return super().is_finished(sample) or self.merged.get(self._number(sample)) == len(sample.input_ids)


def open_writer(
    output_dir: str | os.PathLike[str],
    settings: Mapping[str, Any],
    shard: Shard | None = None,
    *,
    data: Mapping[str, Any] | None = None,
    checksums: bool = True,
) -> dataio.SampleWriter:
    """The writer for a run with or without a shard.

    Args:
        settings: see :func:`dataio.make_settings`.
        data: what a merge needs to read the prompts again: ``path`` and the arguments of :func:`dataio.read_samples`.

    Raises:
        CompatError: SC607 the folder is in use, SC851 it is divided in another way, SC852 other settings; and what
            :class:`dataio.SampleWriter` raises.
    """
    out = Path(output_dir)
    if shard is None:
        _refuse_shards(out)
        writer = dataio.SampleWriter(out, settings, checksums=checksums)
        try:
            _refuse_shards(out)  # one may have begun meanwhile; it looks for this run after it has made itself known
        except BaseException:
            writer.close(complete=False)
            raise
        return writer
    try:
        out.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise dataio._write_error(out, 0, error) from error
    _agree(out, shard, settings)
    part = ShardWriter(out / shard.folder, settings, checksums=checksums)
    try:
        living = claims.holder(out)
        if living is not None:
            raise claims.in_use(out, living)
        there = dataio.samples_folder(out, part.output).is_dir()
        part.merged = dataio.find_finished(out, layers=part._expected_layers(), output=part.output) if there else {}
        reading = {name: sorted(v) if isinstance(v, (set, frozenset)) else v for name, v in (data or {}).items()}
        part.record(shard={"index": shard.index, "of": shard.count, "host": claims.host(), "data": reading})
    except BaseException:
        part.close(complete=False)
        raise
    return part


def comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without what may differ between machines: where the same model lies."""
    kept: dict[str, Any] = json.loads(json.dumps(settings))
    model = kept.get("model")
    if isinstance(model, dict) and model.get("config_sha256") and model.get("weights"):
        model.pop("path", None)
    return kept


def _divided(out: Path, found: str, mend: str = "") -> CompatError:
    return CompatError(
        "SC851",
        found=f"{out}: {found}",
        expected="one division of the data in a folder",
        why="samples would be there twice",
        mend=mend or f"merge what is there first: python -m speculators_compat.shards {out}",
    )


def _refuse_shards(out: Path) -> None:
    present = folders(out)
    if present or (out / PLAN).exists():
        names = ", ".join(path.name for path in list(present.values())[:3])
        raise _divided(out, f"it holds shards ({names or PLAN}), and this run has no --shard")


def _other(out: Path, names: tuple[str, str], old: Mapping[str, Any], new: Mapping[str, Any]) -> CompatError | None:
    flat = dataio._flat(comparable(old)), dataio._flat(comparable(new))
    keys = [key for key in {**flat[0], **flat[1]} if flat[0].get(key) != flat[1].get(key)]
    if not keys:
        return None
    lines = [
        ", ".join(f"{json.dumps(one.get(key))} in {name}" for one, name in zip(flat, names, strict=True)) for key in keys
    ]
    return CompatError(
        "SC852",
        found=f"{out}:\n" + "\n".join(f"    {key}: {line}" for key, line in zip(keys, lines, strict=True)),
        expected="shards that agree in model, data, layers, dtype and versions",
        why="samples made in different ways must not be mixed in one data set",
        mend="repeat the command as the other shards were made, or give another --output-dir",
    )


def _agree(out: Path, shard: Shard, settings: Mapping[str, Any]) -> None:
    """Write down, or compare, what all shards of a folder must agree in."""
    plan = {"format": PLAN_FORMAT, "of": shard.count, "settings": json.loads(json.dumps(settings))}
    others = {one.count for one in folders(out)} - {shard.count}
    old = _read_plan(out)
    if old is None and not others:
        scratch = out / f"{PLAN}-{secrets.token_hex(8)}"
        try:
            scratch.write_text(json.dumps(plan, indent=1) + "\n")
            try:
                os.link(scratch, out / PLAN)  # appears whole, and only where there is none
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                if not (out / PLAN).exists():
                    os.replace(scratch, out / PLAN)
        except OSError as error:
            raise dataio._write_error(out / PLAN, 0, error) from error
        finally:
            scratch.unlink(missing_ok=True)
        old = _read_plan(out) or plan
    count = old["of"] if old is not None else min(others)
    if count != shard.count:
        raise _divided(
            out,
            f"it is divided into {count} shards, and this is shard {shard}",
            f"--shard I/{count}; or merge what is there, then go on with {shard.count}: "
            f"python -m speculators_compat.shards {out}",
        )
    if old is not None and (wrong := _other(out, ("the other shards", "this one"), old["settings"], settings)):
        raise wrong
    merged = _manifest(out)
    if merged is not None and (wrong := _other(out, ("the folder", "this shard"), merged["settings"], settings)):
        raise wrong


def _read_plan(out: Path) -> dict[str, Any] | None:
    try:
        plan = json.loads((out / PLAN).read_bytes())
        if not isinstance(plan["of"], int) or not isinstance(plan["settings"], dict):
            raise TypeError("of or settings")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise _divided(out, f"{PLAN} can't be read ({error})", f"rm {out / PLAN}, if no shard is running") from None
    return plan  # type: ignore[no-any-return]


def _manifest(folder: Path) -> dict[str, Any] | None:
    """A folder's manifest; ``None`` without one.

    Raises:
        CompatError: SC852 if it can't be read.
    """
    try:
        manifest = json.loads((folder / dataio.MANIFEST).read_bytes())
        if not isinstance(manifest["settings"], dict) or not isinstance(manifest["recorded"], dict):
            raise TypeError("settings or recorded is not an object")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise CompatError(
            "SC852",
            found=f"{folder / dataio.MANIFEST} can't be read: {error}",
            expected="the file as it was written",
            why="how the samples were made is not known",
            mend=f"make the shard again in an empty folder; its samples are in {folder}",
        ) from None
    return manifest  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------------------------ merge


@dataclass
class Merged:
    """What a merge found.

    Attributes:
        samples, tokens: in the output folder now.
        expected: samples that the data calls for.
        moved: samples that this merge has brought there.
        twice: samples that were in two places, with the same content.
        missing: for each shard of the division its missing lines, counted from 1.
    """

    samples: int = 0
    tokens: int = 0
    expected: int = 0
    moved: int = 0
    twice: int = 0
    missing: dict[str, list[int]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    def error(self, output_dir: str | os.PathLike[str]) -> CompatError | None:
        """SC856 if something is missing."""
        if self.complete:
            return None
        lines = sorted(line for one in self.missing.values() for line in one)
        shown = ", ".join(map(str, lines[:_SHOWN])) + (", ..." if len(lines) > _SHOWN else "")
        parts = [f"shard {name} lacks {len(one)}" for name, one in self.missing.items()]
        return CompatError(
            "SC856",
            found=f"{len(lines)} of {self.expected} samples: lines {shown} ({'; '.join(parts[:_SHOWN])})",
            expected="a sample for each usable line of the data",
            why="the rest of the data set is whole; a draft model would be trained on less",
            mend=f"run again: {' '.join(f'--shard {name}' for name in list(self.missing)[:_SHOWN])}, then "
            f"python -m speculators_compat.shards {os.fspath(output_dir)}",
        )


@dataclass
class _Part:
    """A shard that is to be merged."""

    shard: Shard
    folder: Path
    manifest: dict[str, Any]
    finished: dict[int, int] = field(default_factory=dict)
    damaged: list[Path] = field(default_factory=list)
    sums: dict[str, str] = field(default_factory=dict)

    @property
    def samples(self) -> Path:
        return dataio.samples_folder(self.folder, str(self.manifest["settings"].get("format", "pt")))


class _Target(dataio.SampleWriter):
    """The output folder, into which samples are moved. ``reading``: how to read the prompts again."""

    reading: dict[str, Any]

    def digest(self, path: Path) -> str:
        """A sample's checksum, as written down or computed."""
        return (self._sums or {}).get(str(path.relative_to(self.folder))) or dataio.file_checksum(path)

    def adopt(self, number: int, length: int, source: Path, digest: str | None, *, move: bool) -> None:
        """Take a sample from a shard. It is in one place or the other, whole, whenever this is interrupted."""
        target = self._path(number)
        try:
            try:
                if not move:
                    raise OSError(errno.EXDEV, "to be copied")
                os.replace(source, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                temporary = target.with_name(target.name + ".tmp")
                shutil.copyfile(source, temporary)
                with open(temporary, "rb+") as stream:
                    os.fsync(stream.fileno())
                os.replace(temporary, target)
        except OSError as error:
            raise dataio._write_error(target, source.stat().st_size if source.exists() else 0, error) from error
        if self._sums is not None:
            self._add_checksum(target, digest or dataio.file_checksum(target))
        self.finished[number] = length

    def number(self, sample: dataio.Sample) -> int:
        """A sample's number in file names."""
        return self._number(sample)


def merge(
    output_dir: str | os.PathLike[str],
    sources: Collection[str | os.PathLike[str]] = (),
    *,
    prepared_data: str | os.PathLike[str] | None = None,
) -> Merged:
    """Merge shards into their output folder. It may be interrupted and repeated; what is whole already stays as it is.

    Args:
        output_dir: the shards in it are moved; nothing is copied.
        sources: other output folders with shards; those are copied and stay as they are.
        prepared_data: the prompts, if they are not where the shards read them.

    Returns:
        What is there now, and what is missing; no error if something is.

    Raises:
        CompatError: SC607 a shard is still being written, SC851 to SC855 the shards do not fit together; nothing was
            moved then. SC602, SC603, SC610 while the data set is written.
    """
    out = Path(output_dir)
    with contextlib.ExitStack() as stack:
        parts, held = [], []
        for root in [out, *map(Path, sources)]:
            for shard, folder in folders(root).items():
                if root == out:
                    claim = claims.take(folder)
                    stack.callback(claim.release)
                    held.append((folder, claim))
                elif (living := claims.holder(folder)) is not None:
                    raise claims.in_use(folder, living)
                manifest = _manifest(folder)
                if manifest is not None:
                    parts.append(_Part(shard, folder, manifest))
                elif next(folder.rglob("data_*.pt"), None) or next(folder.rglob("hs_*.safetensors"), None):
                    raise CompatError(
                        "SC852",
                        found=f"{folder} holds samples but no {dataio.MANIFEST}",
                        expected="the folder as --shard left it",
                        why="how the samples were made is not known",
                        mend=f"mv {folder} somewhere else, and make shard {shard} again",
                    )
        if not parts and not sources and (done := _merged_before(out)) is not None:
            return done
        if not parts:
            raise CompatError(
                "SC854",
                found=f"no shard with a manifest in {', '.join(map(str, [out, *sources]))}",
                expected="folders shard-I-of-N",
                why="there is nothing to merge",
                mend="give the --output-dir of extractions with --shard",
            )
        _check_alike(out, parts)
        target = stack.enter_context(_opened(out, parts))
        expected = _expected(target, parts, prepared_data)
        result = _move(target, parts, expected, out)
        _finish(target, parts, expected, result)
        for part in parts:
            if part.folder.parent == out:
                _remove(part)
        for folder, claim in held:
            claim.release()
            (folder / dataio.LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir()
        if not folders(out):
            (out / PLAN).unlink(missing_ok=True)
    return result


def _merged_before(out: Path) -> Merged | None:
    """What an earlier merge has made, if nothing is missing there."""
    manifest = _manifest(out) or {}
    if not manifest.get("complete") or not manifest.get("recorded", {}).get("shards"):
        return None
    samples = manifest["samples"]
    if sum(1 for name in ("data_*.pt", "hidden_states/hs_*.safetensors") for _ in out.glob(name)) != samples:
        return None
    return Merged(samples=samples, tokens=manifest["tokens"], expected=samples)


@contextlib.contextmanager
def _opened(out: Path, parts: list[_Part]) -> Iterator[_Target]:
    first = parts[0]
    settings = first.manifest["settings"]
    merged = _manifest(out)
    if merged is not None:
        if error := _other(out, ("the folder", first.folder.name), merged["settings"], settings):
            raise error
        settings = merged["settings"]  # the model's path as it was
    target = _Target(out, settings, checksums=any((part.folder / dataio.CHECKSUMS).exists() for part in parts))
    try:
        yield target
    except BaseException:
        with contextlib.suppress(CompatError):
            target.close(complete=False)
        raise


def _value(manifest: Mapping[str, Any], name: str) -> Any:
    value: Any = manifest["recorded"]
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _check_alike(out: Path, parts: list[_Part]) -> None:
    counts = sorted({part.shard.count for part in parts})
    if len(counts) > 1:
        found = f"shards of {' and of '.join(map(str, counts))}"
        raise _divided(out, found, "merge those of one division at a time: move the others away")
    first = parts[0]
    for part in parts[1:]:
        names = (first.folder.name, part.folder.name)
        if error := _other(out, names, first.manifest["settings"], part.manifest["settings"]):
            raise error
    for name in _RECORDED:
        # A shard that had nothing to do has recorded nothing.
        known = [(part.folder.name, value) for part in parts if (value := _value(part.manifest, name)) is not None]
        for folder, value in known[1:]:
            if value != known[0][1] and (
                error := _other(out, (known[0][0], folder), {name: known[0][1]}, {name: value})
            ):
                raise error


def _expected(
    target: _Target, parts: list[_Part], prepared_data: str | os.PathLike[str] | None
) -> dict[int, dataio.Sample]:
    """The samples that the data calls for, by their number, without their tokens."""
    reading = [part.manifest["recorded"].get("shard", {}).get("data", {}) for part in parts]
    reading = [one for one in reading if one] or [{}]
    path = prepared_data if prepared_data is not None else reading[0].get("path")
    limits = [one.get("limit") for one in reading]
    arguments: dict[str, Any] = {
        "vocab_size": reading[0].get("vocab_size"),
        "max_seq_len": target.settings.get("max_seq_len"),
        "placeholders": frozenset(reading[0].get("placeholders", ())),
    }

    def needed(found: str) -> CompatError:
        return CompatError(
            "SC855",
            found=found,
            expected="the prompts that the shards were made from",
            why="without them nobody can tell which samples are missing",
            mend=f"python -m speculators_compat.shards {target.folder} --prepared-data FILE.jsonl",
        )

    if path is None:
        raise needed("the shards do not say which file they were made from")
    try:
        data = dataio.check_data_file(path, **arguments)
    except CompatError as error:
        raise needed(error.found) from None
    if data.sha256 != target.settings["data"]["sha256"]:
        raise needed(f"{path} has changed since the shards were made")
    limit = None if None in limits else max(limits)
    target.reading = {"path": path, **arguments, "limit": limit}
    samples = (s for s in dataio.read_samples(path, limit=limit, **arguments) if isinstance(s, dataio.Sample))
    # Of the tokens only their number is needed: all of them would not fit into memory.
    bare: dict[str, Any] = {"input_ids": [], "loss_mask": None}
    return {target.number(s): dataclasses.replace(s, **bare, original_length=len(s.input_ids)) for s in samples}


def _move(target: _Target, parts: list[_Part], expected: Mapping[int, dataio.Sample], out: Path) -> Merged:
    def foreign(found: str) -> CompatError:
        return CompatError(
            "SC853",
            found=found,
            expected="in each shard the samples of its lines, and each of them once",
            why="something else than --shard has put it there",
            mend="move the file away, and make the shard again if its own samples are damaged",
        )

    layers = target._expected_layers() or next(
        (n for part in parts if isinstance(n := _value(part.manifest, "layers"), int)), None
    )
    result = Merged(expected=len(expected))
    homes: dict[int, tuple[Path, str]] = {
        number: (path, target.digest(path)) for number in target.finished if (path := target._path(number))
    }
    moves: list[tuple[int, int, Path, str, bool]] = []
    extra: list[Path] = []
    # All is looked at before anything is moved.
    for part in parts:
        if part.samples.is_dir():
            part.finished, part.damaged = dataio._scan(part.samples, layers, target.output)
        part.sums = _sums(part.folder)
        for number, length in part.finished.items():
            path = part.samples / target._path(number).name
            sample = expected.get(number)
            if sample is None or not part.shard.holds(sample) or sample.original_length != length:
                raise foreign(f"{path}: {length} tokens; not a sample of shard {part.shard}")
            digest = part.sums.get(str(path.relative_to(part.folder))) or dataio.file_checksum(path)
            if number in homes:
                if homes[number][1] != digest:
                    raise foreign(f"{path} and {homes[number][0]} are the same sample with different content")
                result.twice += 1
                if part.folder.parent == out:
                    extra.append(path)
                continue
            homes[number] = (path, digest)
            moves.append((number, length, path, digest, part.folder.parent == out))
    _record(target, parts)
    for number, length, path, digest, move in moves:
        target.adopt(number, length, path, digest, move=move)
    dataio._sync_folder(target.samples)
    for path in extra:
        path.unlink()
    result.moved = len(moves)
    result.samples, result.tokens = len(target.finished), sum(target.finished.values())
    count = parts[0].shard.count
    for number, sample in expected.items():
        if target.finished.get(number) != sample.original_length:
            assert sample.ordinal is not None
            result.missing.setdefault(str(Shard(sample.ordinal % count, count)), []).append(sample.line)
    return result


def _sums(folder: Path) -> dict[str, str]:
    known: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / dataio.CHECKSUMS).read_text(errors="replace").splitlines():
            digest, _, name = line.partition("  ")
            if len(digest) == 64:
                known[name] = digest
    return known


def _record(target: _Target, parts: list[_Part]) -> None:
    """Take over what the shards have recorded; a merge that is repeated finds it done."""
    entries: list[dict[str, Any]] = target.noted("shards") or []
    alignment: Any = target.noted("alignment")
    known = {(entry["shard"], entry["started"]) for entry in entries}
    for part in parts:
        recorded = part.manifest["recorded"]
        if (str(part.shard), recorded.get("started")) in known:
            continue
        entries.append(
            {
                "shard": str(part.shard),
                "samples": len(part.finished),
                "tokens": sum(part.finished.values()),
                "host": recorded.get("shard", {}).get("host"),
                **{name: recorded.get(name) for name in ("started", "updated", "alignment", "way", "engine")},
            }
        )
        alignment = _added(alignment, recorded.get("alignment"))
        own = {name: value for name, value in recorded.items() if name not in ("shard", "checksums", "started", "updated")}
        target.note(**{name: value for name, value in own.items() if target.noted(name) is None})
    target.record(shards=entries, alignment=alignment)


def _added(one: Any, other: Any) -> Any:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return other if one is None else one
    summed = dict(one)
    for name, value in other.items():
        if isinstance(value, dict):
            summed[name] = _added(summed.get(name, {}), value)
        elif isinstance(value, int) and not isinstance(value, bool):
            summed[name] = summed.get(name, 0) + value
        else:
            summed.setdefault(name, value)
    return summed


def _finish(target: _Target, parts: list[_Part], expected: Mapping[int, dataio.Sample], result: Merged) -> None:
    if target.output == "safetensors":
        reading = dict(target.reading)
        again = dataio.read_samples(reading.pop("path"), **reading)
        target.write_dataset(sample for sample in again if isinstance(sample, dataio.Sample))
    target.close(complete=result.complete)


def _remove(part: _Part) -> None:
    """What is left of a shard whose samples have moved."""
    for path in [*part.damaged, *(part.folder / n for n in (dataio.MANIFEST, dataio.CHECKSUMS, dataio.LENGTHS))]:
        path.unlink(missing_ok=True)
    for left in [*part.folder.glob("*.tmp"), *part.samples.glob("*.tmp")]:
        left.unlink(missing_ok=True)
    if part.samples != part.folder:
        with contextlib.suppress(OSError):
            part.samples.rmdir()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the merge; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m speculators_compat.shards", description="Merge the shards of a data set (--shard I/N)."
    )
    parser.add_argument("output_dir", type=Path, help="the extractions' --output-dir")
    parser.add_argument("sources", type=Path, nargs="*", help="other output folders that hold shards; they are copied")
    parser.add_argument("--prepared-data", metavar="FILE.jsonl", help="the prompts, if they have moved")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args(argv)
    try:
        result = merge(args.output_dir, args.sources, prepared_data=args.prepared_data)
    except CompatError as error:
        print(error, file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({**dataclasses.asdict(result), "complete": result.complete}, indent=1))
    else:
        print(f"merged:  {result.moved} samples moved, {result.twice} were there twice")
        print(f"now:     {result.samples} of {result.expected} samples, {result.tokens:,} tokens in {args.output_dir}")
    lacking = result.error(args.output_dir)
    if lacking is not None:
        print(lacking, file=sys.stderr)
    return 1 if lacking is not None else 0


if __name__ == "__main__":
    sys.exit(main())
