# SPDX-License-Identifier: Apache-2.0
"""What a new vLLM moved of the names that the adapters look at, read from its wheel without installing it.

    python tools/drift.py 0.34.0                  compared with the newest release before it that the matrix lists
    python tools/drift.py ./vllm-0.34.0.whl --since 0.32.0

The names are those that the adapters' probes ask for, in either release, and those that the plugin's own code imports.
Exit status: 0 every adapter of the row's way knows what it sees, 1 something drifted, 2 a wheel cannot be had.
Of each wheel fetched only the Python files are kept, in .envs/wheels.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from speculators_compat.adapter import Probe, State
from speculators_compat.matrix import Matrix, load_matrix
from speculators_compat.registry import adapters
from speculators_compat.surface import Parameters, SourceSurface

ROOT = Path(__file__).resolve().parent.parent
PLATFORMS = [f"manylinux_2_{glibc}_x86_64" for glibc in (35, 34, 31, 28, 17)]
#: A probe's question: the surface's method and its arguments.
Question = tuple[str, tuple[str, ...]]


# --------------------------------------------------------------------------- wheels


class FetchError(Exception):
    """A wheel cannot be had."""


def fetch(requirement: str, cache: Path) -> Path:
    """A wheel's Python files and metadata; ``requirement`` is a requirement, or the wheel's path."""
    if Path(requirement).is_file():
        return Path(requirement)
    kept = cache / f"{quote(requirement, safe='=')}.zip"
    if kept.exists():
        return kept
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--dest", folder]
        command += [x for platform in PLATFORMS for x in ("--platform", platform)]
        done = subprocess.run([*command, requirement], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            raise FetchError(f"{requirement}: {(done.stderr or done.stdout).strip()}")
        part = Path(folder) / "part.zip"
        with zipfile.ZipFile(wheels[0]) as wheel, zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as small:
            for name in wheel.namelist():
                if name.endswith((".py", ".dist-info/METADATA")):
                    small.writestr(name, wheel.read(name))
        part.rename(kept)
    return kept


def metadata(wheel: Path) -> Message:
    """The wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        name = next((n for n in archive.namelist() if n.endswith(".dist-info/METADATA")), None)
        if name is None:
            raise FetchError(f"{wheel} is no wheel: it has no METADATA")
        return Parser().parsestr(archive.read(name).decode())


def transformers_of(wheel: Path) -> str | None:
    """The transformers that this vLLM asks for."""
    for text in metadata(wheel).get_all("Requires-Dist") or ():
        need = Requirement(text)
        if need.name == "transformers" and (need.marker is None or need.marker.evaluate({"extra": ""})):
            return f"transformers{need.specifier}"
    return None


# --------------------------------------------------------------------------- what the adapters look at


class Recorder:
    """A surface that remembers what it was asked."""

    def __init__(self, surface: SourceSurface) -> None:
        self.surface = surface
        self.asked: list[Question] = []

    def __getattr__(self, method: str) -> Any:
        def ask(*arguments: str) -> Any:
            self.asked.append((method, arguments))
            return getattr(self.surface, method)(*arguments)

        return ask


def probe(id: str, surface: SourceSurface) -> tuple[Probe, list[Question]]:
    """What an adapter makes of a surface, and what it asked."""
    recorder: Any = Recorder(surface)
    try:
        answer = adapters()[id].probe(recorder)
    except Exception as error:  # as compat-check does: what goes wrong in one stays in it
        answer = Probe(State.FAILED, f"{type(error).__name__}: {error}")
    return answer, recorder.asked


def imports() -> Iterator[tuple[str, str]]:
    """Names that the plugin's code imports from other packages, each with the file's stem."""
    files = [*(ROOT / "patches").glob("*.py"), *(ROOT / "src" / "speculators_compat").glob("*.py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                for alias in node.names:
                    yield f"{node.module}:{alias.name}", file.stem
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    yield alias.name, file.stem


def exists(name: str, surface: SourceSurface) -> bool:
    """Whether ``from module import name`` can work: as a name, or as a module."""
    return surface.has(name) or surface.has_module(name.replace(":", "."))


# --------------------------------------------------------------------------- comparison


@dataclass
class Move:
    """A name of which something else is said than before, and who asks for it."""

    name: str
    text: str
    adapters: list[str] = field(default_factory=list)

    @property
    def harmless(self) -> bool:
        """Whether there is only more than before."""
        return self.text.startswith(("takes", "new"))


@dataclass
class Change:
    """An adapter's answers before and after."""

    id: str
    used: bool
    before: Probe
    after: Probe

    @property
    def drifted(self) -> bool:
        """Whether it can no longer do its work, and could before."""
        return self.after.state in (State.DRIFTED, State.FAILED) and self.after != self.before


@dataclass
class Comparison:
    """Everything that was found."""

    asked: int = 0
    moves: list[Move] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    gone: list[Move] = field(default_factory=list)

    @property
    def drifted(self) -> list[str]:
        """Adapters in use that drifted, and files that import what is gone."""
        found = [c.id for c in self.changes if c.drifted and c.used]
        return list(dict.fromkeys(found + [who for move in self.gone for who in move.adapters]))


def _few(names: Sequence[str], most: int = 6) -> str:
    """The first names, and how many there are besides."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def describe(before: Any, after: Any) -> str:
    """How two answers to one question differ."""
    if isinstance(before, Parameters) and isinstance(after, Parameters):
        both = set(before.names) & set(after.names)
        parts = {
            "no longer takes": [n for n in before.names if n not in after.names],
            "requires": [n for n in after.required if n not in before.required],
            "no longer requires": [n for n in before.required if n in both and n not in after.required],
            "takes": [n for n in after.names if n not in before.names and n not in after.required],
        }
        texts = [f"{verb} {_few(names)}" for verb, names in parts.items() if names]
        if before.open != after.open:
            texts.append("takes **kwargs" if after.open else "no longer takes **kwargs")
        return "; ".join(texts) or f"takes them in another order: {', '.join(after.names)}"
    if not after and after != []:
        return "gone"
    if not before and before != []:
        return f"new: takes {_few(after.names)}" if isinstance(after, Parameters) else "new"
    lost = [str(x) for x in before if x not in after]
    gained = [str(x) for x in after if x not in before]
    texts = [f"{word} {', '.join(items)}" for word, items in (("no longer", lost), ("now", gained)) if items]
    return "; ".join(texts) or "in another order"


def compare(before: SourceSurface, after: SourceSurface, used: Iterable[str]) -> Comparison:
    """Probe every adapter of the project on both, and compare the answers to every question asked on either."""
    found, used = Comparison(), set(used)
    moves: dict[Question, Move] = {}
    questions: set[Question] = set()
    for id in adapters():
        (old, asked), (new, asked_now) = probe(id, before), probe(id, after)
        for question in dict.fromkeys([*asked, *asked_now]):
            questions.add(question)
            method, arguments = question
            answers = [getattr(surface, method)(*arguments) for surface in (before, after)]
            if answers[0] != answers[1]:
                name = arguments[0] + (f" calls {arguments[1]}" if len(arguments) > 1 else "")
                moves.setdefault(question, Move(name, describe(*answers))).adapters.append(id)
        if old == new and new.state not in (State.DRIFTED, State.FAILED):
            found.unchanged.append(id)
        else:
            found.changes.append(Change(id, id in used, old, new))
    found.asked, found.moves = len(questions), list(moves.values())

    owners: dict[str, list[str]] = {}
    for id, adapter in adapters().items():
        owners.setdefault(type(adapter).__module__.rpartition(".")[2], []).append(id)
    gone: dict[str, Move] = {}
    for name, stem in sorted(set(imports())):
        ids = [id for id in owners.get(stem, []) if id in used]
        if stem in owners and not ids:
            continue  # an adapter that the row does not use
        if exists(name, before) and not exists(name, after):
            gone.setdefault(name, Move(name, "gone")).adapters += ids or [f"{stem}.py"]
    found.gone = list(gone.values())
    return found


# --------------------------------------------------------------------------- the command


def baseline(matrix: Matrix, version: Version) -> Version:
    """The newest release before ``version`` that the matrix lists."""
    listed = [release for row in matrix.rows for release in row.releases if release < version]
    if not listed:
        raise FetchError(f"the matrix lists no release before {version}; give one with --since")
    return listed[-1]


def surface_of(vllm: Path, speculators: Path, transformers: Path | None) -> SourceSurface:
    """The packages in these wheels."""
    wheels = {"vllm": vllm, "speculators": speculators, "transformers": transformers}
    return SourceSurface({name: zipfile.Path(wheel) for name, wheel in wheels.items() if wheel is not None})


def say(text: str, indent: int = 0) -> None:
    """Print, wrapped at a terminal's width."""
    print(textwrap.fill(text, 100, initial_indent=" " * indent, subsequent_indent=" " * (indent + 4)))


def report(title: str, found: Comparison) -> None:
    """Print a comparison."""
    say(title)
    say(f"{len(found.moves)} of {found.asked} names that the adapters look at moved", 2)
    for move in sorted(found.moves, key=lambda move: move.harmless):
        say(f"{move.name}: {move.text} [{', '.join(move.adapters)}]", 4)
    for move in found.gone:
        say(f"{move.name}: gone, and imported by {', '.join(move.adapters)}", 4)
    for change in sorted(found.changes, key=lambda c: (not c.used, not c.drifted)):
        note = "" if change.used else " (not in this row's way)"
        was = f"was {change.before.state}" if change.before.state != change.after.state else "as before"
        if change.before == change.after:
            was = "unchanged"
        say(f"{change.id}{note}: {change.after.state}, {was}: {change.after.reason}", 2)
    if found.unchanged:
        say(f"unchanged: {', '.join(found.unchanged)}", 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("vllm", metavar="VERSION", help="a vLLM release, or the path of a wheel")
    parser.add_argument("--since", metavar="VERSION", help="what to compare it with, likewise")
    parser.add_argument(
        "--speculators",
        metavar="VERSION",
        nargs="*",
        help="releases, or wheels (default: the newest of each line that the matrix supports)",
    )
    parser.add_argument("--wheels", type=Path, default=ROOT / ".envs" / "wheels", help="where wheels are kept")
    args = parser.parse_args(argv)
    try:
        return run(args.vllm, args.since, args.speculators, args.wheels)
    except FetchError as error:
        print(error, file=sys.stderr)
        return 2


def run(vllm: str, since: str | None, speculators: Sequence[str] | None, cache: Path) -> int:
    """Compare, print; the exit status."""

    def wheel(package: str, asked: str) -> Path:
        if not Path(asked).is_file():
            try:
                Version(asked)
            except InvalidVersion:
                raise FetchError(f"{asked} is neither a version nor a wheel") from None
        return fetch(asked if Path(asked).is_file() else f"{package}=={asked}", cache)

    matrix = load_matrix()
    after = wheel("vllm", vllm)
    new = Version(str(metadata(after)["Version"]))
    before = wheel("vllm", since or str(baseline(matrix, new)))
    old = Version(str(metadata(before)["Version"]))
    needs = [transformers_of(before), transformers_of(after)]
    transformers: list[Path] = []
    try:
        transformers = [fetch(need, cache) for need in needs if need] if all(needs) else []
    except FetchError as error:
        say(f"without transformers: {error}")

    if not speculators:
        cells = matrix.rows[-1].cells
        lines = [line for name, line in matrix.lineages.items() if cells[name].status != "unsupported"]
        speculators = [str(line.releases[-1]) for line in lines if line.releases]
    drifted: dict[str, None] = {}
    done: dict[str, Comparison] = {}
    for asked in speculators:
        package = wheel("speculators", asked)
        spec = Version(str(metadata(package)["Version"]))
        chosen = matrix.select(new, spec)
        surfaces = [
            surface_of(one, package, transformers[n] if transformers else None) for n, one in enumerate((before, after))
        ]
        found = compare(surfaces[0], surfaces[1], chosen.cell.adapters)
        same = next((name for name, other in done.items() if other == found), None)
        title = f"vLLM {old} -> {new}, speculators {spec} (row {chosen.row.vllm}, {chosen.cell.adapter_set}):"
        if same:
            say(f"{title} as with speculators {same}")
        else:
            report(title, found)
        done[str(spec)] = found
        drifted |= dict.fromkeys(found.drifted)
    say(f"Drifted: {', '.join(drifted)}" if drifted else "Nothing drifted: the adapters in use know what they see")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
