"""SC72x: the prepared data, and the folder that the samples go to."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from functools import lru_cache
from pathlib import Path

from ..dataio import LOCK, MANIFEST
from .base import Outcome, Unavailable, check, failed, ok, skipped, warning
from .context import Context, size
from .scan import MAX_HASHES, Stats, scan

_VOCABULARY = "outside the vocabulary"
_SAMPLE = re.compile(r"data_(0|[1-9][0-9]*)\.pt|hs_(0|[1-9][0-9]*)\.safetensors")
#: Beside the tensors: the zip container of torch.save, and a block that is partly used.
_FILE_OVERHEAD = 6 * 1024
_NETWORK = {
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "9p",
    "ceph",
    "fuse.s3fs",
    "fuse.gcsfuse",
    "fuse.mountpoint-s3",
}


@lru_cache(maxsize=2)
def _scanned(path: str, changed: float, vocab_size: int | None, max_seq_len: int) -> Stats:
    return scan(path, vocab_size=vocab_size, max_seq_len=max_seq_len)


def stats(context: Context) -> Stats:
    """The scan of ``--data``, made once.

    Raises:
        OSError: the file cannot be read.
    """
    path = context.options.data
    if path is None:
        raise Unavailable("give --data")
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("it is not a regular file")
    vocab: int | None = None
    if context.options.model is not None:
        try:
            vocab = context.facts.vocab_size
        except Unavailable:
            vocab = None
    return _scanned(path, os.stat(path).st_mtime, vocab, context.options.max_seq_len)


def _readable(context: Context) -> Stats:
    try:
        return stats(context)
    except OSError:
        raise Unavailable("the file can't be read (SC720)") from None


def _good(context: Context) -> Stats:
    found = _readable(context)
    if not found.good:
        raise Unavailable("no usable line (SC720, SC721)")
    return found


def _places(found: Stats, *words: str, without: str = "\0") -> tuple[int, str]:
    """How many lines are bad for a reason with these words, and the reasons with the first places."""
    count, texts = 0, []
    for reason, (times, places) in sorted(found.bad.items(), key=lambda entry: -entry[1][0]):
        if any(word in reason for word in words) and without not in reason:
            count += times
            detail = f" ({places[0][1]})" if places[0][1] else ""
            texts.append(f"{times} x {reason}, first in line {places[0][0] + 1}{detail}")
    return count, "; ".join(texts[:3])


@check("SC720", "data", "lines")
def lines(context: Context) -> Outcome:
    path = context.options.data
    try:
        found = stats(context)
    except OSError as error:
        return failed(
            f"{path}: {error.strerror or error}",
            expected="a readable JSONL file with the tokenized prompts",
            why="the prompts are read from it",
            mend="check --data and its permissions",
        )
    count, text = _places(found, "", without=_VOCABULARY)
    others, _ = _places(found, "loss_mask")
    if not found.good and not _places(found, _VOCABULARY)[0]:
        return failed(
            f"no usable line among {found.lines:,}" + (f": {text}" if text else ""),
            expected='lines like {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
            why="there is nothing to extract hidden states for",
            mend="give the tokenized file (JSONL), not raw text or one JSON array",
        )
    if count > others:
        return warning(
            f"{found.good:,} of {found.lines:,} usable; {text}",
            expected='on every line {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}',
            why="the run skips bad lines, counts them and reports them at the end",
            mend=f"sed -n {_first(found)}p {path}   (shows the first one)",
        )
    return ok(f"{found.good:,} of {found.lines:,} lines usable, {size(os.path.getsize(str(path)))}")


def _first(found: Stats) -> int:
    return min(places[0][0] for reason, (_, places) in found.bad.items() if _VOCABULARY not in reason) + 1


@check("SC721", "data", "token ids")
def vocabulary(context: Context) -> Outcome:
    found = _readable(context)
    count, text = _places(found, _VOCABULARY)
    if context.options.model is None:
        return skipped("give --model: its vocabulary is the measure")
    if not count:
        if not found.good:
            return skipped("no usable line (SC720)")
        vocab = context.facts.vocab_size
        return (
            ok(f"all below the vocabulary of {vocab}")
            if vocab
            else skipped("config.json names no vocabulary")
        )
    how = failed if count > found.good else warning
    return how(
        text,
        expected="token ids of this model's own tokenizer",
        why="tokens of another model give states that mean nothing; the run skips these lines",
        mend="tokenize again with the tokenizer in --model",
    )


@check("SC722", "data", "lengths")
def lengths(context: Context) -> Outcome:
    found = _good(context)
    longest, shortest = max(found.lengths, default=0), min(found.lengths, default=0)
    cut = found.truncated(context.options.max_seq_len)
    text = f"{shortest} to {longest} tokens, median {_median(found)}, {found.tokens:,} in all"
    if cut > found.good / 10:
        kept = found.cut_tokens(context.options.max_seq_len)
        return warning(
            f"{text}; {cut:,} ({100 * cut / found.good:.0f}%) longer than {context.options.max_seq_len}",
            expected="few samples beyond --max-seq-len",
            why=f"they are cut, and {found.tokens - kept:,} tokens are lost, answers mostly",
            mend=f"--max-seq-len {_quantile(found, 0.99)}",
        )
    return ok(f"{text}; {cut:,} will be cut to {context.options.max_seq_len}")


def _median(found: Stats) -> int:
    return _quantile(found, 0.5)


def _quantile(found: Stats, share: float) -> int:
    seen = 0
    for length in sorted(found.lengths):
        seen += found.lengths[length]
        if seen >= share * found.good:
            return length
    return 0


@check("SC723", "data", "loss masks")
def masks(context: Context) -> Outcome:
    found = _good(context)
    count, text = _places(found, "loss_mask")
    problems = [text] if count else []
    if found.zero_mask:
        problems.append(f"{found.zero_mask:,} all zero, first in line {found.first_zero + 1}")
    if found.zero_after_cut:
        problems.append(
            f"{found.zero_after_cut:,} all zero once they are cut to {context.options.max_seq_len}"
        )
    if found.without_mask:
        problems.append(f"{found.without_mask:,} lines without one")
    if not problems:
        return ok(f"on all {found.good:,} usable lines, each with something to train on")
    expected = "a loss_mask of the same length as input_ids, with a 1 for each token to train on"
    if found.good and found.zero_mask == found.good:
        return failed(
            "; ".join(problems),
            expected=expected,
            why="nothing would be trained on",
            mend="prepare the data again: the assistant's turns were not recognised (chat template?)",
        )
    why = []
    if found.without_mask:
        why.append("all ones are written where it is missing, so every token is trained on")
    if found.zero_mask or found.zero_after_cut:
        why.append("a sample without a 1 costs time and trains nothing")
    if count:
        why.append("lines with a bad mask are skipped")
    return warning(
        "; ".join(problems), expected=expected, why="; ".join(why), mend="prepare the data again, with masks"
    )


@check("SC724", "data", "duplicates")
def duplicates(context: Context) -> Outcome:
    found = _good(context)
    looked = "" if found.good <= MAX_HASHES else f" among the first {MAX_HASHES:,}"
    if found.duplicates:
        share = 100 * found.duplicates / max(1, len(found.hashes))
        return warning(
            f"{found.duplicates:,} lines ({share:.1f}%) are copies of others{looked}",
            expected="each prompt once",
            why="each copy costs as much as the first, in time and on the disk",
            mend=f"awk '!seen[$0]++' {context.options.data} > unique.jsonl",
        )
    return ok(f"none{looked}")


def sample_bytes(context: Context) -> int:
    """What the run writes, in bytes."""
    found, options = _good(context), context.options
    tokens = found.cut_tokens(options.max_seq_len)
    count = found.good
    if options.limit is not None and count > options.limit:
        tokens, count = tokens * options.limit // count, options.limit
    # Layers named twice are written twice; token ids and mask take 8 bytes each.
    a_token = len(context.layer_ids) * context.shape[1] * context.state_bytes + 16
    return tokens * a_token + count * _FILE_OVERHEAD


@check("SC725", "data", "size on disk")
def disk(context: Context) -> Outcome:
    if context.options.model is None:
        return skipped("give --model: hidden size and layers are the measure")
    need = sample_bytes(context)
    if context.options.output_dir is None:
        return ok(f"{size(need)} will be written; give --output-dir to compare it with the disk")
    folder = _existing(Path(context.options.output_dir))
    free = shutil.disk_usage(folder).free
    there = _present(Path(context.options.output_dir))[1]
    left = max(0, need - there)
    text = f"{size(left)} to be written, {size(free)} free there"
    if left > free * 0.98:
        return failed(
            text,
            expected="room for all samples",
            why="the run would end with SC602 hours later; what is written till then is kept",
            mend="give an --output-dir on a larger disk, or fewer --layer-ids",
        )
    return ok(text + (f", {size(there)} there already" if there else ""))


def _existing(path: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = path.absolute()
    while not path.exists() and path.parent != path:
        path = path.parent
    return path


def _present(folder: Path) -> tuple[int, int]:
    """Number and bytes of the samples in the folder."""
    count = total = 0
    for place in (folder, folder / "hidden_states"):  # one for each format
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if _SAMPLE.fullmatch(entry.name):
                        count += 1
                        total += entry.stat().st_size
        except OSError:
            continue
    return count, total


@check("SC726", "data", "output folder")
def output_dir(context: Context) -> Outcome:
    name = context.options.output_dir
    if name is None:
        return skipped("give --output-dir")
    path = Path(name)
    nearest = _existing(path)
    if not nearest.is_dir():
        return failed(
            f"{nearest} is not a folder",
            expected="a folder, or a place where one can be made",
            why="the samples are written there",
            mend="give another --output-dir",
        )
    kind = file_system(nearest)
    if not os.access(nearest, os.W_OK | os.X_OK):
        read_only = bool(os.statvfs(nearest).f_flag & os.ST_RDONLY)
        return failed(
            f"{nearest} ({kind}) can't be written to"
            + (": the file system is read-only" if read_only else ""),
            expected="a folder that this user can write to",
            why="the run would end with SC603 after the load",
            mend="give another --output-dir"
            if read_only
            else f"chmod u+rwx {nearest}, or give another --output-dir",
        )
    text = f"{name} on {kind}" if path.exists() else f"{name} will be made, on {kind}"
    if kind in ("tmpfs", "ramfs"):
        return warning(
            text,
            expected="a disk",
            why="the samples would fill the memory, and be gone after a reboot",
            mend="give an --output-dir on a disk",
        )
    if kind in _NETWORK:
        return warning(
            text,
            expected="a local disk, for speed",
            why="each sample is synced to the server before the next; every write waits for the network",
            mend="give a local --output-dir and copy the samples afterwards",
        )
    return ok(text)


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, as the kernel names it."""
    real = os.path.realpath(path)
    best, kind = "", "an unknown file system"
    try:
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = real == point or real.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= len(best):
                best, kind = point, after.split()[0]
    except (OSError, IndexError):
        pass
    return kind


@check("SC727", "data", "earlier run")
def resumable(context: Context) -> Outcome:
    name = context.options.output_dir
    if name is None:
        return skipped("give --output-dir")
    folder = Path(name)
    if not folder.is_dir():
        return ok("none: the folder will be new")
    if _locked(folder):
        return failed(
            f"another run is writing to {folder}",
            expected="one run a folder",
            why="this one would stop with SC607",
            mend=f"fuser {folder / LOCK}   (shows which process), or give another --output-dir",
        )
    count, total = _present(folder)
    if not count:
        return ok("none: no samples in the folder")
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        old = manifest["settings"]
        complete = bool(manifest.get("complete"))
    except (OSError, ValueError, KeyError, TypeError):
        return failed(
            f"{count:,} samples in {folder}, without a {MANIFEST} that can be read",
            expected="samples of an earlier run with their manifest, or an empty folder",
            why="how they were made is not known, so the run refuses to add to them (SC604)",
            mend="give another --output-dir",
        )
    differ = _differences(context, old) if isinstance(old, dict) else ["its settings can't be read"]
    if differ:
        return failed(
            f"{count:,} samples made with other settings: {'; '.join(differ[:4])}",
            expected="the same settings as in the run to be resumed",
            why="samples made in different ways must not be mixed (SC604)",
            mend="repeat the command with the old settings, or give another --output-dir",
        )
    state = "complete" if complete else "can be resumed"
    return ok(f"{count:,} samples, {size(total)}: {state}")


def _differences(context: Context, old: dict[str, object]) -> list[str]:
    """Where manifest and options disagree, as far as can be seen without reading the data again."""
    options = context.options
    now: dict[str, object] = {"max_seq_len": options.max_seq_len}
    if options.layer_ids is not None:
        now["layer_ids"] = context.layer_ids
    if "dtype" in options.vllm_args:
        now["dtype"] = str(options.vllm_args["dtype"])
    found = [
        f"{key} {old.get(key)} then, {value} now"
        for key, value in now.items()
        if key in old and old[key] != value
    ]
    model, data = old.get("model"), old.get("data")
    if options.model is not None and isinstance(model, dict):
        path = os.path.abspath(options.model) if model.get("config_sha256") else options.model
        if model.get("path") not in (None, path):
            found.append(f"model {model.get('path')} then")
    if options.data is not None and isinstance(data, dict) and os.path.isfile(options.data):
        then, here = data.get("bytes"), os.path.getsize(options.data)
        found += [f"data of {then} bytes then, {here} now"] if then not in (None, here) else []
    return found


def _locked(folder: Path) -> bool:
    try:
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(handle)
