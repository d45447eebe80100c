"""Reading prompts, writing samples, resuming: speculators_compat.dataio."""

from __future__ import annotations

import errno
import inspect
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import dataio
from speculators_compat.dataio import Sample, SampleWriter, Skipped, Tally, find_finished, read_samples
from speculators_compat.errors import CATALOG, CompatError, CompatWarning

torch = pytest.importorskip(
    "torch", reason="samples are torch files; these tests run where vLLM is installed"
)

SETTINGS: dict[str, Any] = {"layer_ids": [0, 2], "dtype": "float32", "versions": {"vllm": "vllm 0.16.0"}}
HIDDEN = 4


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def answer(sample: Sample, layers: int = 2) -> dict[str, Any]:
    ids = torch.tensor(sample.input_ids)
    states = [(ids[:, None] * 10 + layer + torch.arange(HIDDEN) / 8).float() for layer in range(layers)]
    return {"input_ids": ids, "hidden_states": states, "loss_mask": None}


def sample(index: int = 0, length: int = 3) -> Sample:
    return Sample(index, list(range(1, length + 1)), [0] + [1] * (length - 1), length)


# ---- reading


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"input_ids": [' + "1" * 5000 + "]}", ""),
        ("[1, 2]", "not an object"),
        ("null", "not an object"),
        ({"text": "hello"}, "lacks input_ids"),
        ({"input_ids": None}, "input_ids is not a list"),
        ({"input_ids": "12"}, "input_ids is not a list"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 2.0]}, "something other than an integer"),
        ({"input_ids": [1, True]}, "something other than an integer"),
        ({"input_ids": [[1, 2]]}, "something other than an integer"),
        ({"input_ids": [1], "images": ["cat.png"]}, "holds an image, video or audio"),
        ({"input_ids": [1], "multi_modal_data": {"video": [1]}}, "holds an image, video or audio"),
        ({"input_ids": [1, None]}, "something other than an integer"),
        ('{"input_ids": [1, NaN]}', "something other than an integer"),
        ({"input_ids": [1, -1]}, "negative"),
        ({"input_ids": [1, 10]}, "outside the vocabulary"),
        ({"input_ids": [1, 2**70]}, "outside the vocabulary"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "another length"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "other than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, 1.0]}, "other than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": [1, [1]]}, "other than 0 and 1"),
        ({"input_ids": [1, 2], "loss_mask": "11"}, "loss_mask is not a list"),
    ],
)
def test_bad_line_is_skipped_and_strict_refuses_it(tmp_path: Path, line: object, reason: str) -> None:
    path = lines(tmp_path / "p.jsonl", {"input_ids": [1]}, line, {"input_ids": [9]})
    items = list(read_samples(path, vocab_size=10))
    assert [type(item) for item in items] == [Sample, Skipped, Sample]
    assert isinstance(items[1], Skipped)
    assert reason in items[1].reason
    assert items[1].line == 2
    with pytest.raises(CompatError, match=r"SC601(.|\n)*line 2") as caught:
        list(read_samples(path, vocab_size=10, strict=True))
    assert caught.value.id == "SC601"


def test_places_for_images_are_skipped(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"input_ids": [1, 3]}, {"input_ids": [1, 2]})
    skipped, good = read_samples(path, placeholders={3})
    assert isinstance(skipped, Skipped)
    assert "place for an image" in skipped.reason
    assert isinstance(good, Sample)
    assert (good.index, good.ordinal) == (1, 0)


def test_not_utf8_bom_blank_lines_and_no_newline_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"input_ids": [1]}\r\n\n{"input_ids": [2], "x": "\xff"}\n  \n{"input_ids": [3]}'
    )
    first, bad, last = read_samples(path)
    assert first == Sample(0, [1], None, 1)
    assert bad == Skipped(3, "not UTF-8", "byte 25")
    assert last == Sample(4, [3], None, 1)
    assert dataio.check_data_file(path).lines == 5


def test_cut_to_the_longest_length_with_its_mask(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl",
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, True]},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0]},
        {"input_ids": [5]},
    )
    tally = Tally()
    got = list(tally.samples(read_samples(path, max_seq_len=3)))
    assert [(s.input_ids, s.loss_mask, s.truncated) for s in got] == [
        ([1, 2, 3], [0, 1, 1], False),
        ([1, 2, 3], [0, 1, 1], True),
        ([5], None, False),
    ]
    assert (tally.good, tally.truncated, tally.without_mask, tally.skipped) == (3, 1, 1, 0)


def test_limit_counts_good_samples_and_reads_no_further(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", "bad", {"input_ids": [1]}, {"input_ids": [2]}, {"input_ids": [3]})
    assert [getattr(i, "index", None) for i in read_samples(path, limit=2)] == [None, 1, 2]


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataio, "MAX_LINE_BYTES", 2**20)
    path = lines(tmp_path / "p.jsonl", {"input_ids": [1]}, "[" + "1," * 2**20 + "1]", {"input_ids": [2]})
    first, bad, last = read_samples(path)
    assert isinstance(bad, Skipped)
    assert bad.reason == "longer than 1 MiB"
    assert isinstance(first, Sample)
    assert isinstance(last, Sample)
    assert last.line == 3


def test_tally_groups_reasons_and_names_the_first_lines(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", "a", "b", {"input_ids": []}, "c", "d")
    tally = Tally()
    assert list(tally.samples(read_samples(path))) == []
    first, second = tally.reason_lines()
    assert first.startswith("4 x not JSON: line 1 (")
    assert "line 4" in first
    assert first.endswith(", ...")
    assert second == "1 x input_ids is empty: line 3"


def test_batches() -> None:
    assert list(dataio.batches(range(5), 2)) == [[0, 1], [2, 3], [4]]
    assert list(dataio.batches([], 2)) == []


# ---- checks before the start


def test_data_file_that_can_not_be_used(tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "none.jsonl", "No such file"),
        (tmp_path, "not a regular file"),
        (lines(tmp_path / "empty.jsonl"), "no usable line among 0"),
        (lines(tmp_path / "bad.jsonl", "x", "y"), "2 x not JSON: line 1"),
    ):
        with pytest.raises(CompatError, match=said) as caught:
            dataio.check_data_file(path)
        assert caught.value.id == "SC605"


def test_model_folder(tmp_path: Path) -> None:
    def refused(said: str) -> None:
        with pytest.raises(CompatError, match=said) as caught:
            dataio.check_model_folder(str(model))
        assert caught.value.id == "SC606"

    model = tmp_path / "model"
    refused("no such folder")
    model.mkdir()
    refused(r"no config\.json")
    (model / "config.json").write_text("{")
    refused("JSONDecodeError")
    (model / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 77}}))
    refused("no weights")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused("git-lfs pointer")
    (model / "model.safetensors").write_bytes(b"\1" * 2000)
    checked = dataio.check_model_folder(str(model))
    assert checked.vocab_size == 77
    assert checked.config_sha256
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(r"model-2\.safetensors is missing, one of 2")
    assert dataio.check_model_folder("some-owner/some-model").vocab_size is None


def test_settings_leave_out_what_does_not_change_the_values(tmp_path: Path) -> None:
    data = dataio.check_data_file(lines(tmp_path / "p.jsonl", {"input_ids": [1]}))
    model = dataio.ModelFolder("owner/name")

    def make(**args: Any) -> dict[str, Any]:
        return dataio.make_settings(model, data, layer_ids=None, max_seq_len=8, vllm_args=args)

    assert make(max_num_seqs=4) == make() == make(block_size=32)
    assert make(dtype="float32") != make()
    assert make(quantization="fp8") != make()
    assert {"vllm", "speculators", "speculators_compat", "torch"} <= set(make()["versions"])


# ---- writing


def test_a_sample_is_written_as_the_trainer_reads_it(tmp_path: Path) -> None:
    one = sample(7)
    with SampleWriter(tmp_path / "out", SETTINGS) as writer:
        count = writer.write(one, answer(one))
    path = tmp_path / "out" / "data_7.pt"
    data = torch.load(path, weights_only=True, mmap=True)
    assert list(data) == ["input_ids", "hidden_states", "loss_mask"]
    assert data["input_ids"].tolist() == [1, 2, 3]
    assert data["loss_mask"].tolist() == [0, 1, 1]
    assert data["input_ids"].dtype == data["loss_mask"].dtype == torch.long
    assert all(map(torch.equal, data["hidden_states"], answer(one)["hidden_states"]))
    assert path.stat().st_size == count == writer.written_bytes
    assert json.loads((tmp_path / "out" / "sample_lengths.json").read_text()) == {"7": 3}
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["settings"] == SETTINGS
    assert manifest["recorded"]["form"] == ["torch.float32", HIDDEN]


def test_nothing_is_left_beside_and_nothing_is_world_writable(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with SampleWriter(tmp_path / "a" / "out", SETTINGS) as writer:
            writer.write(sample(), answer(sample()))
    finally:
        os.umask(before)
    out = tmp_path / "a" / "out"
    assert sorted(p.name for p in out.iterdir()) == [
        ".lock",
        "checksums.sha256",
        "data_0.pt",
        "manifest.json",
        "sample_lengths.json",
    ]
    for path in (out, *out.iterdir()):
        assert not path.stat().st_mode & (stat.S_IWOTH | stat.S_IWGRP), path


def test_views_do_not_drag_their_storage_along(tmp_path: Path) -> None:
    one = sample(0, 3)
    whole = torch.cat([answer(one)["hidden_states"][0]] * 1000)
    result = {"input_ids": one.input_ids, "hidden_states": [whole[:3], whole[:3]]}
    with SampleWriter(tmp_path, SETTINGS) as writer:
        assert writer.write(one, result) < 10_000
    states = torch.load(tmp_path / "data_0.pt", weights_only=True)["hidden_states"]
    assert states[0].untyped_storage().data_ptr() != states[1].untyped_storage().data_ptr()
    assert torch.equal(states[0], states[1])


def test_a_missing_mask_is_ones_with_one_warning(tmp_path: Path) -> None:
    three = [Sample(index, [1, 2], None, 2) for index in range(3)]
    with SampleWriter(tmp_path, SETTINGS) as writer, pytest.warns(CompatWarning) as caught:
        assert all(writer.write(one, answer(one)) for one in three)
    assert len(caught) == 1
    assert torch.load(tmp_path / "data_2.pt", weights_only=True)["loss_mask"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"input_ids": torch.tensor([1, 2])}, "other token ids"),
        ({"input_ids": torch.tensor([1, 2, 4])}, "other token ids"),
        ({"hidden_states": []}, "0 layers"),
        ({"hidden_states": [torch.zeros(3, 4)]}, "1 layers"),
        ({"hidden_states": [torch.zeros(3, 4), torch.zeros(2, 4)]}, "layer number 1 has shape"),
        ({"hidden_states": [torch.zeros(3, 4), torch.zeros(12)]}, "layer number 1 has shape"),
        ({"hidden_states": [torch.zeros(3, 4), torch.zeros(3, 5)]}, "layer number 1 is"),
        ({"hidden_states": [torch.zeros(3, 4), torch.zeros(3, 4).half()]}, "layer number 1 is"),
        ({"hidden_states": [torch.zeros(3, 5), torch.zeros(3, 5)]}, "layer number 0 is"),
    ],
)
def test_an_answer_that_does_not_fit_is_not_written(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with SampleWriter(tmp_path, SETTINGS) as writer:
        writer.write(sample(0), answer(sample(0)))
        with pytest.raises(CompatError, match=said) as caught:
            writer.write(sample(1), {**answer(sample(1)), **change})
    assert caught.value.id == "SC608"
    assert "line 2" in str(caught.value)
    assert sorted(find_finished(tmp_path)) == [0]


class Full:
    """A stream on a disk that fills up after some bytes."""

    def __init__(self, stream: Any, room: int, code: int) -> None:
        self.stream, self.room, self.code = stream, room, code

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(self.code, os.strerror(self.code))
        return int(self.stream.write(data))

    def flush(self) -> None:
        self.stream.flush()


@pytest.mark.parametrize("room", [0, 100, 700, 1100])
@pytest.mark.parametrize(
    ("code", "id"), [(errno.ENOSPC, "SC602"), (errno.EDQUOT, "SC602"), (errno.EIO, "SC603")]
)
def test_disk_full_while_torch_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, code: int, id: str
) -> None:
    with SampleWriter(tmp_path, SETTINGS) as writer:
        writer.write(sample(0), answer(sample(0)))
        real = dataio._Output.__init__
        with monkeypatch.context() as patch:
            patch.setattr(dataio._Output, "__init__", lambda self, s: real(self, Full(s, room, code)))
            with pytest.raises(CompatError) as caught:
                writer.write(sample(1), answer(sample(1)))
        assert caught.value.id == id
        assert "data_1.pt" in caught.value.found
        assert "144 bytes" in caught.value.expected  # 3 x 8 + 3 x 8 + 2 x 3 x 4 x 4
        assert not list(tmp_path.glob("*.tmp"))
        assert not writer.is_finished(sample(1))
    assert find_finished(tmp_path) == {0: 3}


def test_a_really_full_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    with SampleWriter(tmp_path, SETTINGS) as writer, monkeypatch.context() as patch:
        patch.setattr(
            dataio.os,
            "open",
            lambda path, *rest: (
                real("/dev/full", os.O_WRONLY) if str(path).endswith("0.pt.tmp") else real(path, *rest)
            ),
        )
        with pytest.raises(CompatError, match=r"SC602(.|\n)*data_0.pt: No space left"):
            writer.write(sample(), answer(sample()))
    assert not list(tmp_path.glob("data_*"))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_at_fsync_or_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with SampleWriter(tmp_path, SETTINGS) as writer, monkeypatch.context() as patch:
        patch.setattr(dataio.os, call, fail)
        with pytest.raises(CompatError, match="SC603"):
            writer.write(sample(), answer(sample()))
        assert not list(tmp_path.glob("*.tmp"))
        assert not list(tmp_path.glob("data_*"))


def test_an_output_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "out", Path("/proc/out")):
        with pytest.raises(CompatError, match="SC603"):
            SampleWriter(path, SETTINGS)


# ---- resuming


def write_some(folder: Path, *indices: int, settings: dict[str, Any] = SETTINGS) -> SampleWriter:
    with SampleWriter(folder, settings) as writer:
        for index in indices:
            writer.write(sample(index, index + 2), answer(sample(index, index + 2)))
    return writer


def test_only_whole_files_count_and_the_rest_is_removed(tmp_path: Path) -> None:
    write_some(tmp_path, *range(9))
    good = (tmp_path / "data_1.pt").read_bytes()
    (tmp_path / "data_1.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "data_2.pt").write_bytes(b"")
    (tmp_path / "data_3.pt").write_bytes(os.urandom(1000))
    content = torch.load(tmp_path / "data_4.pt", weights_only=True)
    torch.save({**content, "loss_mask": content["loss_mask"][1:]}, tmp_path / "data_4.pt")
    content = torch.load(tmp_path / "data_5.pt", weights_only=True)
    torch.save({**content, "hidden_states": content["hidden_states"][1:]}, tmp_path / "data_5.pt")
    torch.save({key: content[key] for key in ("input_ids", "hidden_states")}, tmp_path / "data_6.pt")
    torch.save({**content, "loss_mask": Path("x")}, tmp_path / "data_7.pt")  # needs code to load: not loaded
    (tmp_path / "data_9.pt.tmp").write_bytes(good)
    (tmp_path / "sample_lengths.json").unlink()
    assert find_finished(tmp_path, layers=2) == {0: 2, 8: 10}

    with SampleWriter(tmp_path, SETTINGS) as writer:
        assert sorted(writer.finished) == [0, 8]
        assert writer.resumed == 2
        assert len(writer.damaged) == 7
        assert writer.is_finished(sample(8, 10))
        assert not writer.is_finished(sample(8, 11))
        assert json.loads((tmp_path / "sample_lengths.json").read_text()) == {"0": 2, "8": 10}
    assert sorted(p.name for p in tmp_path.glob("data_*")) == ["data_0.pt", "data_8.pt"]


def test_resume_with_other_settings_is_refused_with_the_difference(tmp_path: Path) -> None:
    write_some(tmp_path, 0)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    other = {**SETTINGS, "layer_ids": [0, 1], "versions": {"vllm": "vllm 0.17.0"}, "data": {"sha256": "x"}}
    with pytest.raises(CompatError) as caught:
        SampleWriter(tmp_path, other)
    assert caught.value.id == "SC604"
    for line in (
        "layer_ids: [0, 2] in the folder, [0, 1] now",
        'versions.vllm: "vllm 0.16.0" in the folder, "vllm 0.17.0" now',
        'data.sha256: null in the folder, "x" now',
    ):
        assert line in caught.value.found
    assert "dtype" not in caught.value.found
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    write_some(tmp_path, 1)  # and the folder is not locked by the refused attempt


def test_a_folder_without_samples_may_change_its_settings(tmp_path: Path) -> None:
    write_some(tmp_path)
    write_some(tmp_path, 0, settings={**SETTINGS, "dtype": "bfloat16"})
    assert json.loads((tmp_path / "manifest.json").read_text())["settings"]["dtype"] == "bfloat16"


@pytest.mark.parametrize("manifest", [None, "", "[]", "{}", '{"settings": 1, "recorded": {}}'])
def test_samples_without_a_manifest_are_refused(tmp_path: Path, manifest: str | None) -> None:
    write_some(tmp_path, 0)
    (tmp_path / "manifest.json").unlink()
    if manifest is not None:
        (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(CompatError, match="SC604"):
        SampleWriter(tmp_path, SETTINGS)
    assert (tmp_path / "data_0.pt").exists()


def test_the_number_of_layers_that_speculators_chose_is_remembered(tmp_path: Path) -> None:
    settings = {**SETTINGS, "layer_ids": "default"}
    with SampleWriter(tmp_path, settings) as writer:
        writer.write(sample(0), answer(sample(0), layers=4))
        writer.record(adapters={"a": "applied"})
    with SampleWriter(tmp_path, settings) as writer:
        assert writer.resumed == 1
        with pytest.raises(CompatError, match="SC608"):
            writer.write(sample(1), answer(sample(1), layers=3))
    assert json.loads((tmp_path / "manifest.json").read_text())["recorded"]["adapters"] == {"a": "applied"}


def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    import subprocess
    import sys

    with SampleWriter(tmp_path, SETTINGS):
        code = (
            "import sys; from speculators_compat.dataio import SampleWriter\n"
            f"SampleWriter(sys.argv[1], {SETTINGS!r})"
        )
        done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
        assert done.returncode == 1
        assert "SC607" in done.stderr


def test_the_first_error_is_the_one_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (  # noqa: PT012
        pytest.raises(RuntimeError, match="engine died"),
        SampleWriter(tmp_path, SETTINGS) as writer,
    ):
        writer.write(sample(0), answer(sample(0)))
        monkeypatch.setattr(dataio.os, "fsync", fail)
        raise RuntimeError("engine died")
    assert find_finished(tmp_path) == {0: 3}


def test_every_error_id_is_explained() -> None:
    assert [id for id in CATALOG if id.startswith("SC6")] == [f"SC60{n}" for n in range(1, 9)] + [
        "SC610",
        "SC611",
        "SC612",
    ]


# ---- the format of speculators 0.5 and later


def test_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with vLLM and speculators")
    settings = {**SETTINGS, "format": "safetensors"}
    samples = [Sample(index * 2, [1, 2, index], None, 3, ordinal=index) for index in range(3)]
    with SampleWriter(tmp_path, settings) as writer:
        for one in samples[:2]:
            writer.write(one, answer(one))
    assert sorted(p.name for p in (tmp_path / "hidden_states").iterdir()) == ["hs_0.safetensors", "hs_1.safetensors"]
    assert find_finished(tmp_path, output="safetensors", layers=2) == {0: 3, 1: 3}
    assert find_finished(tmp_path, output="safetensors", layers=3) == {}
    data = safetensors.load_file(tmp_path / "hidden_states" / "hs_1.safetensors")
    assert data["token_ids"].tolist() == [1, 2, 1]
    assert torch.equal(data["hidden_states"], torch.stack(answer(samples[1])["hidden_states"], dim=1))
    assert not (tmp_path / "sample_lengths.json").exists()

    whole = (tmp_path / "hidden_states" / "hs_0.safetensors").read_bytes()
    (tmp_path / "hidden_states" / "hs_0.safetensors").write_bytes(whole[:-1])
    with SampleWriter(tmp_path, settings) as writer:
        assert writer.damaged == ["hs_0.safetensors"]
        assert not writer.is_finished(samples[0])
        assert writer.is_finished(samples[1])
        for one in (samples[0], samples[2]):
            writer.write(one, answer(one))
    assert (tmp_path / "hidden_states" / "hs_0.safetensors").read_bytes() == whole


def test_the_arrow_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with vLLM and speculators")
    samples = [Sample(index * 2, [1, 2, index], [0, 1, 1], 3, ordinal=index) for index in range(4)]
    with SampleWriter(tmp_path, {**SETTINGS, "format": "safetensors"}) as writer:
        for one in samples[:3]:
            writer.write(one, answer(one))
        for _ in range(2):  # again replaces
            assert writer.write_dataset(samples) == 3
    data = datasets.load_from_disk(str(tmp_path))
    assert len(data) == 3
    assert data[2]["input_ids"].tolist() == [1, 2, 2]
    assert data[2]["loss_mask"].tolist() == [0, 1, 1]
    assert list(data.with_format(None)["seq_len"]) == [3, 3, 3]
    assert list(data.with_format(None)["line"]) == [1, 3, 5]
    assert not list(tmp_path.glob("*.tmp"))


# ---- checksums


def test_checksums(tmp_path: Path) -> None:
    with SampleWriter(tmp_path, SETTINGS) as writer:
        for index in (10, 9):
            writer.write(sample(index), answer(sample(index)))
        lines = (tmp_path / "checksums.sha256").read_text().splitlines()
        assert [line.split("  ")[1] for line in lines] == ["data_10.pt", "data_9.pt"]
    lines = (tmp_path / "checksums.sha256").read_text().splitlines()
    assert lines == [f"{dataio.file_checksum(tmp_path / n)}  {n}" for n in ("data_9.pt", "data_10.pt")]
    # A kill between a sample and its line, and in the middle of a line.
    (tmp_path / "checksums.sha256").write_text(lines[0] + "\n" + lines[1][:40])
    with SampleWriter(tmp_path, SETTINGS):
        pass
    assert (tmp_path / "checksums.sha256").read_text().splitlines() == lines
    with SampleWriter(tmp_path, SETTINGS, checksums=False) as writer:
        writer.write(sample(11), answer(sample(11)))
    assert (tmp_path / "checksums.sha256").read_text().splitlines() == lines


# ---- fingerprints


def test_fingerprints_change_with_what_they_stand_for(tmp_path: Path) -> None:
    from speculators_compat import manifest

    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(300_000))
    first = manifest.weights_fingerprint(tmp_path)
    assert first == manifest.weights_fingerprint(tmp_path)
    (tmp_path / "a.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}" + bytes(299_999) + b"1")
    assert manifest.weights_fingerprint(tmp_path) != first
    assert manifest.tokenizer_hash(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    assert manifest.tokenizer_hash(tmp_path) is not None
    assert manifest.number_of_layers({"text_config": {"num_hidden_layers": 7}}) == 7
    assert manifest.describe_layers([1, 5], 6, final_norm=True) == [
        {"after-layer": 1, "boundary": 2, "state": ""},
        {"after-layer": 5, "boundary": 6, "state": "after final norm"},
    ]


# ---- speculators' own reader


def test_the_trainer_reads_it(tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data", reason="needs speculators")
    with SampleWriter(tmp_path, {**SETTINGS, "layer_ids": [0, 1, 2, 3]}) as writer:
        for index in range(3):
            writer.write(sample(index, index + 4), answer(sample(index, index + 4), layers=4))
    dataset = data.Eagle3SampleFileDataset(max_len=16, datapath=str(tmp_path))
    assert len(dataset) == 3
    by_length = {}
    for position in range(3):
        item = dataset[position]
        length = int(item["lengths"][0]) + 1
        by_length[length] = item
    assert sorted(by_length) == [4, 5, 6]
    if "sample_lengths" in inspect.getsource(data):  # 0.3 guesses from the sizes of the files
        assert sorted(dataset.approx_lengths) == [4, 5, 6]
    item, states = by_length[4], answer(sample(0, 4), layers=4)["hidden_states"]
    assert item["input_ids"].tolist() == [2, 3, 4]
    assert item["loss_mask"].tolist() == [1, 1, 1]
    assert torch.equal(item["hidden_states"], torch.cat(states[:3], dim=-1)[:-1])
    assert torch.equal(item["verifier_last_hidden_states"], states[3][1:])


def test_proofs_add_up_over_resumed_runs() -> None:
    from types import SimpleNamespace

    from speculators_compat import manifest
    from speculators_compat.alignment import Report, Verdict

    report = Report()
    for verdict in (Verdict(), Verdict(), Verdict(skipped="why"), Verdict(fault="x", cause="order")):
        report.count(verdict)
    generator = SimpleNamespace(session=SimpleNamespace(alignment=report))
    first = manifest.alignment_report(generator)
    assert first == {"proved": 2, "not_proved": {"why": 1}, "failed": {"order": 1}}
    assert manifest.alignment_report(None, first) == first
    assert manifest.alignment_report(None) is None
    assert manifest.alignment_report(generator, first) == {
        "proved": 4,
        "not_proved": {"why": 2},
        "failed": {"order": 2},
    }
