"""Hands captured states from a worker to the caller's process through shared memory.

Replies to vLLM's RPC are pickled; hidden states are far too large for that. The worker writes them into memory-mapped
files, as they are computed, and tells the caller over a local socket which request is complete. The caller's tensors
*are* that memory: nothing is copied, and the buffer goes back to the worker's pool when the last tensor on it is gone.
What callers hold in this way is bounded; beyond the bound results are copied into ordinary memory.

The socket lies in the depot, a folder that only this user can enter, and carries JSON lines:

========  =====================================================================================
worker    ``{"id", "file", "size", "shape", "dtype"}`` a request is complete; ``{"error"}``; ``{"drop"}`` a file is gone;
          ``{"proof"}`` what :mod:`~speculators_compat.alignment` found for a request
caller    ``{"free"}`` a file can be used again; ``{"bye"}`` the depot is closed
========  =====================================================================================
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .claims import place, started
from .errors import CompatError

if TYPE_CHECKING:
    import torch

log = logging.getLogger("speculators_compat")
PREFIX = "speculators-compat-"
SHARED_MEMORY = Path("/dev/shm")
#: Share of the memory free at the start that results may occupy before they are copied out.
HELD_SHARE = 0.4
#: How long a worker may take from vLLM's report that a request is finished until its states have arrived, in seconds.
PATIENCE = 300.0
#: A socket's path has at most 107 bytes on Linux; the depot's own name and the socket's take less than 60.
LONGEST_PARENT = 48


def machine() -> dict[str, str]:
    """This machine: its name, and what tells it from all others, of which some may have the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    return {"host": socket.gethostname(), "boot": boot}


def check_machine(caller: dict[str, str]) -> None:
    """Make sure, in the worker that captures, that the caller is on the same machine.

    Raises:
        CompatError: SC870.
    """
    here = machine()
    if caller["boot"] != here["boot"]:
        raise CompatError(
            "SC870",
            found=f"tensor-parallel rank 0 runs on {here['host']}, the script on {caller['host']}",
            expected="both on one machine",
            why="captured states are handed over through its shared memory",
            mend=f"run the script on {here['host']}, or on another machine of the cluster on which Ray may use a GPU",
        )


@dataclass(frozen=True)
class Parcel:
    """One request's captured states.

    Attributes:
        id: vLLM's request id.
        file: number of the file in the depot, used again for later requests.
        size: bytes in the file.
        shape: (captured layers, tokens, hidden size), contiguous from the file's start.
        dtype: torch's name for it, for example ``bfloat16``.
    """

    id: str
    file: int
    size: int
    shape: tuple[int, int, int]
    dtype: str


class _Lines:
    """JSON lines over a socket; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        # Re-entrant: a buffer whose last tensor the garbage collector finds is sent back from wherever that happens.
        self._lock = threading.RLock()

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._lock:
                self._connection.sendall(data)
        except OSError:
            pass  # the other side is gone, and its reader notices

    def read(self) -> Iterable[dict[str, Any]]:
        with self._connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


class Depot:
    """The caller's side.

    Args:
        need: bytes that must be free in shared memory; with less (containers often give it 64 MiB in all) the depot
            lies among the temporary files instead, which is slower, and every result is copied out.
    """

    def __init__(self, need: int = 256 * 2**20) -> None:
        sweep_stale()
        shared = os.access(SHARED_MEMORY, os.W_OK) and shutil.disk_usage(SHARED_MEMORY).free >= need
        parent = SHARED_MEMORY if shared else _temporary()
        self._process = os.getpid()
        self.path = Path(tempfile.mkdtemp(prefix=_prefix(), dir=parent))
        self._limit = int(shutil.disk_usage(parent).free * HELD_SHARE) if shared else 0
        self._held = 0
        self._changed = threading.Condition()
        self._expected: set[str] = set()
        self._arrived: dict[str, Parcel] = {}
        self._unproved: set[str] = set()
        self._proofs: dict[str, dict[str, Any]] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._error: CompatError | None = None
        self._worker: _Lines | None = None
        self._gone = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path / "socket"))
        self._listener.listen(1)
        threading.Thread(target=self._listen, name="speculators_compat depot", daemon=True).start()
        atexit.register(self.close)

    def expect(self, ids: Iterable[str]) -> None:
        """Requests whose states will be collected; any others are thrown away as they arrive."""
        with self._changed:
            ids = list(ids)
            self._expected.update(ids)
            self._unproved.update(ids)

    def collect(self, id: str, rows: list[int]) -> list[torch.Tensor]:
        """States of a request that vLLM reports as finished.

        Args:
            rows: which of the captured layers to return, in this order; the same one may be named twice.

        Returns:
            One CPU tensor of shape (tokens, hidden size) for each row, each with a storage of its own.

        Raises:
            CompatError: what went wrong in the worker, or SC512 if nothing arrives.
        """
        end = time.monotonic() + PATIENCE
        with self._changed:
            while id not in self._arrived:
                if self._error is not None:
                    raise self._error
                left = end - time.monotonic()
                if self._gone or left <= 0 or not self._changed.wait(timeout=left):
                    raise CompatError(
                        "SC512",
                        found=f"no states for request {id}: "
                        + ("the worker is gone" if self._gone else f"waited {PATIENCE:.0f} s"),
                        expected="the states of every request that vLLM finished",
                        why="the worker died or hangs",
                        mend="look for the worker's own error above; the samples written so far are complete",
                    )
            parcel = self._arrived.pop(id)
            self._expected.discard(id)
        return self._open(parcel, rows)

    def proof(self, id: str, patience: float) -> dict[str, Any] | None:
        """What the worker found for a request that vLLM finished; ``None`` if nothing comes in ``patience`` seconds.

        Raises:
            CompatError: what went wrong in the worker.
        """
        with self._changed:
            self._changed.wait_for(lambda: id in self._proofs or self._gone or self._error, timeout=patience)
            self._unproved.discard(id)
            if id not in self._proofs and self._error is not None:
                raise self._error
            return self._proofs.pop(id, None)

    def forget(self) -> None:
        """Throw away whatever has arrived and is still expected."""
        with self._changed:
            self._expected.clear()
            self._unproved.clear()
            self._proofs.clear()
            self._error = None
            parcels = list(self._arrived.values())
            self._arrived.clear()
        for parcel in parcels:
            self._free(parcel.file)

    def close(self) -> None:
        """Remove the depot. Tensors handed out stay valid: their memory lives as long as they do."""
        atexit.unregister(self.close)
        if os.getpid() != self._process:
            return  # a forked child that ends
        if self._worker is not None:
            self._worker.send({"bye": True})
            self._worker.close()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake a thread that waits in accept()
        self._listener.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _listen(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # closed before a worker came
        self._worker = _Lines(connection)
        try:
            for message in self._worker.read():
                self._take(message)
        except (OSError, ValueError):
            pass
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def _take(self, message: dict[str, Any]) -> None:
        if "drop" in message:
            self._maps.pop(message["drop"], None)
            return
        with self._changed:
            if "error" in message:
                self._error = CompatError.from_dict(message["error"])
            elif "proof" in message:
                id = message["proof"]["id"]
                id = id if id in self._unproved else id.rpartition("-")[0]
                if id in self._unproved:
                    self._proofs[id] = message["proof"]
            else:
                parcel = Parcel(**{**message, "shape": tuple(message["shape"])})
                # vLLM's engine makes ids unique by a suffix, "ID-1a2b3c4d".
                id = parcel.id if parcel.id in self._expected else parcel.id.rpartition("-")[0]
                if id in self._expected:
                    self._arrived[id] = parcel
                else:
                    self._free(parcel.file)
            self._changed.notify_all()

    def _free(self, file: int) -> None:
        # A forked child (a data loader's, say) has copies of the tensors; that it drops them frees nothing.
        if self._worker is not None and os.getpid() == self._process:
            self._worker.send({"free": file})

    def _open(self, parcel: Parcel, rows: list[int]) -> list[torch.Tensor]:
        import numpy
        import torch

        if parcel.file not in self._maps:
            with open(self.path / str(parcel.file), "r+b") as file:
                self._maps[parcel.file] = mmap.mmap(file.fileno(), parcel.size)
        # torch keeps a reference to the array under each storage, so the array's end is the last tensor's end.
        array = numpy.frombuffer(self._maps[parcel.file], dtype=numpy.uint8)
        dtype = getattr(torch, parcel.dtype)
        _, tokens, hidden = parcel.shape
        count = tokens * hidden
        step = count * torch.empty((), dtype=dtype).element_size()
        layers = [
            torch.frombuffer(array, dtype=dtype, count=count, offset=row * step).view(tokens, hidden) for row in rows
        ]
        # A layer named twice must not share memory with itself: writing to one would change the other.
        layers = [layer.clone() if rows[i] in rows[:i] else layer for i, layer in enumerate(layers)]
        if self._held + parcel.size > self._limit:
            layers = [layer.clone() for layer in layers]
            self._free(parcel.file)
            return layers
        self._held += parcel.size
        weakref.finalize(array, self._returned, parcel.file, parcel.size).atexit = False
        return layers

    def _returned(self, file: int, size: int) -> None:
        self._held -= size
        self._free(file)


class Sender:
    """The worker's side: a pool of buffers, and the news that a request is complete.

    Args:
        depot: the caller's folder.
        pin: called with (address, bytes) for each new buffer, to make device copies into it asynchronous.
        unpin: called with the address before a buffer is removed.
    """

    #: Free buffers beyond this many bytes are removed.
    KEEP = 16 * 2**30

    def __init__(
        self, depot: str, pin: Callable[[int, int], None] | None = None, unpin: Callable[[int], None] | None = None
    ) -> None:
        self._depot = Path(depot)
        self._pin, self._unpin = pin, unpin
        self._lock = threading.Lock()
        self._closed = False
        self._number = 0
        self._tensors: dict[int, torch.Tensor] = {}  # file number to its bytes
        self._free: dict[int, list[int]] = {}  # size to file numbers
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._depot / "socket"))
        except OSError as error:
            raise CompatError(
                "SC513",
                found=f"{depot} cannot be reached from the worker: {error}",
                expected="a folder that caller and worker share",
                why="captured states are handed over through it",
                mend="run the caller on the host of tensor-parallel rank 0",
            ) from None
        self._caller = _Lines(connection)
        threading.Thread(target=self._read, name="speculators_compat sender", daemon=True).start()

    def buffer(self, id: str, shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, Parcel]:
        """A tensor of ``shape`` in shared memory, uninitialised, and the parcel that names it.

        Raises:
            CompatError: SC504 if shared memory is full.
        """
        import torch

        need = shape[0] * shape[1] * shape[2] * torch.empty((), dtype=dtype).element_size()
        size = size_class(need)
        with self._lock:
            numbers = self._free.get(size)
            number = numbers.pop() if numbers else self._new(size)
            held = self._tensors[number]
        tensor = held[:need].view(dtype).view(shape)
        return tensor, Parcel(id, number, size, shape, str(dtype).removeprefix("torch."))

    def send(self, parcel: Parcel) -> None:
        """The parcel's request is complete."""
        self._caller.send(asdict(parcel))

    def prove(self, proof: dict[str, Any]) -> None:
        """What was found for a request, see :class:`~speculators_compat.alignment.Proof`."""
        self._caller.send({"proof": proof})

    def fail(self, error: CompatError) -> None:
        """Capture cannot go on."""
        self._caller.send({"error": error.to_dict()})

    def release(self, parcel: Parcel) -> None:
        """The parcel will not be sent; its buffer can be used again."""
        self._put_back(parcel.file)

    def close(self) -> None:
        """End the connection, and let go of all buffers: memory that is unmapped while it is registered with CUDA makes
        later registrations at its address fail."""
        self._closed = True
        self._caller.close()
        with self._lock:
            held = list(self._tensors.values())
            self._tensors.clear()
            self._free.clear()
        for buffer in held:
            if self._unpin is not None:
                self._unpin(buffer.data_ptr())

    def _read(self) -> None:
        try:
            for message in self._caller.read():
                if "bye" in message:
                    return
                self._put_back(message["free"])
        except (OSError, ValueError):
            pass
        if not self._closed and _ended(_owner(self._depot)):
            # vLLM's engine outlives a caller that is killed, and would hold the device's memory for ever.
            log.warning("the process that asked for hidden states is gone; this worker ends")
            shutil.rmtree(self._depot, ignore_errors=True)
            os._exit(1)

    def _put_back(self, number: int) -> None:
        with self._lock:
            if number not in self._tensors:
                return  # closed in the meantime
            size = self._tensors[number].numel()
            if sum(s * len(n) for s, n in self._free.items()) + size <= self.KEEP:
                self._free.setdefault(size, []).append(number)
                return
            self._remove(number)

    def _remove(self, number: int) -> None:
        held = self._tensors.pop(number)
        if self._unpin is not None:
            self._unpin(held.data_ptr())
        (self._depot / str(number)).unlink(missing_ok=True)
        self._caller.send({"drop": number})

    def _new(self, size: int) -> int:
        import torch

        self._number += 1
        path = self._depot / str(self._number)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            self._reserve(descriptor, size)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        held = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        if self._pin is not None:
            self._pin(held.data_ptr(), size)
        self._tensors[self._number] = held
        return self._number

    def _reserve(self, descriptor: int, size: int) -> None:
        """Claim the memory now: writing to a mapping that has no room behind it kills the process (SIGBUS)."""
        while True:
            try:
                os.posix_fallocate(descriptor, 0, size)
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM):
                    raise
            spare = next((n for numbers in self._free.values() for n in numbers), None)
            if spare is None:
                raise CompatError(
                    "SC504",
                    found=f"{shutil.disk_usage(self._depot).free:,} bytes free in {self._depot.parent}, {size:,} needed",
                    expected="room for the states of all requests in flight",
                    why="captured states are handed over through it",
                    mend="make batches smaller, or give the container more (docker run --shm-size=16g)",
                )
            for numbers in self._free.values():
                if spare in numbers:
                    numbers.remove(spare)
            self._remove(spare)


def size_class(need: int) -> int:
    """The size of the buffer for ``need`` bytes: at most a quarter more, so that buffers fit later requests too."""
    step = max(4096, 1 << max(0, need.bit_length() - 3))
    return -(-need // step) * step


def _owner(depot: Path) -> int:
    """The process whose depot this is; 0 if the name does not tell."""
    pid = depot.name[len(PREFIX) :].partition("-")[0]
    return int(pid) if pid.isdigit() else 0


def _ended(pid: int, patience: float = 5.0) -> bool:
    """Whether a process has ended, or does so now: its connections are closed a moment before."""
    end = time.monotonic() + patience
    while started(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return bool(pid)


def sweep_stale() -> list[Path]:
    """Remove depots whose process was killed; returns them."""
    removed = [depot for parent in (SHARED_MEMORY, _temporary()) for depot in stale(parent)]
    for depot in removed:
        shutil.rmtree(depot, ignore_errors=True)
    return removed


def stale(parent: Path) -> list[Path]:
    """Depots in ``parent`` whose process was killed. Those of other machines and containers are left alone: their processes
    cannot be seen from here."""
    depots = [(depot, _owner(depot)) for depot in parent.glob(f"{PREFIX}*-{_here()}-*")]
    return [depot for depot, owner in depots if owner and not Path(f"/proc/{owner}").exists()]


def _here() -> str:
    return f"{zlib.crc32(place().encode()):08x}"


def _prefix() -> str:
    return f"{PREFIX}{os.getpid()}-{_here()}-"


def _temporary() -> Path:
    """The folder of temporary files, unless its name is too long for a socket in it."""
    folder = Path(tempfile.gettempdir())
    return folder if len(os.fsencode(folder)) <= LONGEST_PARENT else Path("/tmp")


def remove_own_depots() -> None:
    """Remove this process's depots, before it is ended without the usual clean-up."""
    for parent in (SHARED_MEMORY, _temporary()):
        for depot in parent.glob(f"{_prefix()}*"):
            shutil.rmtree(depot, ignore_errors=True)
