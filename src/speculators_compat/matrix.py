"""The compatibility matrix: ``compat_matrix.yaml``, checked as a whole, and the choice of a row.

The file is meant to be read by people; this module only checks and looks up what is written there.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from .errors import CompatError

__all__ = ["Cell", "Lineage", "Matrix", "Row", "Selection", "load_matrix"]

SCHEMA = 1
#: The set of adapters for releases of speculators that have no generator: the plugin's class on vLLM's engine.
RESTORED = "restored"
STATUSES = ("verified", "structural", "unsupported", "untested")

_TOP_KEYS = ("schema", "lineages", "adapter_sets", "rows")
_SERVER_KEYS = ("adapters", "client", "rows")
_SERVER_ROW_KEYS = ("vllm", "releases", "status", "evidence", "note")
_LINEAGE_KEYS = ("speculators", "releases", "note")
_CELL_KEYS = ("status", "adapters", "evidence", "note", "why", "mend", "except")
_EXCEPT_KEYS = ("status", "evidence", "note", "why", "mend")
_RANGE = re.compile(r"\s*>=\s*([^,<>=!~\s]+)\s*,\s*<\s*([^,<>=!~\s]+)\s*")
_RELEASES_MEND = "write them in full, oldest first, for example [0.12.0, 0.13.0]"
_RANGE_MEND = 'write ">=A,<B" in quotes, with A and B as plain releases, for example ">=0.12,<0.16"'


@dataclass(frozen=True)
class Cell:
    """What the matrix says of one vLLM range with one speculators line.

    Attributes:
        status: one of :data:`STATUSES`.
        adapters: adapter ids in the order of application; empty when unsupported.
        adapter_set: the name that stands for them in the file; ``None`` when unsupported.
        evidence: where the proof is kept.
        note: anything a reader should know.
        why: what is in the way, when unsupported.
        mend: what to do instead, when unsupported.
        exceptions: the cells of single releases in the range that differ.
    """

    status: str
    adapters: tuple[str, ...]
    adapter_set: str | None
    evidence: str | None
    note: str | None
    why: str | None
    mend: str | None
    exceptions: dict[Version, Cell] = field(default_factory=dict)

    def for_release(self, release: Version) -> Cell:
        """What is said of one release: its exception, or else this cell."""
        return self.exceptions.get(Version(release.base_version), self)


@dataclass(frozen=True)
class Row:
    """One vLLM range ``lower <= version < upper`` with a cell for each line of speculators.

    Attributes:
        releases: the releases that the row speaks for, oldest first; others in the range only resemble them.
    """

    vllm: str
    lower: Version
    upper: Version
    cells: dict[str, Cell]
    releases: tuple[Version, ...]


@dataclass(frozen=True)
class Lineage:
    """One release line of speculators, ``lower <= version < upper``.

    Attributes:
        releases: the releases that the line speaks for, oldest first; ``None`` for all in the range.
    """

    name: str
    speculators: str
    lower: Version
    upper: Version
    note: str | None = None
    releases: tuple[Version, ...] | None = None


@dataclass(frozen=True)
class ServerRow:
    """How well the server path is proved on one vLLM range, ``lower <= version < upper``.

    Attributes:
        releases: the releases that the row speaks for.
        status: one of :data:`STATUSES` but ``unsupported``.
        evidence: where the proof is kept.
        note: anything a reader should know.
    """

    vllm: str
    lower: Version
    upper: Version
    releases: tuple[Version, ...]
    status: str
    evidence: str | None
    note: str | None


@dataclass(frozen=True)
class Selection:
    """The cell chosen for two versions.

    Attributes:
        row: the row.
        lineage: name of the speculators line.
        cell: the row's cell for that line, or what it says of this release in particular.
        exact: whether both versions are releases that the matrix lists, not merely near to some.
        reason: how the choice was made, in words.
    """

    row: Row
    lineage: str
    cell: Cell
    exact: bool
    reason: str


@dataclass(frozen=True)
class Matrix:
    """A valid matrix, rows and lines in ascending order."""

    rows: tuple[Row, ...]
    lineages: dict[str, Lineage]
    adapter_sets: dict[str, tuple[str, ...]]
    server_rows: tuple[ServerRow, ...] = ()
    server_adapters: tuple[str, ...] = ()
    client_adapters: tuple[str, ...] = ()

    def select_server(self, vllm: Version) -> tuple[ServerRow, bool, str]:
        """The server path's row for a vLLM, whether that is exact, and why, in words.

        Raises:
            CompatError: SC800 for a vLLM that has no ``extract_hidden_states`` method.
        """
        rows = [(r, r.vllm, r.lower, r.upper, r.releases) for r in self.server_rows]
        if not rows or Version(vllm.base_version) < rows[0][2]:
            first = rows[0][2] if rows else "0.17.0"
            raise CompatError(
                "SC800",
                found=f"vLLM {vllm}",
                expected=f"vLLM {first} or newer",
                why="vLLM has the method extract_hidden_states, which speculators' client talks to, from 0.17.0 on",
                mend="extract in-process (docs/ways.md), or install a newer vLLM for the server",
            )
        found: tuple[ServerRow, bool, str] = _nearest("vLLM", "server row", vllm, rows)
        return found

    def select(self, vllm: Version, speculators: Version) -> Selection:
        """Choose the cell for two installed versions.

        A version counts as the release it is a build of: post-releases and local builds exactly, pre-releases
        and development builds as the nearest thing to it. Newer versions take the last row, and releases that
        the row does not list take the row whose range holds them.

        Raises:
            CompatError: SC203 for a version older than everything listed.
        """
        row, row_exact, row_reason = _nearest(
            "vLLM", "row", vllm, [(r, r.vllm, r.lower, r.upper, r.releases) for r in self.rows]
        )
        line, line_exact, line_reason = _nearest(
            "speculators",
            "line",
            speculators,
            [
                (x, f"{x.name} ({x.speculators})", x.lower, x.upper, x.releases)
                for x in self.lineages.values()
            ],
        )
        exact = row_exact and line_exact
        cell = row.cells[line.name].for_release(vllm)
        return Selection(row, line.name, cell, exact, f"{row_reason}; {line_reason}")

    def choose(self, selection: Selection, forced: str | None) -> tuple[str, tuple[str, ...]]:
        """The way and its adapters, the user's choice considered.

        Args:
            forced: the way that the user asks for, or ``None``.

        Raises:
            CompatError: SC307 for the way in-process where speculators has no class of its own.
        """
        cell = selection.cell
        if forced is None or (forced == "engine" and cell.adapter_set == RESTORED):
            return cell.adapter_set or "", cell.adapters
        if cell.adapter_set == RESTORED:
            raise CompatError(
                "SC307",
                found=f"the way {forced} for speculators {selection.lineage}",
                expected="the restored class, which drives vLLM's public engine",
                why="speculators 0.5.0 removed the class that drives vLLM's scheduler itself",
                mend="unset SPECULATORS_COMPAT_WAY, or pip install --no-deps speculators==0.4.0.1",
            )
        return forced, self.adapter_sets[forced]


def _nearest(
    what: str,
    kind: str,
    version: Version,
    ranges: Sequence[tuple[Any, str, Version, Version, tuple[Version, ...] | None]],
) -> tuple[Any, bool, str]:
    """The range that holds ``version`` or is nearest to it; whether that is exact; why, in words."""
    # 0.17.0rc1 sorts before 0.17.0, but its code is that of 0.17: compare what it is going to be.
    base = Version(version.base_version)
    first, last = ranges[0], ranges[-1]
    if base < first[2]:
        raise CompatError(
            "SC203",
            found=f"{what} {version}",
            expected=f"{what} {first[2]} or newer",
            why=f"the oldest {kind} of the matrix is {first[1]}; older code lacks what the adapters build on",
            mend=f"install a newer {what} (compat-check --list shows which)",
        )
    if base >= last[3]:
        return last[0], False, f"{what} {version} is newer than every {kind}; the nearest is {last[1]}"
    value, text, _, _, releases = next(entry for entry in ranges if entry[2] <= base < entry[3])
    if version.is_prerelease:
        return (
            value,
            False,
            f"{what} {version} is a build before the release {base}; the nearest {kind} is {text}",
        )
    if releases is not None and base not in releases:
        return (
            value,
            False,
            f"{what} {version} is in the range of the {kind} {text}, but none of the releases that it lists",
        )
    return value, True, f"{what} {version} is in the {kind} {text}"


class _Problems:
    """Collects every fault of the file, so that one reading mends them all."""

    def __init__(self, lines: dict[tuple[object, ...], int]) -> None:
        self._lines = lines
        self.found: list[str] = []

    def add(self, path: tuple[object, ...], where: str, fault: str, mend: str) -> None:
        line = next((self._lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self._lines), None)
        at = f"line {line}, " if line else ""
        self.found.append(f"{at}{where}: {fault}; mend: {mend}")

    def text(
        self, mapping: dict[object, object], key: str, path: tuple[object, ...], where: str
    ) -> str | None:
        """An optional text field; anything but text with something in it is a fault."""
        value = mapping.get(key)
        if value is None and key not in mapping:
            return None
        if not isinstance(value, str) or not value.strip():
            self.add(
                (*path, key), f"{where}.{key}", f"is {_show(value)}", "write text, or leave the field out"
            )
            return None
        return value

    def keys(
        self,
        mapping: dict[object, object],
        known: Collection[str],
        needed: Iterable[str],
        path: tuple[object, ...],
        prefix: str,
    ) -> None:
        """Report keys that are unknown and keys that are missing."""
        for key in mapping:
            if isinstance(key, str) and key in known:
                continue
            if not isinstance(key, str):
                mend = f'put the key in quotes: "{key}"'
            else:
                mend = f"{_did_you_mean(key, known)}the keys here are {', '.join(known)}"
            self.add((*path, key), f"{prefix}{key}", "is an unknown key", mend)
        for key in needed:
            if key not in mapping:
                self.add(path, f"{prefix}{key}", "is missing", f"add {key} here")

    def versions(self, value: object, path: tuple[object, ...], where: str) -> tuple[Version, Version] | None:
        """The bounds of ``">=A,<B"``."""
        found = _RANGE.fullmatch(value) if isinstance(value, str) else None
        if found is None:
            self.add(
                path, where, f"{_show(value)} is not a range with one lower and one upper bound", _RANGE_MEND
            )
            return None
        try:
            lower, upper = Version(found.group(1)), Version(found.group(2))
        except InvalidVersion as error:
            self.add(path, where, f"{_show(value)} is not a range of versions ({error})", _RANGE_MEND)
            return None
        for bound in (lower, upper):
            if str(bound) != bound.base_version:
                self.add(path, where, f"the bound {bound} is not a plain release", _RANGE_MEND)
                return None
        if lower >= upper:
            self.add(path, where, f"{_show(value)} holds no version", "put the smaller version first")
            return None
        return lower, upper

    def releases(
        self,
        value: object,
        bounds: tuple[Version, Version] | None,
        path: tuple[object, ...],
        where: str,
    ) -> tuple[Version, ...]:
        """The versions of a list of releases, each a plain one within ``bounds``, in ascending order."""
        if not isinstance(value, list) or not value:
            self.add(path, where, f"is {_kind(value)} without entries", _RELEASES_MEND)
            return ()
        found: list[Version] = []
        for number, entry in enumerate(value):
            at = (*path, number)
            version = self.release(entry, bounds, at, where)
            if version is None:
                continue
            if found and version == found[-1]:
                self.add(at, where, f"names {version} twice", "delete one of the two")
            elif found and version < found[-1]:
                self.add(at, where, f"{version} comes after {found[-1]}", _RELEASES_MEND)
            found.append(version)
        return tuple(found)

    def release(
        self,
        value: object,
        bounds: tuple[Version, Version] | None,
        path: tuple[object, ...],
        where: str,
    ) -> Version | None:
        """One plain release within ``bounds``."""
        try:
            version = Version(value) if isinstance(value, str) else None
        except InvalidVersion:
            version = None
        if version is None or str(version) != version.base_version:
            self.add(path, where, f"{_show(value)} is not a plain release", _RELEASES_MEND)
            return None
        if bounds and not bounds[0] <= version < bounds[1]:
            mend = f"it must be from {bounds[0]} on and below {bounds[1]}: list it where it belongs"
            self.add(path, where, f"{version} is not in the range", mend)
        return version

    def contiguous(
        self, ranges: Sequence[tuple[Version, Version, str, tuple[object, ...]]], what: str
    ) -> None:
        """Report ranges that overlap, and versions between them that no range holds. ``ranges`` is sorted."""
        for (_, upper, before, _), (lower, _, after, path) in itertools.pairwise(ranges):
            if lower < upper:
                mend = f"begin {after} with >={upper}, or end {before} with <{lower}"
                self.add(path, after, f"overlaps with {before}: {what} {lower} is in both", mend)
            elif lower > upper:
                mend = f"begin {after} with >={upper}, or add what lies between"
                self.add(path, after, f"leaves a gap: {what} {upper} up to {lower} is in no range", mend)


def _show(value: object) -> str:
    return "empty" if value is None else repr(value)


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]}? " if close else ""


def _read(path: Path) -> tuple[object, dict[tuple[object, ...], int], list[str]]:
    """The file's data, the line of every field, and faults that only show in the text: keys written twice."""
    import yaml

    loader_class: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    lines: dict[tuple[object, ...], int] = {}
    twice: list[str] = []

    def walk(node: Any, where: tuple[object, ...], above: tuple[int, ...]) -> None:
        if id(node) in above:  # an alias of something that holds it
            return
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key_node, value_node in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    continue  # the constructor refuses it
                field = (*where, loader.construct_object(key_node))
                line = key_node.start_mark.line + 1
                fault = (
                    f"line {line}, {'.'.join(map(str, field))}: the key is there twice, "
                    "and the first one would be lost; mend: delete one of the two"
                )
                if key_node.value in seen and fault not in twice:
                    twice.append(fault)
                seen.add(key_node.value)
                lines[field] = line
                walk(value_node, field, above)
        elif isinstance(node, yaml.SequenceNode):
            for number, child in enumerate(node.value):
                item = (*where, number)
                lines[item] = child.start_mark.line + 1
                walk(child, item, above)

    loader = loader_class(path.read_text(encoding="utf-8"))
    try:
        node = loader.get_single_node()
        if node is None:
            return None, lines, twice
        walk(node, (), ())
        return loader.construct_document(node), lines, twice
    finally:
        loader.dispose()


def load_matrix(path: Path | None = None, known_adapters: Collection[str] | None = None) -> Matrix:
    """Read and check the matrix.

    Args:
        path: the file; by default the one that comes with the package.
        known_adapters: ids of the adapters that exist; without it, ids are not checked.

    Raises:
        CompatError: SC201, which lists every fault with its row, its field and the mend.
    """
    import yaml

    path = Path(__file__).with_name("compat_matrix.yaml") if path is None else path
    try:
        data, lines, faults = _read(path)
    except (OSError, UnicodeDecodeError) as error:
        raise _invalid(path, [f"the file can't be read: {error}; mend: install the package again"]) from None
    except yaml.YAMLError as error:
        text = " ".join(str(error).split())
        raise _invalid(
            path, [f"the file is not YAML: {text}; mend: correct the line that is named"]
        ) from None

    problems = _Problems(lines)
    problems.found += faults
    matrix = _matrix(data, problems, known_adapters)
    if matrix is None or problems.found:
        raise _invalid(path, problems.found)
    return matrix


def _invalid(path: Path, faults: list[str]) -> CompatError:
    head = f"{path} has {len(faults)} fault{'s' if len(faults) != 1 else ''}"
    return CompatError(
        "SC201",
        found="\n    - ".join([head, *faults]),
        expected="a matrix in which every field is known and every vLLM version has exactly one row",
        why="adapters would be chosen by what happens to be readable, perhaps the wrong ones",
        mend="correct each of them as it says, or install the package again for an unchanged file",
    )


def _matrix(data: object, problems: _Problems, known_adapters: Collection[str] | None) -> Matrix | None:
    if not isinstance(data, dict):
        mend = f"begin with {', '.join(f'{key}:' for key in _TOP_KEYS)}"
        problems.add((), "the file", f"is not a mapping but {_kind(data)}", mend)
        return None
    problems.keys(data, (*_TOP_KEYS, "server"), _TOP_KEYS, (), "")
    schema = data.get("schema", SCHEMA)
    if type(schema) is not int or schema != SCHEMA:
        mend = f"write schema: {SCHEMA}, or install the speculators-compat that this file belongs to"
        problems.add(("schema",), "schema", f"is {_show(schema)}, and this version reads {SCHEMA}", mend)
    lineages = _lineages(data.get("lineages"), "lineages" in data, problems)
    sets = _adapter_sets(data.get("adapter_sets"), "adapter_sets" in data, problems, known_adapters)
    rows = _rows(
        data.get("rows"), "rows" in data, problems, data.get("lineages"), data.get("adapter_sets"), sets
    )
    server = _server(data["server"], problems, sets) if "server" in data else ((), (), ())
    return Matrix(tuple(sorted(rows, key=lambda row: row.lower)), lineages, sets, *server)


def _server(
    value: object, problems: _Problems, sets: dict[str, tuple[str, ...]]
) -> tuple[tuple[ServerRow, ...], tuple[str, ...], tuple[str, ...]]:
    """The section ``server``: its rows, the server's adapters and the client's."""
    if not isinstance(value, dict):
        mend = "write adapters:, client: and rows: below it"
        problems.add(("server",), "server", f"is not a mapping but {_kind(value)}", mend)
        return (), (), ()
    problems.keys(value, _SERVER_KEYS, _SERVER_KEYS, ("server",), "server.")
    chosen = []
    for key in _SERVER_KEYS[:2]:
        name = problems.text(value, key, ("server",), "server")
        if name is not None and name not in sets:
            mend = f"{_did_you_mean(name, sets)}the sets are {', '.join(sets)}"
            problems.add(("server", key), f"server.{key}", f"there is no adapter set {name}", mend)
        chosen.append(sets.get(name or "", ()))
    entries = value.get("rows")
    if not isinstance(entries, list) or not entries:
        mend = 'write one entry for each range, beginning with - vllm: ">=A,<B"'
        problems.add(("server", "rows"), "server.rows", f"is {_kind(entries)} without entries", mend)
        return (), chosen[0], chosen[1]
    rows, ranges = [], []
    for number, entry in enumerate(entries):
        path: tuple[object, ...] = ("server", "rows", number)
        if not isinstance(entry, dict):
            problems.add(path, "server.rows", f"holds {_kind(entry)}", "write {vllm: ..., releases: ..., status: ...}")
            continue
        where = f"server row {entry.get('vllm', number + 1)}"
        problems.keys(entry, _SERVER_ROW_KEYS, _SERVER_ROW_KEYS[:3], path, f"{where}, ")
        bounds = problems.versions(entry.get("vllm"), (*path, "vllm"), where)
        releases = problems.releases(entry.get("releases"), bounds, (*path, "releases"), f"{where}, releases")
        status, evidence, note = (problems.text(entry, key, path, where) for key in _SERVER_ROW_KEYS[2:])
        if status is not None and (status not in STATUSES or status == "unsupported"):
            allowed = ", ".join(s for s in STATUSES if s != "unsupported")
            problems.add((*path, "status"), f"{where}.status", f"{_show(status)} is no status", f"one of {allowed}")
        if status == "verified" and evidence is None:
            mend = "name the file that proves it, or set status: untested"
            problems.add(path, f"{where}.evidence", "is missing for a verified row", mend)
        if bounds:
            rows.append(ServerRow(str(entry["vllm"]), *bounds, releases, str(status), evidence, note))
            ranges.append((*bounds, where, (*path, "vllm")))
    problems.contiguous(sorted(ranges, key=lambda entry: entry[0]), "vLLM")
    return tuple(sorted(rows, key=lambda row: row.lower)), chosen[0], chosen[1]


def _kind(value: object) -> str:
    kinds = {dict: "a mapping", list: "a list", str: "text", type(None): "empty"}
    return kinds.get(type(value), type(value).__name__)


def _lineages(value: object, there: bool, problems: _Problems) -> dict[str, Lineage]:
    if not isinstance(value, dict) or not value:
        if there:
            mend = 'write one line for each, such as "0.4": {speculators: ">=0.4,<0.5"}'
            problems.add(("lineages",), "lineages", f"is {_kind(value)} without entries", mend)
        return {}
    found: list[Lineage] = []
    for name, entry in value.items():
        path, where = ("lineages", name), f"lineages.{name}"
        if not isinstance(name, str):
            problems.add(path, where, "the name is not text", f'put it in quotes: "{name}"')
        if not isinstance(entry, dict):
            problems.add(path, where, f"is not a mapping but {_kind(entry)}", 'write {speculators: ">=A,<B"}')
            continue
        problems.keys(entry, _LINEAGE_KEYS, ("speculators",), path, f"{where}.")
        note = problems.text(entry, "note", path, where)
        if "speculators" in entry:
            spec = entry["speculators"]
            bounds = problems.versions(spec, (*path, "speculators"), f"{where}.speculators")
            listed = None
            if "releases" in entry:
                at = (*path, "releases")
                listed = problems.releases(entry["releases"], bounds, at, f"{where}.releases")
            if bounds:
                found.append(Lineage(str(name), spec, *bounds, note, listed))
    found.sort(key=lambda line: line.lower)
    ranges = [(x.lower, x.upper, f"lineages.{x.name}", ("lineages", x.name)) for x in found]
    problems.contiguous(ranges, "speculators")
    return {line.name: line for line in found}


def _adapter_sets(
    value: object, there: bool, problems: _Problems, known: Collection[str] | None
) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict) or not value:
        if there:
            mend = "write a name and the ids of the adapters below it"
            problems.add(("adapter_sets",), "adapter_sets", f"is {_kind(value)} without entries", mend)
        return {}
    sets: dict[str, tuple[str, ...]] = {}
    for name, ids in value.items():
        path, where = ("adapter_sets", name), f"adapter_sets.{name}"
        if not isinstance(name, str):
            problems.add(path, where, "the name is not text", f'put it in quotes: "{name}"')
        if not isinstance(ids, list) or not ids or not all(isinstance(id, str) for id in ids):
            problems.add(
                path, where, "is not a list of adapter ids", "write one id a line, each after a dash"
            )
            continue
        for number, id in enumerate(ids):
            if known is not None and id not in known:
                mend = f"{_did_you_mean(id, known)}the adapters are {', '.join(sorted(known))}"
                problems.add((*path, number), where, f"there is no adapter {id}", mend)
            if id in ids[:number]:
                problems.add((*path, number), where, f"names {id} twice", "delete one of the two")
        sets[str(name)] = tuple(ids)
    return sets


def _rows(
    value: object,
    there: bool,
    problems: _Problems,
    lineages: object,
    set_names: object,
    sets: dict[str, tuple[str, ...]],
) -> list[Row]:
    if not isinstance(value, list) or not value:
        if there:
            mend = 'write one entry for each range, beginning with - vllm: ">=A,<B"'
            problems.add(("rows",), "rows", f"is {_kind(value)} without entries", mend)
        return []
    # Names with a fault of their own still count as names, or every cell would be reported along with them.
    lines = [str(name) for name in lineages] if isinstance(lineages, dict) else []
    names = [str(name) for name in set_names] if isinstance(set_names, dict) else []
    rows: list[Row] = []
    ranges: list[tuple[Version, Version, str, tuple[object, ...]]] = []
    for number, entry in enumerate(value):
        path: tuple[object, ...] = ("rows", number)
        if not isinstance(entry, dict):
            mend = 'write - vllm: ">=A,<B" and a cell for each line'
            problems.add(path, f"row {number + 1}", f"is not a mapping but {_kind(entry)}", mend)
            continue
        spec = entry.get("vllm")
        where = f"row {spec}" if isinstance(spec, str) else f"row {number + 1}"
        known = ("vllm", "releases", *lines)
        problems.keys(entry, known, known, path, f"{where}, ")
        bounds = problems.versions(spec, (*path, "vllm"), f"{where}, vllm") if "vllm" in entry else None
        releases: tuple[Version, ...] = ()
        if "releases" in entry:
            at = (*path, "releases")
            releases = problems.releases(entry["releases"], bounds, at, f"{where}, releases")
        cells = {
            line: _cell(entry[line], problems, (*path, line), f"{where}, {line}", names, sets, releases)
            for line in lines
            if line in entry
        }
        if bounds and isinstance(spec, str):
            rows.append(Row(spec, *bounds, cells, releases))
            ranges.append((*bounds, where, (*path, "vllm")))
    problems.contiguous(sorted(ranges, key=lambda entry: entry[0]), "vLLM")
    return rows


def _cell(
    value: object,
    problems: _Problems,
    path: tuple[object, ...],
    where: str,
    set_names: Sequence[str],
    sets: dict[str, tuple[str, ...]],
    releases: Sequence[Version],
) -> Cell:
    nothing = Cell("untested", (), None, None, None, None, None)
    if not isinstance(value, dict):
        mend = "write {status: ..., adapters: ...}"
        problems.add(path, where, f"is not a mapping but {_kind(value)}", mend)
        return nothing
    problems.keys(value, _CELL_KEYS, ("status",), path, f"{where}.")
    status = value.get("status")
    if "status" in value and status not in STATUSES:
        mend = f"{_did_you_mean(str(status), STATUSES)}the statuses are {', '.join(STATUSES)}"
        problems.add((*path, "status"), f"{where}.status", f"{_show(status)} is no status", mend)
    evidence, note, why, mend_text = (problems.text(value, key, path, where) for key in _CELL_KEYS[2:6])
    name = problems.text(value, "adapters", path, where)
    if name is not None and name not in set_names:
        mend = f"{_did_you_mean(name, set_names)}the sets are {', '.join(set_names)}"
        problems.add((*path, "adapters"), f"{where}.adapters", f"there is no adapter set {name}", mend)

    if status == "unsupported":
        for key in ("why", "mend"):
            if key not in value:
                problems.add(
                    path,
                    f"{where}.{key}",
                    "is missing for an unsupported cell",
                    f"add {key}: and one sentence",
                )
        if "adapters" in value:
            problems.add(
                (*path, "adapters"), f"{where}.adapters", "stands in an unsupported cell", "delete it"
            )
    elif status in STATUSES:
        if "adapters" not in value:
            mend = f"add adapters: with one of {', '.join(set_names)}"
            problems.add(path, f"{where}.adapters", f"is missing for a cell that is {status}", mend)
        for key in ("why", "mend"):
            if key in value:
                mend = "use note for remarks, or set status: unsupported"
                problems.add((*path, key), f"{where}.{key}", f"stands in a cell that is {status}", mend)
        if status == "verified" and "evidence" not in value:
            mend = "name the file that proves it, or set status: untested"
            problems.add(path, f"{where}.evidence", "is missing for a verified cell", mend)
    cell = Cell(str(status), sets.get(name or "", ()), name, evidence, note, why, mend_text)
    if "except" not in value:
        return cell
    return replace(
        cell, exceptions=_exceptions(value, problems, path, f"{where}.except", set_names, sets, releases)
    )


def _exceptions(
    value: dict[object, object],
    problems: _Problems,
    path: tuple[object, ...],
    where: str,
    set_names: Sequence[str],
    sets: dict[str, tuple[str, ...]],
    releases: Sequence[Version],
) -> dict[Version, Cell]:
    """The cells of single releases: they have the adapters of the cell that they stand in."""
    entries = value["except"]
    path = (*path, "except")
    if not isinstance(entries, dict) or not entries:
        problems.add(path, where, f"is {_kind(entries)} without entries", "write {0.18.1: {status: ...}}")
        return {}
    found: dict[Version, Cell] = {}
    for name, entry in entries.items():
        at, place = (*path, name), f"{where}.{name}"
        version = problems.release(name, None, at, place)
        if version is not None and releases and version not in releases:
            problems.add(at, place, "is none of the row's releases", "add it to releases, or delete it here")
        if isinstance(entry, dict):
            problems.keys(entry, _EXCEPT_KEYS, (), at, f"{place}.")
            kept = {key: part for key, part in entry.items() if key in _EXCEPT_KEYS}
            if entry.get("status") != "unsupported" and "adapters" in value:
                kept["adapters"] = value["adapters"]
            entry = kept
        cell = _cell(entry, problems, at, place, set_names, sets, releases)
        if version is not None:
            found[version] = cell
    return found
