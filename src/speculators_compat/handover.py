"""Hands tensors from a worker to the caller's process through files in shared memory.

Replies to vLLM's RPC are pickled; hidden states are far too large for that. The worker fills a memory-mapped file as
the states are computed and the reply carries only its name and layout. The caller copies the tensors out and the file
is gone: shared memory is held only from a request's first captured token until its result is returned.
"""

from __future__ import annotations

import atexit
import errno
import itertools
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CompatError

if TYPE_CHECKING:
    import torch

PREFIX = "speculators-compat-"
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Parcel:
    """Names one request's captured states.

    Attributes:
        path: file that holds a contiguous tensor of ``shape`` and ``dtype``.
        shape: (captured layers, tokens, hidden size).
        dtype: torch's name for it, for example ``bfloat16``.
    """

    path: str
    shape: tuple[int, int, int]
    dtype: str

    def to_list(self) -> list[Any]:
        """Plain values, for replies of vLLM's workers."""
        return [self.path, list(self.shape), self.dtype]

    @staticmethod
    def from_list(values: list[Any]) -> Parcel:
        """The parcel that :meth:`to_list` described."""
        path, (layers, tokens, hidden), dtype = values
        return Parcel(path, (layers, tokens, hidden), dtype)


def open_depot(need: int = 64 * 2**20) -> Path:
    """A new folder for parcels, owned by this process and removed with it.

    Args:
        need: bytes that must be free in shared memory; with less (containers often give it 64 MiB in all) the folder
            is made among the temporary files instead, which is slower but works.
    """
    sweep_stale()
    parent = SHARED_MEMORY
    try:
        if shutil.disk_usage(parent).free < need or not os.access(parent, os.W_OK):
            parent = Path(tempfile.gettempdir())
    except OSError:
        parent = Path(tempfile.gettempdir())
    depot = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    atexit.register(close_depot, depot)
    return depot


def close_depot(depot: Path) -> None:
    """Remove a depot with all that is left in it."""
    shutil.rmtree(depot, ignore_errors=True)
    atexit.unregister(close_depot)


def empty_depot(depot: Path) -> None:
    """Remove parcels that nobody will receive."""
    for parcel in depot.iterdir():
        parcel.unlink(missing_ok=True)


def sweep_stale() -> list[Path]:
    """Remove depots whose process was killed; returns them."""
    removed = []
    for parent in {SHARED_MEMORY, Path(tempfile.gettempdir())}:
        for depot in parent.glob(f"{PREFIX}*"):
            owner = depot.name[len(PREFIX) :].partition("-")[0]
            if owner.isdigit() and not Path(f"/proc/{owner}").exists():
                shutil.rmtree(depot, ignore_errors=True)
                removed.append(depot)
    return removed


class Sender:
    """The worker's side: makes the buffers."""

    def __init__(self, depot: str) -> None:
        self._depot = Path(depot)
        self._numbers = itertools.count()

    def buffer(self, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Parcel]:
        """A tensor of ``shape`` in shared memory, uninitialised, and the parcel that names it.

        Raises:
            CompatError: SC504 if shared memory is full.
        """
        import torch

        count = shape[0] * shape[1] * shape[2]
        size = count * torch.empty((), dtype=dtype).element_size()
        path = self._depot / f"{os.getpid()}-{next(self._numbers)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            # Reserve it now: writing to a mapping for which the file system has no room kills the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                raise
            free = shutil.disk_usage(self._depot).free
            raise CompatError(
                "SC504",
                found=f"{free:,} bytes free in {self._depot.parent}, {size:,} needed for one request",
                expected="room for the states of all requests in flight",
                why="captured states are handed over through it",
                mend="make batches smaller, or give the container more shared memory (docker run --shm-size=16g)",
            ) from None
        finally:
            os.close(descriptor)
        tensor = torch.from_file(str(path), shared=True, size=count, dtype=dtype).view(shape)
        return tensor, Parcel(str(path), shape, str(dtype).removeprefix("torch."))


def receive(parcel: Parcel, rows: list[int]) -> list[torch.Tensor]:
    """Copy layers out of a parcel and remove it.

    Args:
        rows: which of the parcel's layers to return, in this order; the same one may be asked for twice.

    Returns:
        One CPU tensor of shape (tokens, hidden size) for each row, each with a storage of its own.
    """
    import torch

    layers, tokens, hidden = parcel.shape
    path = Path(parcel.path)
    try:
        held = torch.from_file(
            str(path), shared=True, size=layers * tokens * hidden, dtype=getattr(torch, parcel.dtype)
        ).view(parcel.shape)
        return [held[row].clone() for row in rows]
    finally:
        path.unlink(missing_ok=True)
