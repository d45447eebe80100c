"""States handed over through shared memory: whole, not overwritten while anybody holds them, and cleaned up."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import handover
from speculators_compat.errors import CompatError
from speculators_compat.handover import Depot, Sender

torch = pytest.importorskip("torch", reason="buffers are torch tensors; these tests run where vLLM is installed")
SHAPE = (2, 3, 4)


@pytest.fixture
def depot() -> Iterator[Depot]:
    depot = Depot(need=0)
    yield depot
    depot.close()
    assert not depot.path.exists()


@pytest.fixture
def sender(depot: Depot) -> Iterator[Sender]:
    sender = Sender(str(depot.path))
    yield sender
    sender.close()


def deliver(depot: Depot, sender: Sender, id: str, value: float, rows: list[int] | None = None) -> list[Any]:
    """One request's states, from the worker's buffer to the caller's tensors."""
    depot.expect([id])
    tensor, parcel = sender.buffer(id, SHAPE, torch.float32)
    tensor.copy_(torch.full(SHAPE, value) + torch.arange(SHAPE[0])[:, None, None])
    sender.send(parcel)
    return depot.collect(id, rows or [0, 1])


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes true in some seconds; the news travels over a socket."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def free(sender: Sender) -> int:
    return sum(map(len, sender._free.values()))


def test_states_arrive(depot: Depot, sender: Sender) -> None:
    first, second = deliver(depot, sender, "a", 5.0)
    assert first.shape == SHAPE[1:]
    assert first.unique().tolist() == [5.0]
    assert second.unique().tolist() == [6.0]


def test_rows_in_any_order_and_twice_with_memory_of_their_own(depot: Depot, sender: Sender) -> None:
    one, zero, again = deliver(depot, sender, "a", 5.0, [1, 0, 1])
    assert [t[0, 0].item() for t in (one, zero, again)] == [6.0, 5.0, 6.0]
    one.zero_()
    assert again.unique().tolist() == [6.0]


def test_a_buffer_is_used_again_only_when_nobody_holds_it(depot: Depot, sender: Sender) -> None:
    held = deliver(depot, sender, "a", 1.0)
    view = held[0][1:, :2]  # the smallest view keeps the whole buffer
    for number in range(5):
        deliver(depot, sender, f"b{number}", 100.0 + number)
    del held
    gc.collect()
    deliver(depot, sender, "c", 200.0)
    assert view.unique().tolist() == [1.0]
    before = free(sender)
    del view
    gc.collect()
    assert until(lambda: free(sender) > before)


def test_a_forked_child_frees_nothing(depot: Depot, sender: Sender) -> None:
    held = deliver(depot, sender, "a", 1.0)
    before = free(sender)
    child = os.fork()
    if not child:
        held.clear()  # as a data loader's worker does when it ends
        gc.collect()
        depot.close()  # as its exit handlers do
        os._exit(0)
    os.waitpid(child, 0)
    kept = deliver(depot, sender, "b", 2.0)  # anything the child had said would have arrived before this
    assert free(sender) <= before
    assert kept[0].unique().tolist() == [2.0]
    assert held[0].unique().tolist() == [1.0]
    assert depot.path.exists()


def test_results_outlive_the_depot() -> None:
    depot = Depot(need=0)
    sender = Sender(str(depot.path))
    held = deliver(depot, sender, "a", 1.0)
    sender.close()
    depot.close()
    assert not depot.path.exists()
    assert held[0].unique().tolist() == [1.0]
    held[0].zero_()


def test_copied_out_beyond_the_bound(depot: Depot, sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depot, "_limit", 0)
    held = [deliver(depot, sender, str(number), float(number)) for number in range(20)]
    assert until(lambda: free(sender) >= 1)
    assert len(list(depot.path.iterdir())) < 10  # the buffers went round
    assert [states[0][0, 0].item() for states in held] == list(map(float, range(20)))


def test_what_nobody_expects_goes_back(depot: Depot, sender: Sender) -> None:
    _, parcel = sender.buffer("stranger", SHAPE, torch.float32)
    sender.send(parcel)
    assert until(lambda: free(sender) == 1)


def test_a_worker_that_goes_ends_the_wait(depot: Depot, sender: Sender) -> None:
    depot.expect(["a"])
    sender.close()
    with pytest.raises(CompatError, match="the worker is gone") as failed:
        depot.collect("a", [0])
    assert failed.value.id == "SC512"


def test_the_workers_error_reaches_the_caller(depot: Depot, sender: Sender) -> None:
    depot.expect(["a"])
    sender.fail(CompatError("SC504", found="f", expected="e", why="w", mend="m"))
    with pytest.raises(CompatError) as failed:
        depot.collect("a", [0])
    assert (failed.value.id, failed.value.found) == ("SC504", "f")


def test_a_depot_that_is_not_there() -> None:
    with pytest.raises(CompatError) as failed:
        Sender("/nowhere")
    assert failed.value.id == "SC513"


def test_what_a_killed_process_left_is_swept() -> None:
    code = (
        "import os, signal\n"
        "from speculators_compat.handover import Depot\n"
        "print(Depot(need=0).path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "SPECULATORS_COMPAT": "0"}
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    left = Path(killed.stdout.strip())
    assert left.is_dir()
    ours = Depot(need=0)
    try:
        assert not left.exists()
        assert ours.path.exists()
        handover.sweep_stale()
        assert ours.path.exists()
    finally:
        ours.close()


def test_what_another_container_left_or_holds_is_not_touched() -> None:
    foreign = handover.SHARED_MEMORY / f"{handover.PREFIX}99999999-00000000-abc"
    foreign.mkdir()
    try:
        Depot(need=0).close()
        assert foreign.is_dir()
    finally:
        foreign.rmdir()


def test_a_long_name_of_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    monkeypatch.setattr(handover.tempfile, "tempdir", str(folder))
    depot = Depot(need=2**60)
    try:
        assert Sender(str(depot.path)) is not None
    finally:
        depot.close()
    assert not depot.path.exists()


def test_a_depot_that_nobody_reached_leaves_no_thread() -> None:
    before = threading.active_count()
    Depot(need=0).close()
    end = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_folder_and_files_are_the_users_alone(depot: Depot, sender: Sender) -> None:
    deliver(depot, sender, "a", 1.0)
    assert depot.path.stat().st_mode & 0o077 == 0
    assert all(p.stat().st_mode & 0o077 == 0 for p in depot.path.iterdir() if p.name != "socket")


def test_the_worker_unregisters_all_memory_before_it_is_gone(depot: Depot) -> None:
    pinned: set[int] = set()
    sender = Sender(str(depot.path), pin=lambda address, size: pinned.add(address), unpin=pinned.remove)
    deliver(depot, sender, "kept by the caller", 1.0)
    sender.buffer("in flight", SHAPE, torch.float32)
    assert len(pinned) >= 1
    sender.close()
    assert not pinned
