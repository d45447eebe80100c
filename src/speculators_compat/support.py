"""What is supported, release by release: the matrix together with the condensed evidence in ``support.json``.

``compat-check --list`` and README's table are made from this. ``tools/support_table.py`` writes the evidence file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from .matrix import Lineage, Matrix, Row

__all__ = ["LABELS", "Column", "Entry", "Line", "Proof", "columns", "load_support", "notes", "spans", "table"]

SCHEMA = 1
#: How a status is called where people read it.
LABELS = {
    "verified": "verified",
    "structural": "structural only",
    "unsupported": "not supported",
    "untested": "untested",
}


@dataclass(frozen=True)
class Proof:
    """The evidence for one vLLM release with one speculators release.

    Attributes:
        status: ``verified``, ``structural`` or ``failed``.
        date: when it was run, as in 2026-12-01.
        way: the adapter set that was run.
        error: the largest relative error; ``None`` if nothing was run.
        notes: what the run did differently, and why.
    """

    status: str
    date: str
    way: str
    error: float | None = None
    notes: tuple[str, ...] = ()


Proofs = Mapping[tuple[Version, Version], Proof]


@dataclass(frozen=True)
class Column:
    """A speculators release, or a whole line of which no release is listed."""

    name: str
    lineage: str
    release: Version | None


@dataclass(frozen=True)
class Entry:
    """What is said of some vLLM releases with a column.

    Attributes:
        status: the matrix's; ``untested`` where it says ``verified`` or ``structural`` without evidence.
        way: name of the adapter set; empty where unsupported.
        dates: the first and the last of the runs; empty if nothing was run.
        error: the largest relative error of the runs.
    """

    status: str
    way: str
    dates: tuple[str, ...] = ()
    error: float | None = None

    @property
    def date(self) -> str:
        """The dates in words."""
        return " to ".join(dict.fromkeys(self.dates))


@dataclass(frozen=True)
class Line:
    """Consecutive releases of one row of which the same is said; an entry for each column."""

    row: Row
    releases: tuple[Version, ...]
    entries: tuple[Entry, ...]


def load_support(path: Path | None = None) -> dict[tuple[Version, Version], Proof]:
    """The condensed evidence, by vLLM and speculators release.

    Args:
        path: the file; by default the one that comes with the package.
    """
    path = Path(__file__).with_name("support.json") if path is None else path
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if data["schema"] != SCHEMA:
        raise ValueError(f"{path} has the schema {data['schema']}, and this version reads {SCHEMA}")
    return {
        (Version(cell["vllm"]), Version(cell["speculators"])): Proof(
            cell["status"], cell["date"], cell["way"], cell.get("error"), tuple(cell.get("notes", ()))
        )
        for cell in data["cells"]
    }


def columns(lineages: Iterable[Lineage]) -> tuple[Column, ...]:
    """Every listed release of the lines; a line that lists none is one column."""
    return tuple(
        Column(str(release or line.name), line.name, release)
        for line in lineages
        for release in (line.releases or (None,))
    )


def entry(row: Row, release: Version, column: Column, proofs: Proofs) -> Entry:
    """What is said of one vLLM release with a column."""
    cell = row.cells[column.lineage].for_release(release)
    way = cell.adapter_set or ""
    proof = proofs.get((release, column.release)) if column.release else None
    if cell.status not in ("verified", "structural"):
        return Entry(cell.status, way)
    if proof is None or proof.status not in ("verified", cell.status):
        return Entry("untested", way)
    return Entry(cell.status, way, (proof.date,), proof.error if cell.status == "verified" else None)


def table(matrix: Matrix, proofs: Proofs) -> list[Line]:
    """Every row's releases; neighbours with equal status and way in every column are one line."""
    heads = columns(matrix.lineages.values())
    lines: list[Line] = []
    for row in matrix.rows:
        for release in row.releases:
            entries = tuple(entry(row, release, column, proofs) for column in heads)
            last = lines[-1] if lines else None
            if last and last.row is row and [_kind(e) for e in last.entries] == [_kind(e) for e in entries]:
                merged = tuple(merge(pair) for pair in zip(last.entries, entries, strict=True))
                lines[-1] = Line(row, (*last.releases, release), merged)
            else:
                lines.append(Line(row, (release,), entries))
    return lines


def _kind(one: Entry) -> tuple[str, str]:
    return one.status, one.way


def merge(entries: Sequence[Entry]) -> Entry:
    """Several entries of equal status and way as one: the first and the last date, the largest error."""
    dates = sorted(date for one in entries for date in one.dates)
    errors = [one.error for one in entries if one.error is not None]
    first = entries[0]
    return Entry(first.status, first.way, tuple(dates[:1] + dates[-1:]), max(errors, default=None))


def side_by_side(line: Line, heads: Sequence[Column]) -> Iterator[tuple[tuple[Column, ...], Entry]]:
    """The line's entries, those of neighbouring columns with equal status and way as one."""
    start = 0
    for end in range(1, len(heads) + 1):
        if end == len(heads) or _kind(line.entries[end]) != _kind(line.entries[start]):
            yield tuple(heads[start:end]), merge(line.entries[start:end])
            start = end


def alike(lines: Sequence[Line], heads: Sequence[Column]) -> Iterator[list[int]]:
    """Neighbouring columns of which every line says the same, as lists of their numbers."""
    group: list[int] = []
    for number in range(len(heads)):
        if group and any(_kind(line.entries[number]) != _kind(line.entries[group[0]]) for line in lines):
            yield group
            group = []
        group.append(number)
    yield group


def notes(matrix: Matrix, proofs: Proofs) -> dict[str, list[Version]]:
    """What is to be said beside the table: each text, and the vLLM releases that it is about."""
    found: dict[str, list[Version]] = {}
    for row in matrix.rows:
        for release in row.releases:
            texts = []
            for column in columns(matrix.lineages.values()):
                cell = row.cells[column.lineage].for_release(release)
                of = f"speculators {column.lineage}: "
                if cell.note:
                    texts.append(of + cell.note)
                if cell.why:
                    texts.append(f"{of}{cell.why}; mend: {cell.mend}")
                proof = proofs.get((release, column.release)) if column.release else None
                if proof is not None and entry(row, release, column, proofs).dates:
                    texts += proof.notes
            for text in dict.fromkeys(texts):
                found.setdefault(text, []).append(release)
    return found


def spans(releases: Sequence[Version], known: Sequence[Version], to: str = " to ") -> str:
    """Releases in words, such as ``0.11.0, 0.12.0 to 0.15.1``; ``known`` are all that there are, in order."""
    texts: list[str] = []
    start = 0
    for end in range(1, len(releases) + 1):
        if end < len(releases) and known.index(releases[end]) == known.index(releases[end - 1]) + 1:
            continue
        run = [str(version) for version in releases[start:end]]
        texts += [f"{run[0]}{to}{run[-1]}"] if len(run) > 1 else run
        start = end
    return ", ".join(texts)
