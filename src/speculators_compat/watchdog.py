"""Ends a run that hangs, and lets Ctrl-C end one that does not want to.

While a generator starts or computes, a thread looks whether anything happens. If nothing does for the time set, the
workers are killed, the call is interrupted, and it raises SC517 with the name of the stage. If even that does not end
it, the process does. The same happens, as SC518, when a worker dies and vLLM waits for it all the same. A second Ctrl-C
ends the process at once, workers first.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from .errors import CompatError

log = logging.getLogger("speculators_compat")
#: The start loads the model, and says nothing meanwhile: it is given this much more time.
START_FACTOR = 4.0
#: How long vLLM may take to shut down, in seconds.
SHUTDOWN = 120.0
#: How long an interrupted call may take to end before the process is ended, in seconds.
GRACE = 30.0
#: How often is looked, in seconds; and how long vLLM may take to notice by itself that a worker died.
LOOK, NOTICE = 2.0, 10.0
#: By which the watchdog interrupts the main thread.
INTERRUPT = signal.SIGRTMAX - 2
#: In the name of every vLLM process that a run cannot do without.
VITAL = b"VLLM::"
#: Exit status of a run that the watchdog had to end by force.
EXIT_HUNG = 70
STOPPED = "stopped at once; run again to resume"

_interrupts = 0


def descendants(root: int | None = None) -> list[int]:
    """Process ids below a process (this one), children before their own children."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = (entry / "stat").read_bytes().rpartition(b")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found, left = [], [root or os.getpid()]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def kill(pids: list[int]) -> None:
    """End processes at once. vLLM's workers ignore gentler signals while they hang in a collective operation."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class Watchdog:
    """Watches one call.

    Args:
        seconds: how long nothing may happen; 0 means that nobody watches.
        stage: what is being done, in words.
        workers: tells which processes to kill.
        vital: processes without which the call cannot end.
    """

    def __init__(
        self, seconds: float, stage: str, workers: Callable[[], list[int]], vital: Iterable[int] = ()
    ) -> None:
        self._seconds = seconds
        self._workers = workers
        self._vital = tuple(vital)
        self._stage = stage
        self._since = time.monotonic()
        self._over = threading.Event()
        self._caller = threading.get_ident()
        self.error: CompatError | None = None
        #: Ctrl-C was pressed. A terminal sends it to the workers too: that they end is no fault then.
        self.stopped = False

    def beat(self, stage: str) -> None:
        """Something happened; ``stage`` is next."""
        self._stage, self._since = stage, time.monotonic()

    def start(self) -> None:
        """Begin to watch."""
        if self._seconds or self._vital:
            with contextlib.suppress(RuntimeError):  # the interpreter is shutting down
                threading.Thread(target=self._watch, name="speculators_compat watchdog", daemon=True).start()

    def stop(self) -> None:
        """The call is over."""
        self._over.set()

    def dead(self) -> int | None:
        """A vital process that has ended, if there is one."""
        return next((pid for pid in self._vital if _zombie(pid)), None)

    def worker_died(self, pid: int) -> CompatError:
        """The error for that."""
        return CompatError(
            "SC518",
            found=f"vLLM's process {pid} ended while {self._stage}",
            expected="workers that live as long as the generator",
            why="the call cannot be finished",
            mend="look for its last words above (out of memory, a CUDA error, a kill), and run again: finished samples "
            "are kept",
        )

    def _watch(self) -> None:
        while True:
            left = self._since + self._seconds - time.monotonic() if self._seconds else LOOK
            if left <= 0:
                break
            if self._over.wait(min(left, LOOK)):
                return
            pid = self.dead()
            if pid is not None:
                if self._over.wait(NOTICE):
                    return
                self._strike(None if self.stopped else self.worker_died(pid), patience=1.0)
                return
        self._strike(
            CompatError(
                "SC517",
                found=f"nothing happened for {self._seconds:.0f} s while {self._stage}",
                expected="progress",
                why="a worker hangs; it was ended, so that the device's memory is free",
                mend="look for a worker's last words above, and run again: finished samples are kept. "
                "SPECULATORS_COMPAT_WATCHDOG=SECONDS gives more time",
            )
        )

    def _strike(self, error: CompatError | None, patience: float = GRACE / 3) -> None:
        self.error = error
        kill(self._workers())
        # The caller usually notices that its workers are gone; if not, it is interrupted; if that fails, ended.
        if self._over.wait(patience):
            return
        _interrupt(self._caller)
        if self._over.wait(GRACE * 2 / 3):
            return
        if error is None:
            _end(STOPPED, 130)
        else:
            _end(error.render(), EXIT_HUNG)


def workers_since(before: set[int]) -> list[int]:
    """Processes that were started below this one since then, without multiprocessing's own helper."""
    new = [pid for pid in descendants() if pid not in before]
    return [pid for pid in new if b"resource_tracker" not in _command(pid)]


@contextlib.contextmanager
def starting(generator: Any, seconds: float) -> Iterator[None]:
    """Watch a generator's constructor, and note which processes it started as ``generator.workers``.

    If it fails, whatever it has started is ended.
    """
    before = set(descendants())
    try:
        with guarded(seconds * START_FACTOR, "vLLM starts and loads the model", lambda: workers_since(before)):
            yield
    except BaseException:
        kill(workers_since(before))
        raise
    generator.workers = workers_since(before)
    generator.vital = [pid for pid in generator.workers if VITAL in _command(pid)]


def end_workers(generator: Any, patience: float = 5.0) -> None:
    """Kill what a generator has started and its own shutdown has not ended."""
    pids = generator.__dict__.pop("workers", ())
    generator.__dict__.pop("vital", None)
    deadline = time.monotonic() + patience
    while left := [pid for pid in descendants() if pid in pids and not _zombie(pid)]:
        if time.monotonic() > deadline:
            kill(left)
            return
        time.sleep(0.05)


def clean_up(generator: Any, dog: Watchdog, abort: Callable[[], object]) -> None:
    """After a failed call: leave nothing of it behind, so that the next one works; or end an engine that is past that.

    Args:
        abort: takes the call's requests out of the engine and out of the workers.
    """
    workers = getattr(generator, "workers", ())
    if dog.error is None and _alive(workers) and not (dog.stopped and _ends(getattr(generator, "vital", ()))):
        try:
            abort()
            return
        except Exception:
            log.warning("the engine could not be cleaned up after a failed call; it is shut down", exc_info=True)
    with contextlib.suppress(Exception):
        generator.shutdown()


def _alive(pids: Iterable[int]) -> bool:
    below = set(descendants())
    return all(pid in below and not _zombie(pid) for pid in pids)


def _ends(pids: Iterable[int], patience: float = 2.0) -> bool:
    """Whether one of these processes ends now."""
    pids, end = tuple(pids), time.monotonic() + patience
    while not any(map(_zombie, pids)):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


@contextlib.contextmanager
def watching(generator: Any, seconds: float, stage: str, *, ending: bool = False) -> Iterator[Watchdog]:
    """Watch a call of a generator.

    Args:
        ending: its processes are expected to end.
    """
    pids = list(getattr(generator, "workers", ()))
    vital = () if ending else getattr(generator, "vital", ())
    with guarded(seconds, stage, lambda: [pid for pid in descendants() if pid in pids], vital) as dog:
        yield dog


@contextlib.contextmanager
def guarded(
    seconds: float, stage: str, workers: Callable[[], list[int]], vital: Iterable[int] = ()
) -> Iterator[Watchdog]:
    """Watch a block.

    Args:
        workers: tells which processes to kill if it hangs.
        vital: processes without which it cannot end.

    Raises:
        CompatError: SC517 or SC518 instead of whatever the block raises once the watchdog has struck, or because a
            vital process has died.
    """
    global _interrupts
    dog = Watchdog(seconds, stage, workers, vital)
    dog.start()
    with _second_interrupt_ends(dog):
        try:
            yield dog
        except BaseException as error:
            if dog.error is not None:
                raise dog.error from error
            if dog.stopped and isinstance(error, Exception):
                raise KeyboardInterrupt from error  # what an engine says that was interrupted as well
            pid = dog.dead() if isinstance(error, Exception) else None
            if pid is not None and getattr(error, "id", "SC512") == "SC512":
                raise dog.worker_died(pid) from error
            raise
        else:
            if dog.error is not None:
                raise dog.error
            _interrupts = 0
        finally:
            dog.stop()


@contextlib.contextmanager
def _second_interrupt_ends(dog: Watchdog) -> Iterator[None]:
    """The first Ctrl-C raises KeyboardInterrupt as always; a second one, while that is being dealt with, ends all.

    Ctrl-C may be somebody else's, or ignored (jobs that a shell starts in the background), so the watchdog interrupts the
    main thread by a signal of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return

    def interrupted(number: int, frame: Any) -> None:
        global _interrupts
        if number == signal.SIGINT and dog.error is None:
            dog.stopped = True
            _interrupts += 1
            if _interrupts > 1:
                kill(dog._workers())
                _end(STOPPED, 130)
        raise KeyboardInterrupt

    with _handler(INTERRUPT, signal.SIG_DFL, interrupted), _handler(
        signal.SIGINT, signal.default_int_handler, interrupted
    ):
        yield


@contextlib.contextmanager
def _handler(number: int, expected: Any, handler: Any) -> Iterator[None]:
    """Set a signal's handler for a while, where nobody else has set one."""
    if signal.getsignal(number) is not expected and signal.getsignal(number) != expected:
        yield
        return
    signal.signal(number, handler)
    try:
        yield
    finally:
        if signal.getsignal(number) is handler:
            signal.signal(number, expected)


def _interrupt(thread: int) -> None:
    if thread == threading.main_thread().ident and callable(signal.getsignal(INTERRUPT)):
        signal.pthread_kill(thread, INTERRUPT)
    else:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(KeyboardInterrupt))


def _end(message: str, status: int) -> None:
    from .handover import remove_own_depots

    print(message, file=sys.stderr, flush=True)
    remove_own_depots()
    os._exit(status)
