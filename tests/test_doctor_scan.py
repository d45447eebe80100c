"""The quick reader of prepared data judges every line as the run itself does.

It needs msgspec and numpy, which come with vLLM.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from doctor_support import lines

from speculators_compat import dataio
from speculators_compat.doctor import scan

pytest.importorskip("torch", reason="these tests run where vLLM is installed")
pytest.importorskip("msgspec", reason="runs where vLLM is installed")

IDS = [
    "[1, 2, 3]", "[1,2,3]", "[ 1 , 2 ]", "[]", "[ ]", "[255]", "[256]", "[1, 256, 3]", "[-1]", "[1, -0]",
    "[1.0]", "[1e2]", "[true]", "[null]", '["1"]', "[[1]]", "[1, [2]]", "[1,,2]", "[1 2]", "[1, 2", "[01]",
    "[1]]", "{}", "null", "5", '"1, 2"', "[99999999999999999999]", "[9223372036854775808]", "[1,\\t2]",
    "[1,\t2]", "[10, 11, 100]", "[1, 2,]", "[NaN]", "[+1]",
]  # fmt: skip
MASKS = [
    None, "null", "[1, 0, 1]", "[0, 0, 0]", "[1, 1]", "[0,1]", "[1]", "[2, 0, 0]", "[10, 0, 0]",
    "[0, 0, 11]", "[0, 0, 0.0]", "[true, false, true]", "[]", "[ ]", "[0, 0, -1]", "[0, 0, 0, 1]", '"101"',
    "{}", "[01, 0, 0]",
]  # fmt: skip


def expected(path: Path, vocab: int | None) -> list[Any]:
    return [
        (item.line, len(item.input_ids), item.loss_mask)
        if isinstance(item, dataio.Sample)
        else (item.line, item.reason, item.detail)
        for item in dataio.read_samples(path, vocab_size=vocab)
    ]


def judged(path: Path, vocab: int | None) -> list[Any]:
    read, found = scan._reader(vocab, True), []
    with open(path, "rb") as file:
        for number, raw in enumerate(file):
            if raw.strip():
                try:
                    line = read(raw, number)
                    found.append((number + 1, line))
                except dataio._BadLine as bad:
                    found.append((number + 1, bad.reason, bad.detail))
    return found


@pytest.mark.parametrize("vocab", [256, None])
def test_every_form_of_a_line(tmp_path: Path, vocab: int | None) -> None:
    records = []
    for ids in IDS:
        for mask in MASKS:
            extra = "" if mask is None else f', "loss_mask": {mask}'
            records += [
                f'{{"input_ids": {ids}{extra}}}',
                f'{{"text": "a[1]", "input_ids":{ids}{extra}, "x": [1]}}',
            ]
    records += ["", "[]", "{", "{}", '{"loss_mask": [1]}', '{"input_ids": [1], "input_ids": [2, 3]}']
    path = lines(tmp_path / "d.jsonl", records)
    wanted, got = expected(path, vocab), judged(path, vocab)
    assert len(wanted) == len(got) > 1000
    for one, other in zip(wanted, got, strict=True):
        if isinstance(one[1], str):
            assert one == other
        else:
            line = other[1]
            assert (one[0], one[1]) == (other[0], line.tokens), records[one[0] - 1]
            assert line.masked == (one[2] is not None)
            first = one[2].index(1) if one[2] and 1 in one[2] else -1
            assert line.first_one == first


def test_random_samples(tmp_path: Path) -> None:
    draw = random.Random(3)
    records = []
    for _ in range(300):
        length = draw.randrange(1, 300)
        mask = [draw.randrange(2) for _ in range(length)]
        records.append({"input_ids": [draw.randrange(163_840) for _ in range(length)], "loss_mask": mask})
    path = lines(tmp_path / "d.jsonl", records)
    quick = scan.scan(str(path), vocab_size=163_000, max_seq_len=100)
    with open(path, "a") as file:  # the same again, read with care: a piece small enough
        file.write(json.dumps(records[0]) + "\n")
    careful = scan._read((str(path), 0, path.stat().st_size, 163_000, 100, False))
    assert careful.good - quick.good in (0, 1)
    fast = scan._read((str(path), 0, path.stat().st_size, 163_000, 100, True))
    assert (fast.lengths, fast.bad, fast.zero_mask, fast.zero_after_cut) == (
        careful.lengths,
        careful.bad,
        careful.zero_mask,
        careful.zero_after_cut,
    )
