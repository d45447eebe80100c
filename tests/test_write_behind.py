"""Writing in the background: everything arrives, memory is bounded, and an error ends the run without losing a sample."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="samples are torch files; these tests run where vLLM is installed")

from speculators_compat import dataio  # noqa: E402
from speculators_compat.errors import CompatError  # noqa: E402
from speculators_compat.write_behind import WriteBehind  # noqa: E402

SETTINGS = {"model": {"path": "m"}, "data": {}, "layer_ids": [0, 1], "versions": {}}


def sample(index: int, tokens: int = 3) -> dataio.Sample:
    return dataio.Sample(index, list(range(tokens)), [1] * tokens, tokens)


def answer(index: int, tokens: int = 3) -> dict[str, Any]:
    states = [torch.full((tokens, 8), float(10 * index + layer)) for layer in (0, 1)]
    return {"input_ids": torch.arange(tokens), "hidden_states": states}


def test_all_samples_arrive_whole(tmp_path: Path) -> None:
    with dataio.SampleWriter(tmp_path, SETTINGS) as writer, WriteBehind(writer) as behind:
        for index in range(50):
            behind.make_room()
            behind.put(sample(index), answer(index))
        behind.flush()
        assert (writer.written, writer.written_tokens) == (50, 150)
    assert dataio.find_finished(tmp_path, layers=2) == dict.fromkeys(range(50), 3)
    for index in range(50):
        data = torch.load(tmp_path / f"data_{index}.pt")
        assert all(torch.equal(a, b) for a, b in zip(data["hidden_states"], answer(index)["hidden_states"], strict=True))
        path = tmp_path / f"data_{index}.pt"
        assert f"{dataio.file_checksum(path)}  {path.name}\n" in (tmp_path / "checksums.sha256").read_text()


def test_room_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    finish = dataio.SampleWriter.finish

    def slow(self: Any, content: Any) -> None:
        go.wait(10)
        finish(self, content)

    monkeypatch.setattr(dataio.SampleWriter, "finish", slow)
    with dataio.SampleWriter(tmp_path, SETTINGS) as writer, WriteBehind(writer, limit=100) as behind:
        behind.put(sample(0), answer(0))  # 240 bytes
        waited = threading.Thread(target=behind.make_room)
        waited.start()
        waited.join(0.2)
        assert waited.is_alive()
        go.set()
        waited.join(10)
        assert not waited.is_alive()


def test_an_error_is_raised_once_and_what_was_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish = dataio.Content.publish

    def full(self: Any) -> None:
        if self.number >= 2:
            raise dataio._write_error(self.path, self.size, OSError(28, "No space left on device"))
        publish(self)

    monkeypatch.setattr(dataio.Content, "publish", full)

    def run() -> None:
        with dataio.SampleWriter(tmp_path, SETTINGS) as writer, WriteBehind(writer, threads=1) as behind:
            for index in range(9):
                behind.put(sample(index), answer(index))
            behind.flush()

    with pytest.raises(CompatError, match="SC602"):
        run()
    assert dataio.find_finished(tmp_path, layers=2) == {0: 3, 1: 3}
    assert not list(tmp_path.glob("*.tmp"))


def test_an_answer_that_does_not_fit_is_refused_at_once(tmp_path: Path) -> None:
    with dataio.SampleWriter(tmp_path, SETTINGS) as writer, WriteBehind(writer) as behind:
        behind.put(sample(0), answer(0))
        with pytest.raises(CompatError, match="SC608"):
            behind.put(sample(1), answer(1, tokens=4))
    assert dataio.find_finished(tmp_path) == {0: 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_safetensors_file_is_as_the_library_reads_it(tmp_path: Path, dtype: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="comes with vLLM and speculators")
    states = [torch.randn(1000, 96).to(dtype) for _ in range(3)]
    ids = torch.arange(1000)
    with open(tmp_path / "x.safetensors", "wb") as out:
        dataio.write_safetensors(out, ids, states)
    data = safetensors.load_file(tmp_path / "x.safetensors")
    assert set(data) == {"token_ids", "hidden_states"}
    assert torch.equal(data["token_ids"], ids)
    assert torch.equal(data["hidden_states"], torch.stack(states, dim=1))
    assert data["hidden_states"].dtype == dtype
