"""Writes samples while the engine computes the next ones.

A sample's file is made by one of a few threads: copying, hashing and fsync leave the interpreter to the others. Every
file still appears whole or not at all, in whatever order they are ready.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .dataio import Content, Sample, SampleWriter

#: Bytes of samples that may wait for the disk before the next batch begins.
LIMIT = 8 * 2**30


class WriteBehind:
    """Writes to a :class:`~speculators_compat.dataio.SampleWriter` in the background.

    Args:
        limit: :meth:`make_room` waits while more bytes than these are not written yet.
        threads: three quarters of the processors by default, from 2 to 12.
    """

    def __init__(self, writer: SampleWriter, *, limit: int = LIMIT, threads: int | None = None) -> None:
        self._writer = writer
        self._limit = limit
        self._pool = ThreadPoolExecutor(threads or max(2, min(12, 3 * len(os.sched_getaffinity(0)) // 4)))
        self._changed = threading.Condition()
        self._waiting = 0  # bytes
        self._samples = 0
        self._error: BaseException | None = None

    def __enter__(self) -> WriteBehind:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self.wait()
        self._pool.shutdown()
        if kind is None:
            self._check()

    def put(self, sample: Sample, result: Mapping[str, Any]) -> None:
        """Have a sample written; returns at once.

        Raises:
            CompatError: SC608 the answer doesn't fit the prompt; what went wrong with an earlier sample.
        """
        self._check()
        content = self._writer.begin(sample, result)
        with self._changed:
            self._waiting += content.size
            self._samples += 1
        self._pool.submit(self._write, content)

    def make_room(self) -> None:
        """Wait for the disk where it is too far behind. To be called between batches: memory is bounded by it.

        Raises:
            CompatError: what went wrong with an earlier sample.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting <= self._limit)
        self._check()

    def wait(self) -> None:
        """Until all samples are written, or given up because an earlier one could not be."""
        with self._changed:
            self._changed.wait_for(lambda: not self._samples)

    def flush(self) -> None:
        """All samples are on the disk.

        Raises:
            CompatError: what went wrong with one.
        """
        self.wait()
        self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(self, content: Content) -> None:
        try:
            if self._error is None:
                self._writer.finish(content)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._waiting -= content.size
                self._samples -= 1
                self._changed.notify_all()
