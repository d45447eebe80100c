"""The file that a server writes and a client reads, and speculators' client with its adapter; the server is a fake."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import importlib
import json
import os
import struct
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import serving, statefile
from speculators_compat.adapter import Context, State
from speculators_compat.errors import CompatError
from speculators_compat.patches.server_client import ServerClient
from speculators_compat.settings import Settings
from speculators_compat.surface import SourceSurface


def write(path: Path, length: int = 100, header: bytes | None = None) -> bytes:
    """A safetensors file of one tensor of bytes."""
    if header is None:
        header = json.dumps({"x": {"dtype": "U8", "shape": [length], "data_offsets": [0, length]}}).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(length)
    path.write_bytes(content)
    return content


def test_a_whole_file_without_a_lock(tmp_path: Path) -> None:
    write(tmp_path / "a.safetensors")
    statefile.wait_until_whole(tmp_path / "a.safetensors", seconds=1)


def test_half_a_file_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    content = write(path)
    for cut in (0, 4, 30, len(content) - 1):
        path.write_bytes(content[:cut])
        with pytest.raises(CompatError) as caught:
            statefile.wait_until_whole(path, seconds=0.1)
        assert caught.value.id == "SC802"
    timer = threading.Timer(0.2, path.write_bytes, [content])
    timer.start()
    statefile.wait_until_whole(path, seconds=5)
    timer.join()


def test_a_file_that_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(CompatError, match="it is not there"):
        statefile.wait_until_whole(tmp_path / "a.safetensors", seconds=0.05)


def test_a_lock_is_waited_for_even_if_the_file_looks_whole(tmp_path: Path) -> None:
    path, lock = tmp_path / "a.safetensors", tmp_path / "a.safetensors.lock"
    write(path)
    with open(lock, "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CompatError, match="held by the writer"):
            statefile.wait_until_whole(path, seconds=0.1)
    statefile.wait_until_whole(path, seconds=1)
    assert lock.exists()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    path = tmp_path / "a.safetensors"
    write(path)
    (tmp_path / "a.safetensors.lock").touch()

    def refuse(handle: int, kind: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(statefile.fcntl, "flock", refuse)
    statefile.wait_until_whole(path, seconds=1)


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"version https://something")
    with pytest.raises(CompatError) as caught:
        statefile.wait_until_whole(path, seconds=1)
    assert caught.value.id == "SC803"
    path.write_bytes(write(path) + b"more")
    with pytest.raises(CompatError) as caught:
        statefile.wait_until_whole(path, seconds=1)
    assert caught.value.id == "SC803"
    path.write_bytes(bytes(4096))  # made before it was filled
    with pytest.raises(CompatError) as caught:
        statefile.wait_until_whole(path, seconds=0.1)
    assert caught.value.id == "SC802"


# --------------------------------------------------------------------------- speculators' client

OLD = """
import asyncio
DEFAULT_REQUEST_TIMEOUT = 15
class InvalidResponseError(Exception): pass
def extract_output(completion, token_ids):
    return completion.kv_transfer_params.get("hidden_states_path")
async def generate_hidden_states_async(client, model, token_ids, timeout=DEFAULT_REQUEST_TIMEOUT):
    client.asked.append(timeout)
    return extract_output(client.answer, token_ids)
def generate_hidden_states(client, model, token_ids, timeout=DEFAULT_REQUEST_TIMEOUT):
    client.asked.append(timeout)
    return extract_output(client.answer, token_ids)
"""
NEW = """
DEFAULT_REQUEST_TIMEOUT = 120
class InvalidResponseError(Exception): pass
def extract_output(response, token_ids):
    params = response.kv_transfer_params
    return params.get("hidden_states_path") or params.get("handle"), params
async def generate_hidden_states_async(client, model, client_item, *, timeout=DEFAULT_REQUEST_TIMEOUT):
    client.asked.append(timeout)
    return extract_output(client.answer, client_item["input_ids"])
def generate_hidden_states(client, model, client_item, *, timeout=DEFAULT_REQUEST_TIMEOUT):
    client.asked.append(timeout)
    return extract_output(client.answer, client_item["input_ids"])
"""


class Fake:
    def __init__(self, **params: str) -> None:
        self.asked: list[float | None] = []
        self.answer = types.SimpleNamespace(kv_transfer_params=params or None)


@pytest.fixture(params=["old", "new"])
def client(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Speculators' client module, mended; checked files are listed instead of read."""
    package = tmp_path / "root" / "speculators" / "data_generation"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "vllm_client.py").write_text(OLD if request.param == "old" else NEW)
    monkeypatch.syspath_prepend(str(package.parent.parent))
    for name in [n for n in sys.modules if n.partition(".")[0] == "speculators"]:
        monkeypatch.delitem(sys.modules, name)
    serving.deactivate()
    module = importlib.import_module(serving.CLIENT_MODULE)
    adapter = ServerClient()
    surface = SourceSurface({"speculators": package.parent.parent})
    assert adapter.probe(surface).state is State.APPLIED
    side = serving._client
    with side.journal:
        adapter.apply(Context(module, side.journal, Settings(), {}))
    checked: list[Any] = []
    monkeypatch.setattr(statefile, "checked_states", lambda path, tokens, seconds: checked.append((path, tokens, seconds)))
    yield types.SimpleNamespace(
        module=module, checked=checked, prompt=(lambda t: t) if request.param == "old" else (lambda t: {"input_ids": t})
    )
    side.journal.undo()
    for name in [n for n in sys.modules if n.partition(".")[0] == "speculators"]:
        del sys.modules[name]


def test_the_file_is_checked_before_its_path_is_returned(client: Any) -> None:
    fake = Fake(hidden_states_path="/s/a.safetensors")
    module = client.module
    for answer in (
        module.generate_hidden_states(fake, "m", client.prompt([1, 2])),
        asyncio.run(module.generate_hidden_states_async(fake, "m", client.prompt([1, 2]), timeout=7)),
        module.generate_hidden_states(fake, "m", client.prompt([1, 2]), timeout=None),
    ):
        assert (answer[0] if isinstance(answer, tuple) else answer) == "/s/a.safetensors"
    assert client.checked == [("/s/a.safetensors", [1, 2], seconds) for seconds in (120, 7, None)]
    assert fake.asked == [120, 7, None]  # 15 seconds in speculators 0.5.0
    assert module.DEFAULT_REQUEST_TIMEOUT == 120


def test_an_answer_that_names_no_file(client: Any) -> None:
    for fake in (Fake(), Fake(something="else")):
        with pytest.raises(client.module.InvalidResponseError, match="SC801"):
            client.module.generate_hidden_states(fake, "m", client.prompt([1]))


def test_another_connectors_handle_is_no_file(client: Any) -> None:
    answer = client.module.generate_hidden_states(Fake(handle="store://1"), "m", client.prompt([1]))
    assert client.checked == []
    assert answer in (None, ("store://1", {"handle": "store://1"}))


def test_an_unknown_client_is_left_alone(tmp_path: Path) -> None:
    package = tmp_path / "speculators" / "data_generation"
    package.mkdir(parents=True)
    (package / "vllm_client.py").write_text("def generate_hidden_states(a, b): pass\n")
    assert ServerClient().probe(SourceSurface({"speculators": tmp_path})).state is State.DRIFTED
    assert ServerClient().probe(SourceSurface({})).state is State.NOT_APPLICABLE


def test_waiting_ends(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(CompatError):
        statefile.wait_until_whole(tmp_path / "none", seconds=0)
    assert time.monotonic() - began < 1
