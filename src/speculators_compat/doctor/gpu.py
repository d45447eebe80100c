"""What ``nvidia-smi`` says, asked with a bounded wait: a driver that hangs must not hang the check."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass

from .base import Unavailable

#: Seconds that ``nvidia-smi`` may take.
PATIENCE = 5.0
MIB = 2**20


@dataclass(frozen=True)
class Gpu:
    """One GPU that the run would see; memory in bytes."""

    index: int
    uuid: str
    name: str
    total: int
    free: int


@dataclass(frozen=True)
class GpuProcess:
    """A process that holds memory on a GPU."""

    gpu: int
    pid: int
    command: str
    used: int


class Hangs(Exception):
    """``nvidia-smi`` gave no answer in time."""


def _ask(*arguments: str) -> list[list[str]]:
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise Unavailable("no NVIDIA GPU here (nvidia-smi is not installed)") from None
    except subprocess.TimeoutExpired:
        raise Hangs(f"nvidia-smi gave no answer in {PATIENCE:.0f} s") from None
    except OSError as error:
        raise Unavailable(f"nvidia-smi can't be started: {error.strerror or error}") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise Unavailable(f"no usable NVIDIA GPU here: {said[0][:120] if said else 'nvidia-smi failed'}")
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]


def query() -> list[Gpu]:
    """The GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible, in its order.

    Raises:
        Unavailable: there is none.
        Hangs: no answer in time.
    """
    gpus = []
    for row in _ask("--query-gpu=index,uuid,name,memory.total,memory.free"):
        try:
            gpus.append(Gpu(int(row[0]), row[1], row[2], int(row[3]) * MIB, int(row[4]) * MIB))
        except (ValueError, IndexError):
            continue  # a device that does not tell its memory
    if not gpus:
        raise Unavailable("no NVIDIA GPU here (nvidia-smi lists none)")
    return visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: list[Gpu], setting: str | None) -> list[Gpu]:
    """Those that CUDA shows a program; as CUDA does, everything after the first unknown entry is dropped."""
    if setting is None:
        return gpus
    chosen: list[Gpu] = []
    for word in filter(None, (word.strip() for word in setting.split(","))):
        one = next((g for g in gpus if str(g.index) == word or g.uuid.startswith(word)), None)
        if one is None:
            break
        chosen.append(one)
    return chosen


def processes(gpus: list[Gpu]) -> list[GpuProcess]:
    """Who holds memory on these GPUs, largest first."""
    numbers = {gpu.uuid: gpu.index for gpu in gpus}
    found = []
    for row in _ask("--query-compute-apps=gpu_uuid,pid,used_memory"):
        try:
            if row[0] in numbers:
                found.append(
                    GpuProcess(numbers[row[0]], int(row[1]), command(int(row[1])), int(row[2]) * MIB)
                )
        except (ValueError, IndexError):
            continue  # "[N/A]" in a container
    return sorted(found, key=lambda process: -process.used)


def command(pid: int) -> str:
    """A process's command line, shortened."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "a process outside this container"
    return words if len(words) <= 60 else words[:57] + "..."
