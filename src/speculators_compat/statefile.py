"""A file of hidden states that vLLM's ``ExampleHiddenStatesConnector`` writes, possibly still being written."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import CompatError

if TYPE_CHECKING:
    import torch

#: Seconds between two looks.
INTERVAL = 0.02
#: What file systems say that have no such locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EIO)


def length_by_header(path: Path) -> int | None:
    """The bytes that a safetensors file must have, from its header; ``None`` where even that is not whole.

    Raises:
        FileNotFoundError: without the file.
        CompatError: SC803 if it is no safetensors file.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        if len(start) < 8:
            return None
        length = int.from_bytes(start, "little")
        if not 2 <= length <= 100_000_000:
            # A file that was made long before it was filled begins with zeros.
            if length == 0:
                return None
            raise _broken(path, f"its header would have {length:,} bytes", size)
        header = file.read(length)
    if len(header) < length:
        return None
    try:
        entries = {k: v for k, v in json.loads(header).items() if k != "__metadata__"}
        return 8 + length + max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if not header.strip(b"\0 "):
            return None
        raise _broken(path, f"its header can't be read: {error}", size) from None


def token_ids_of(path: Path) -> tuple[int, ...] | None:
    """The token ids in a whole file, read without torch; ``None`` if it holds none or can't be read."""
    try:
        with open(path, "rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(start - 8))["token_ids"]
            code = {"I32": "i", "I64": "q"}[entry["dtype"]]
            first, last = entry["data_offsets"]
            file.seek(start + first)
            return tuple(number for (number,) in struct.iter_unpack(f"<{code}", file.read(last - first)))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None


def wait_until_whole(path: Path, *, seconds: float | None = 120.0) -> None:
    """Wait until nobody holds ``PATH.lock`` and the file is as long as its header says.

    Where the file system has no locks, or vLLM writes none, the length alone decides, seen twice. The lock file is left.

    Raises:
        CompatError: SC802 when the time is over, SC803 for a file that is no safetensors file.
    """
    lock = Path(f"{path}.lock")
    deadline = None if seconds is None else time.monotonic() + seconds
    unlocked, before, state = False, -1, "it is not there"
    while True:
        if not unlocked:
            unlocked = _unlocked(lock)
            state = f"{lock.name} is held by the writer"
        if unlocked:
            try:
                expected, size = length_by_header(path), path.stat().st_size
            except FileNotFoundError:
                expected, size, state = None, -1, "it is not there"
            else:
                state = f"it has {size:,} bytes" + (f" of {expected:,}" if expected is not None else ", no whole header")
            if expected is not None and size == expected == before:
                return
            if expected is not None and size > expected:
                raise _broken(path, f"its header says {expected:,} bytes", size)
            before = size
        if deadline is not None and time.monotonic() >= deadline:
            raise CompatError(
                "SC802",
                found=f"{path}: {state} after {seconds:g} s",
                expected="a file as long as its header says, and no writer that holds its lock",
                why="states of a file that is still being written, or was never finished, would be wrong",
                mend="look at the server's log; check that this host sees the server's folder (compat-check --url); or "
                "give requests more time",
            )
        time.sleep(INTERVAL)


def _unlocked(lock: Path) -> bool:
    """Whether nobody writes; a lock that can't be asked for counts as none, and the file's length decides."""
    for flags, kind in ((os.O_RDWR, fcntl.LOCK_EX), (os.O_RDONLY, fcntl.LOCK_SH)):
        try:
            handle = os.open(lock, flags)
        except FileNotFoundError:
            return True
        except OSError:  # this user may only read it
            continue
        try:
            fcntl.flock(handle, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        finally:
            os.close(handle)
    return True


def checked_states(
    path: str | os.PathLike[str],
    tokens: Sequence[int],
    *,
    layers: int | None = None,
    hidden_size: int | None = None,
    seconds: float | None = 120.0,
    keep_lock: bool = False,
) -> torch.Tensor:
    """The states in a file of the connector, once it is whole and what it should be.

    Args:
        tokens: the prompt.
        layers: how many layers there must be; any number without it.
        seconds: how long to wait for the whole file.
        keep_lock: leave ``PATH.lock``; without it the file is removed, because nobody writes any more.

    Returns:
        ``[len(tokens), layers, hidden size]``, in the model's dtype, on the CPU.

    Raises:
        CompatError: SC802 if the file does not become whole, SC803 if it can't be read, SC804 if it holds anything else
            than finite states of this prompt.
    """
    import torch
    from safetensors.torch import load_file

    path = Path(path)
    wait_until_whole(path, seconds=seconds)
    try:
        data: dict[str, Any] = load_file(path)
    except Exception as error:  # safetensors raises an error of its own
        raise _broken(path, str(error), path.stat().st_size) from error
    wrong = ""
    missing = [name for name in ("hidden_states", "token_ids") if name not in data]
    if missing:
        raise _wrong(path, f"no {' and no '.join(missing)}")
    states, echoed = data["hidden_states"], data["token_ids"].tolist()
    rows = len(tokens)
    if echoed != list(tokens):
        wrong = f"{len(echoed)} token ids that are not the prompt's {rows}"
    elif states.ndim != 3 or states.shape[0] != rows:
        wrong = f"states of shape {tuple(states.shape)} for {rows} tokens"
    elif layers is not None and states.shape[1] != layers:
        wrong = f"{states.shape[1]} layers, not {layers}"
    elif hidden_size is not None and states.shape[2] != hidden_size:
        wrong = f"states of size {states.shape[2]}, not {hidden_size}"
    else:
        # In float32 the sum of a row is finite if its numbers are, for every dtype that states have.
        largest = states.abs().amax(dim=2).float() if rows else torch.ones(0)
        if not bool(torch.isfinite(largest).all()):
            wrong = f"{int((~torch.isfinite(largest)).any(dim=1).sum())} tokens with states that are not finite"
        elif bool((largest == 0).any()):
            wrong = f"{int((largest == 0).any(dim=1).sum())} tokens with states of nothing but zeros"
    if wrong:
        raise _wrong(path, wrong)
    if not keep_lock:
        Path(f"{path}.lock").unlink(missing_ok=True)
    return states


def _broken(path: Path, what: str, size: int) -> CompatError:
    return CompatError(
        "SC803",
        found=f"{path}: {what}, the file has {size:,} bytes",
        expected="a safetensors file with the tensors hidden_states and token_ids",
        why="whatever was read from it would not be the prompt's states",
        mend="delete the file and request the prompt again; look at the server's log and for free space in its folder",
    )


def _wrong(path: Path, what: str) -> CompatError:
    return CompatError(
        "SC804",
        found=f"{path} holds {what}",
        expected="the prompt's token ids and, for each, finite states of every layer asked for",
        why="a draft model trained on them would learn something else, without any error",
        mend="check the server with compat-check --url; start it as compat-check --serve prints, without prefix caching",
    )
