"""compat-check --data and --output-dir: for each id a bad input and a good one; and how large files are
read.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doctor_support import lines, make_model, run

from speculators_compat import dataio
from speculators_compat.doctor import data, scan
from speculators_compat.doctor.scan import Stats


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def record(length: int = 4, start: int = 1, mask: Any = True) -> dict[str, Any]:
    sample: dict[str, Any] = {"input_ids": list(range(start, start + length))}
    if mask is True:
        sample["loss_mask"] = [0] + [1] * (length - 1)
    elif mask is not None:
        sample["loss_mask"] = mask
    return sample


GOOD = [record(4, k) for k in range(1, 21)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return lines(tmp_path / "good.jsonl", GOOD)


# --- SC720: lines ---


def test_lines(good: Path) -> None:
    result = run("SC720", data=good)
    assert (result.status, result.outcome.found.startswith("20 of 20 lines usable")) == ("ok", True)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ('{"input_ids": [1, 2', "not JSON, first in line 21"),
        ("[1, 2]", "not an object"),
        ('{"text": "hello"}', "lacks input_ids, first in line 21 (has text)"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, -2]}, "negative"),
        ({"input_ids": [1, 2.5]}, "something other than an integer"),
        ({"input_ids": [1, True]}, "something other than an integer"),
        ({"input_ids": [[1, 2]]}, "something other than an integer"),
        ({"input_ids": "1 2"}, "not a list"),
        ('{"input_ids": [1, 99999999999999999999999]}', "outside the vocabulary"),
        ('{"input_ids": [01]}', "not JSON"),
    ],
)
def test_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, words: str) -> None:
    monkeypatch.setattr(scan, "SMALL", 0)
    path = lines(tmp_path / "bad.jsonl", [*GOOD, bad])
    id = "SC721" if "vocabulary" in words else "SC720"
    found = scan.scan(str(path), vocab_size=256, max_seq_len=100)
    assert (found.good, found.skipped, found.lines) == (20, 1, 21)
    result = run(id, data=path, model=make_model(tmp_path / "m"))
    assert (result.status, words in result.outcome.found) == ("warning", True), result.outcome.found
    if id == "SC720":
        assert result.outcome.mend.startswith("sed -n 21p ")


@pytest.mark.parametrize(
    "content", ["", "\n\n", '[{"input_ids": [1]}]\n', "hello\nworld\n", '{"text": "x"}\n']
)
def test_no_usable_line(tmp_path: Path, content: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    assert run("SC720", data=path).status == "failed"
    for id in ("SC722", "SC723", "SC724"):
        assert run(id, data=path).status == "skipped"


def test_file_that_can_not_be_read(tmp_path: Path) -> None:
    assert "No such file" in run("SC720", data=tmp_path / "none.jsonl").outcome.found
    assert run("SC720", data=tmp_path).status == "failed"
    assert run("SC722", data=tmp_path).status == "skipped"
    assert run("SC720").status == "skipped"


def test_permission_denied(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*args: Any, **kwargs: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(data, "scan", denied)
    data._scanned.cache_clear()
    result = run("SC720", data=good)
    assert (result.status, "Permission denied" in result.outcome.found) == ("failed", True)


# --- SC721: token ids ---


def test_token_ids(good: Path, model: Path) -> None:
    assert run("SC721", data=good, model=model).outcome.found == "all below the vocabulary of 256"
    assert run("SC721", data=good).status == "skipped"


def test_token_ids_of_another_model(tmp_path: Path, model: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [*GOOD, record(3, 254)])
    result = run("SC721", data=path, model=model)
    assert (result.status, "256 at 2, size 256" in result.outcome.found) == ("warning", True)
    path = lines(tmp_path / "e.jsonl", [record(3, 1000)] * 3)
    assert run("SC721", data=path, model=model).status == "failed"


# --- SC722: lengths ---


def test_lengths(good: Path) -> None:
    found = run("SC722", data=good, max_seq_len=4).outcome.found
    assert found == "4 to 4 tokens, median 4, 80 in all; 0 will be cut to 4"


def test_many_are_cut(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [record(4), record(5), record(9), record(20)])
    result = run("SC722", data=path, max_seq_len=8)
    assert result.status == "warning"
    assert "4 to 20 tokens, median 5, 38 in all; 2 (50%) longer than 8" in result.outcome.found
    assert "13 tokens are lost" in result.outcome.why


# --- SC723: loss masks ---


def test_masks(good: Path) -> None:
    assert run("SC723", data=good).status == "ok"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (record(3, mask=None), "1 lines without one"),
        ({"input_ids": [1, 2], "loss_mask": None}, "1 lines without one"),
        (record(3, mask=[0, 0, 0]), "1 all zero, first in line 21"),
        (record(3, mask=[0, 1]), "another length"),
        (record(3, mask=[0, 1, 2]), "something other than 0 and 1"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 11]}', "something other than 0 and 1"),
        ('{"input_ids": [1, 2], "loss_mask": [1, 10]}', "something other than 0 and 1"),
        (record(9, mask=[0] * 8 + [1]), "1 all zero once they are cut to 8"),
    ],
)
def test_bad_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any, words: str) -> None:
    monkeypatch.setattr(scan, "SMALL", 0)
    path = lines(tmp_path / "d.jsonl", [*GOOD, bad])
    result = run("SC723", data=path, max_seq_len=8)
    assert (result.status, words in result.outcome.found) == ("warning", True), result.outcome.found
    # a bad mask is told once, not under SC720 too
    assert run("SC720", data=path, max_seq_len=8).status == "ok"


def test_masks_of_true_and_false(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [*GOOD, record(2, mask=[False, True])])
    assert run("SC723", data=path).status == "ok"


def test_nothing_to_train_on(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", [record(3, k, mask=[0, 0, 0]) for k in range(5)])
    assert run("SC723", data=path).status == "failed"


# --- SC724: duplicates ---


def test_duplicates(good: Path, tmp_path: Path) -> None:
    assert run("SC724", data=good).status == "ok"
    path = lines(tmp_path / "d.jsonl", [*GOOD, GOOD[3], GOOD[3], GOOD[4]])
    result = run("SC724", data=path)
    assert (result.status, "3 lines (13.0%)" in result.outcome.found) == ("warning", True)


# --- SC725: space ---


def test_space(good: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("SC725", data=good).status == "skipped"
    # 80 tokens x (4 layers x 64 x 2 + 16) + 20 x 6 KiB
    need = 80 * 528 + 20 * 6144
    assert f"{need / 1024:.1f} KiB will be written" in run("SC725", data=good, model=model).outcome.found
    out = tmp_path / "out"
    result = run("SC725", data=good, model=model, output_dir=out)
    assert (result.status, "free there" in result.outcome.found) == ("ok", True)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1, 1, need - 1))
    assert run("SC725", data=good, model=model, output_dir=out).status == "failed"
    half = run("SC725", data=good, model=model, output_dir=out, limit=10)
    assert half.status == "ok"
    out.mkdir()
    (out / "data_3.pt").write_bytes(bytes(9000))
    assert "8.8 KiB there already" in run("SC725", data=good, model=model, output_dir=out).outcome.found


# --- SC726: the output folder ---


def test_output_dir(tmp_path: Path) -> None:
    assert run("SC726").status == "skipped"
    result = run("SC726", output_dir=tmp_path / "a" / "b")
    assert (result.status, "a/b will be made, on " in result.outcome.found) == ("ok", True)
    assert list(tmp_path.iterdir()) == []  # looked at, not made


def test_output_dir_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert run("SC726", output_dir=tmp_path / "f").status == "failed"
    assert run("SC726", output_dir=tmp_path / "f" / "below").status == "failed"


def test_output_dir_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    result = run("SC726", output_dir=tmp_path)
    assert (result.status, "can't be written to" in result.outcome.found) == ("failed", True)


@pytest.mark.parametrize("kind", ["tmpfs", "nfs4"])
def test_output_dir_on_an_odd_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(data, "file_system", lambda path: kind)
    assert run("SC726", output_dir=tmp_path).status == "warning"


def test_file_system() -> None:
    assert data.file_system(Path("/proc")) == "proc"
    assert data.file_system(Path("/dev/shm")) == "tmpfs"


# --- SC727: an earlier run ---


def earlier(folder: Path, **settings: Any) -> Path:
    folder.mkdir()
    (folder / "data_0.pt").write_bytes(b"x")
    content = {
        "settings": {"max_seq_len": 2048, "layer_ids": [1, 2], "dtype": "auto", **settings},
        "complete": False,
    }
    (folder / dataio.MANIFEST).write_text(json.dumps(content))
    return folder


def test_resumable(tmp_path: Path) -> None:
    assert run("SC727").status == "skipped"
    assert run("SC727", output_dir=tmp_path / "new").status == "ok"
    assert "no samples" in run("SC727", output_dir=tmp_path).outcome.found
    out = earlier(tmp_path / "out")
    assert (
        "1 samples, 1 bytes: can be resumed" in run("SC727", output_dir=out, layer_ids=(1, 2)).outcome.found
    )


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({}, {"max_seq_len": 4096}, "max_seq_len 2048 then, 4096 now"),
        ({}, {"layer_ids": (1,)}, "layer_ids [1, 2] then, [1] now"),
        ({}, {"vllm_args": {"dtype": "float32"}}, "dtype auto then, float32 now"),
        ({"model": {"path": "/other", "config_sha256": "x"}}, {"model": "/here"}, "model /other then"),
    ],
)
def test_other_settings(tmp_path: Path, settings: Any, options: Any, words: str) -> None:
    result = run("SC727", output_dir=earlier(tmp_path / "out", **settings), **options)
    assert (result.status, words in result.outcome.found) == ("failed", True), result.outcome.found


def test_other_data(tmp_path: Path, good: Path) -> None:
    out = earlier(tmp_path / "out", data={"bytes": 7})
    assert "data of 7 bytes then" in run("SC727", output_dir=out, data=good).outcome.found


def test_samples_without_a_manifest(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    (out / dataio.MANIFEST).write_text('{"settings"')
    assert run("SC727", output_dir=out).status == "failed"


def test_folder_in_use(tmp_path: Path) -> None:
    out = earlier(tmp_path / "out")
    lock = os.open(out / dataio.LOCK, os.O_RDWR | os.O_CREAT)
    child = os.fork()  # locks are a process's own: another one has to hold it
    if child == 0:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        time.sleep(60)
        os._exit(0)
    try:
        end = time.monotonic() + 10
        while (
            result := run("SC727", output_dir=out, layer_ids=(1, 2))
        ).status == "ok" and time.monotonic() < end:
            time.sleep(0.05)
        assert (result.status, "another run is writing" in result.outcome.found) == ("failed", True)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(lock)


# --- reading ---


def slow(path: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Stats:
    """As :func:`scan.scan`, with no help of other packages."""
    import importlib

    def missing(name: str) -> Any:
        raise ImportError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", missing)
        return scan.scan(str(path), **arguments)


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(1)
    records: list[Any] = [record(draw.randrange(1, 60), draw.randrange(100)) for _ in range(500)]
    for position, bad in ((3, "{"), (250, record(3, mask=[0])), (251, ""), (498, record(2, 5000))):
        records[position] = bad
    path = lines(tmp_path / "d.jsonl", records)
    arguments = {"vocab_size": 256, "max_seq_len": 32}
    whole = scan.scan(str(path), **arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(scan, "PIECE", 1000)
    monkeypatch.setattr(scan, "SMALL", 0)
    assert len(scan._pieces(str(path))) > 20
    for found in (scan.scan(str(path), **arguments), slow(path, monkeypatch, **arguments)):  # type: ignore[arg-type]
        assert (found.lines, found.good, found.skipped) == (500, 496, 3)
        assert found.lengths == whole.lengths
        assert found.bad == whole.bad
        places = {line for _, places in found.bad.values() for line, _ in places}
        assert places == {3, 250, 498}
        assert found.zero_after_cut == whole.zero_after_cut
        assert found.duplicates == whole.duplicates


def test_a_piece_that_ends_in_a_long_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "MAX_LINE_BYTES", 500)
    monkeypatch.setattr(scan, "PIECE", 300)
    path = lines(tmp_path / "d.jsonl", [record(4), record(400), record(4, 2), "x" * 3000, record(4, 3)])
    found = scan.scan(str(path), vocab_size=None, max_seq_len=10)
    assert (found.lines, found.good, found.skipped) == (5, 3, 2)
    assert sorted(line for _, places in found.bad.values() for line, _ in places) == [1, 3]


@pytest.mark.parametrize("small", [0, 10**6])
def test_what_the_run_skips_is_what_the_check_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    monkeypatch.setattr(scan, "SMALL", small)
    records = [
        '{"input_ids": [1], "x": NaN}',
        '{"input_ids":[1,2],"loss_mask":[1,0]}',
        "\ufeff{}",
        '{"input_ids": [1e2]}',
    ]
    path = lines(tmp_path / "d.jsonl", [*records, record(3), '{"input_ids": [1,2],\t"loss_mask": [0,\n'])
    read = list(dataio.read_samples(path, vocab_size=256))
    found = scan.scan(str(path), vocab_size=256, max_seq_len=100)
    assert found.good == sum(isinstance(item, dataio.Sample) for item in read)
    assert found.skipped == sum(isinstance(item, dataio.Skipped) for item in read)


def test_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    text = json.dumps(record(20)) + "\n"
    path.write_text(text * 100_000)
    began = time.monotonic()
    result = run("SC720", data=path)
    assert result.outcome.found.startswith("100,000 of 100,000")
    assert time.monotonic() - began < 30  # 1 s on an idle host
    assert run("SC724", data=path).status == "warning"
