"""One pass over the prepared data: everything that SC72x reports, in memory that does not grow with the file.

A large file is cut at line ends and read by several processes. Where ``msgspec`` and ``numpy`` are there
(every vLLM brings them) they look at the lines; a line that is not plainly right is judged by
:mod:`~speculators_compat.dataio`, which the run itself reads with, so that both agree on what is usable.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
from array import array
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from ..dataio import MAX_LINE_BYTES, MAX_TOKEN_ID, _BadLine, _parse

#: A file is cut into pieces of about this size.
PIECE = 8 * 2**20
SMALL = 4 * 2**20
WORKERS = 8
#: Lines whose hashes are kept to find duplicates: 8 bytes each, and a set of them.
MAX_HASHES = 4_000_000
SHOWN = 3


@dataclass
class Stats:
    """What was found in some lines.

    Attributes:
        lengths: tokens of a sample to how many samples.
        bad: reason to how often, and the first places as (line counted from 0, detail).
        zero_mask: masks without a 1; ``zero_after_cut`` those that lose their last 1 by the cut.
    """

    lines: int = 0
    good: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    bad: dict[str, tuple[int, list[tuple[int, str]]]] = field(default_factory=dict)
    without_mask: int = 0
    zero_mask: int = 0
    zero_after_cut: int = 0
    first_zero: int = -1
    hashes: array[int] = field(default_factory=lambda: array("q"))

    def add(self, other: Stats) -> None:
        """Append the lines that come after these."""
        for reason, (count, places) in other.bad.items():
            had, first = self.bad.get(reason, (0, []))
            moved = [(line + self.lines, detail) for line, detail in places]
            self.bad[reason] = (had + count, (first + moved)[:SHOWN])
        if self.first_zero < 0 <= other.first_zero:
            self.first_zero = other.first_zero + self.lines
        self.lines += other.lines
        self.good += other.good
        self.lengths.update(other.lengths)
        self.without_mask += other.without_mask
        self.zero_mask += other.zero_mask
        self.zero_after_cut += other.zero_after_cut
        room = MAX_HASHES - len(self.hashes)
        if room > 0:
            self.hashes.extend(other.hashes[:room])

    @property
    def skipped(self) -> int:
        return sum(count for count, _ in self.bad.values())

    @property
    def tokens(self) -> int:
        return sum(length * count for length, count in self.lengths.items())

    def cut_tokens(self, longest: int) -> int:
        """Tokens after samples are cut to ``longest``."""
        return sum(min(length, longest) * count for length, count in self.lengths.items())

    def truncated(self, longest: int) -> int:
        return sum(count for length, count in self.lengths.items() if length > longest)

    @property
    def duplicates(self) -> int:
        return len(self.hashes) - len(set(self.hashes))


def scan(path: str, *, vocab_size: int | None, max_seq_len: int) -> Stats:
    """Read the whole file.

    Raises:
        OSError: it cannot be read.
    """
    pieces = _pieces(path)
    total = Stats()
    workers = min(WORKERS, len(os.sched_getaffinity(0)), len(pieces))
    # Importing msgspec and numpy takes longer than reading a small file without them.
    fast = sum(stop - start for start, stop in pieces) > SMALL
    jobs = [(path, start, stop, vocab_size, max_seq_len, fast) for start, stop in pieces]
    # Forking beside threads can hang the child.
    if workers > 1 and threading.active_count() == 1:
        with ProcessPoolExecutor(workers, mp_context=get_context("fork")) as pool:
            for part in pool.map(_read, jobs):
                total.add(part)
    else:
        for job in jobs:
            total.add(_read(job))
    return total


def _pieces(path: str) -> list[tuple[int, int]]:
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        cuts = [0]
        while cuts[-1] + PIECE < end:
            file.seek(cuts[-1] + PIECE)
            while (part := file.readline(MAX_LINE_BYTES)) and not part.endswith(b"\n"):
                pass
            cuts.append(file.tell())
    if cuts[-1] < end:
        cuts.append(end)
    return list(itertools.pairwise(cuts))


def _read(job: tuple[str, int, int, int | None, int, bool]) -> Stats:
    path, start, stop, vocab_size, longest, fast = job
    stats = Stats()
    read = _reader(vocab_size, fast)
    with open(path, "rb") as file:
        file.seek(start)
        position = start
        while position < stop and (raw := file.readline(MAX_LINE_BYTES)):
            position += len(raw)
            line = stats.lines
            stats.lines += 1
            try:
                if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                    while raw and not raw.endswith(b"\n"):
                        raw = file.readline(MAX_LINE_BYTES)
                        position += len(raw)
                    raise _BadLine(f"longer than {MAX_LINE_BYTES // 2**20} MiB")
                if not raw.strip():
                    continue
                found = read(raw, line if start == 0 else line + 1)
            except _BadLine as bad:
                count, places = stats.bad.get(bad.reason, (0, []))
                if count < SHOWN:
                    places.append((line, bad.detail))
                stats.bad[bad.reason] = (count + 1, places)
                continue
            stats.good += 1
            stats.lengths[found.tokens] += 1
            if not found.masked:
                stats.without_mask += 1
            elif found.first_one < 0:
                stats.zero_mask += 1
                if stats.first_zero < 0:
                    stats.first_zero = line
            elif found.tokens > longest and found.first_one >= longest:
                stats.zero_after_cut += 1
            if len(stats.hashes) < MAX_HASHES:
                stats.hashes.append(hash(raw.strip()))
    return stats


class _Line:
    """A usable line, as far as the statistics need it."""

    __slots__ = ("first_one", "masked", "tokens")

    def __init__(self, tokens: int, masked: bool, first_one: int) -> None:
        self.tokens = tokens
        self.masked = masked
        self.first_one = first_one  # position of the mask's first 1, or -1


def _judge(raw: bytes, number: int, vocab_size: int | None) -> _Line:
    """As the run will read it."""
    sample = _parse(raw, number, vocab_size, None)
    mask = sample.loss_mask
    first = mask.index(1) if mask is not None and 1 in mask else -1
    return _Line(len(sample.input_ids), mask is not None, first)


def _reader(vocab_size: int | None, fast: bool) -> Callable[[bytes, int], _Line]:
    """A function from a line and its number to what matters in it."""

    def careful(raw: bytes, number: int) -> _Line:
        return _judge(raw, number, vocab_size)

    if not fast:
        return careful
    try:
        msgspec, numpy = importlib.import_module("msgspec"), importlib.import_module("numpy")
    except ImportError:
        return careful
    bound = vocab_size if vocab_size is not None else MAX_TOKEN_ID + 1
    record = msgspec.defstruct("Record", [("input_ids", msgspec.Raw), ("loss_mask", msgspec.Raw, b"")])
    decode = msgspec.json.Decoder(record).decode
    digits = bytes.maketrans(b"123456789", b"000000000")
    too_long = b"0" * 19

    def quick(raw: bytes, number: int) -> _Line:
        # The decoder has made sure that it is JSON: what is left of a flat list of plain numbers without
        # digits, commas and blanks is one pair of brackets. Anything else is judged with care.
        try:
            found = decode(raw)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return careful(raw, number)
        ids, mask = bytes(found.input_ids), bytes(found.loss_mask)
        if ids.translate(None, b"0123456789, ") != b"[]" or too_long in ids.translate(digits):
            return careful(raw, number)
        if not ids[1:-1].strip():
            return careful(raw, number)
        values = numpy.fromstring(ids[1:-1].decode(), dtype=numpy.int64, sep=",")
        if len(values) != ids.count(b",") + 1 or int(values.max()) >= bound:
            return careful(raw, number)
        if not mask or mask == b"null":
            return _Line(len(values), False, -1)
        if (
            not mask[1:-1].strip()
            or mask.translate(None, b"01, ") != b"[]"
            or mask.count(b",") + 1 != len(values)
        ):
            return careful(raw, number)
        if b"10" in mask or b"11" in mask:
            return careful(raw, number)
        first = mask.find(b"1")
        return _Line(len(values), True, mask.count(b",", 0, first) if first >= 0 else -1)

    return quick
