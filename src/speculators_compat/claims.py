"""Claims on a folder: who writes to it, on whichever machine.

The advisory locks of :mod:`fcntl` die with their process, but some network file systems have none, or keep them to one
host. So a writer also leaves a file that names host and process, and touches it every few seconds. Whoever finds one

- of this machine looks whether that process still lives, and takes the folder over at once if it does not;
- of another machine watches the file: if it changes, its writer lives; if it does not for :data:`STALE` seconds, the writer
  is dead, or cut off, and the folder is taken over. Clocks of different machines are never compared.

A writer whose claim was taken over (its machine slept, or lost the file system for too long) notices it before it writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .errors import CompatError

NAME = ".claim"
#: How often a writer touches its claim, and how long a claim may stay untouched, in seconds. Clients of NFS may see a
#: change late, but always when they open the file again.
BEAT, STALE = 10.0, 60.0


@dataclass(frozen=True)
class Holder:
    """Who wrote a claim. ``place`` is the machine since its boot and the process namespace in it."""

    host: str
    pid: int
    place: str
    started: str
    token: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" if self.pid else "an unknown process"

    def dead(self) -> bool | None:
        """Whether the process has ended; ``None`` if that can't be told from here."""
        if self.place != place():
            return None
        return started(self.pid) != self.started


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def place() -> str:
    """What process ids of this process's kind mean the same in: machine, boot and pid namespace."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join([host(), *parts])


def started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty if it does not run. With the pid it names one process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _read(path: Path) -> tuple[bytes, Holder] | None:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        values = json.loads(content)
        holder = Holder(*(values[name] for name in ("host", "pid", "place", "started", "token")))
    except (ValueError, KeyError, TypeError):  # being written just now, or not ours
        holder = Holder("", 0, "", "", "")
    return content, holder


def holder(folder: Path, *, tell: Callable[[str], object] | None = None) -> Holder | None:
    """The living writer of a folder, if there is one. It takes up to :data:`STALE` seconds for one on another machine."""
    found = _read(folder / NAME)
    if found is None:
        return None
    content, who = found
    dead = who.dead()
    if dead is not None:
        return None if dead else who
    if tell is not None:
        tell(f"{folder}: claimed by {who}; watching for {STALE:.0f} s whether it still lives")
    end = time.monotonic() + STALE
    while time.monotonic() < end:
        time.sleep(min(1.0, STALE / 10))
        now = _read(folder / NAME)
        if now is None:
            return None
        if now[0] != content:
            return now[1]
    return None


class Claim:
    """A folder that this process writes to. Make it with :func:`take`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.holder = Holder(host(), os.getpid(), place(), started(os.getpid()), secrets.token_hex(8))
        self._file = -1
        self._lock = threading.Lock()  # a number that is closed may be another file's the moment after
        self._over = threading.Event()
        self._lost = ""

    def _make(self) -> bool:
        """Create the file with its content, or leave what is there."""
        scratch = self.path.with_name(f"{NAME}-{self.holder.token}")
        handle = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        try:
            os.write(handle, self._content(0))
            os.fsync(handle)
            try:
                os.link(scratch, self.path)
            except (FileExistsError, FileNotFoundError):
                pass  # somebody has it; or has tidied up behind us, and we try again
            except OSError:  # a file system without hard links
                with contextlib.suppress(FileExistsError):
                    os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644))
                    os.replace(scratch, self.path)
            # Over NFS link() may fail although it succeeded: what counts is which file has the name.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(handle), self.path.stat()):
                    self._file, handle = handle, -1
        finally:
            if handle >= 0:
                os.close(handle)
            scratch.unlink(missing_ok=True)
        return self._file >= 0

    def _content(self, beat: int) -> bytes:
        return json.dumps({**vars(self.holder), "beat": f"{beat:010}"}).encode() + b"\n"

    def _take_over(self, dead: Holder) -> None:
        """Remove a dead writer's claim, unless somebody else has done so meanwhile. One process at a time: what is removed
        must still be what was looked at."""
        gate = self.path.with_name(f"{NAME}.gate")
        try:
            os.mkdir(gate)
        except FileExistsError:
            _wait_for(gate)
            return
        try:
            found = _read(self.path)
            if found is not None and found[1].token == dead.token:
                self.path.unlink(missing_ok=True)
        finally:
            with contextlib.suppress(OSError):
                os.rmdir(gate)

    def start(self) -> None:
        """Begin to touch the file."""
        threading.Thread(target=self._beat, name="speculators_compat claim", daemon=True).start()

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                with self._lock:
                    if self._file < 0:
                        return
                    if not os.path.samestat(os.fstat(self._file), self.path.stat()):
                        self._lost = "another process has taken it over"
                        return
                    os.pwrite(self._file, self._content(count), 0)
                    os.fsync(self._file)
            except FileNotFoundError:
                self._lost = "its claim was removed"
                return
            except OSError:
                continue  # the file system is away; if that lasts, another process takes over, which is seen above

    def check(self) -> None:
        """Make sure that the folder is still this process's.

        Raises:
            CompatError: SC859.
        """
        try:
            if self._file >= 0 and not os.path.samestat(os.fstat(self._file), self.path.stat()):
                self._lost = self._lost or "another process has taken it over"
        except FileNotFoundError:
            self._lost = self._lost or "its claim was removed"
        except OSError:
            pass  # the file system is away: writing will say so
        if self._lost:
            raise CompatError(
                "SC859",
                found=f"{self.path.parent}: {self._lost}",
                expected="the folder still claimed by this process",
                why="two runs would write to it",
                mend="nothing more was written; let the other run finish, or repeat the command when it has ended",
            )

    def release(self) -> None:
        """Let go of the folder. Safe to call twice."""
        self._over.set()
        with self._lock:
            if self._file < 0:
                return
            handle, self._file = self._file, -1
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(handle), self.path.stat()):
                    self.path.unlink()
            os.close(handle)


def _wait_for(gate: Path, patience: float = 5.0) -> None:
    """Until another process has taken a claim over; one that died in the middle of it is not waited for."""
    end = time.monotonic() + patience
    while gate.exists():
        if time.monotonic() > end:
            with contextlib.suppress(OSError):
                os.rmdir(gate)
            return
        time.sleep(0.01)


def take(folder: Path) -> Claim:
    """Claim a folder for this process.

    Raises:
        CompatError: SC607 if a living process has it.
        OSError: the claim can't be written.
    """

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    claim = Claim(folder)
    while not claim._make():
        found = _read(claim.path)
        living = holder(folder, tell=tell)
        if living is not None:
            raise in_use(folder, living)
        if found is not None:
            claim._take_over(found[1])
    for left in folder.glob(f"{NAME}-*"):
        left.unlink(missing_ok=True)
    claim.start()
    return claim


def in_use(folder: Path, who: Holder | None = None) -> CompatError:
    """The error for a folder that somebody else writes to."""
    found = _read(folder / NAME) if who is None else None
    who = found[1] if found else who
    return CompatError(
        "SC607",
        found=f"another process is writing to {folder}" + (f": {who}" if who else ""),
        expected="one run a folder",
        why="two runs would delete each other's temporary files and repeat each other's work",
        mend="wait for the other run or end it, or give another --output-dir. A run that was killed is noticed: at once "
        f"on its own machine, after {STALE:.0f} s from another one",
    )
