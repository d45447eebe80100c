"""Claims on a folder: who lives, who is dead, on this machine and on another."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from speculators_compat import claims
from speculators_compat.errors import CompatError

HOLD = "import sys, time; from pathlib import Path; from speculators_compat import claims\n"
HOLD += "claims.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.05)
    monkeypatch.setattr(claims, "STALE", 0.6)


def foreign(folder: Path, **more: Any) -> None:
    """A claim as a process on another machine leaves it."""
    values = {"host": "node7", "pid": 42, "place": "node7 boot pid:[1]", "started": "99", "token": "a", "beat": "1"}
    (folder / claims.NAME).write_text(json.dumps({**values, **more}))


def test_taken_and_released(tmp_path: Path) -> None:
    claim = claims.take(tmp_path)
    assert claims.holder(tmp_path) == claim.holder
    with pytest.raises(CompatError, match=rf"process {os.getpid()} on ") as caught:
        claims.take(tmp_path)
    assert caught.value.id == "SC607"
    claim.check()
    claim.release()
    claim.release()
    assert list(tmp_path.iterdir()) == []
    claims.take(tmp_path).release()


def test_a_killed_process_is_noticed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "STALE", 1e9)
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        living = claims.holder(tmp_path)
        assert living is not None
        assert living.pid == child.pid
        with pytest.raises(CompatError, match="SC607"):
            claims.take(tmp_path)
        child.send_signal(signal.SIGKILL)  # and not waited for: a zombie is dead
        end = time.monotonic() + 10
        while claims.started(child.pid) and time.monotonic() < end:
            time.sleep(0.01)
        claims.take(tmp_path).release()
        assert list(tmp_path.iterdir()) == []
    finally:
        child.kill()
        child.wait()


def test_the_pid_alone_is_not_the_process(tmp_path: Path) -> None:
    foreign(tmp_path, place=claims.place(), pid=os.getpid(), started="1")
    assert claims.holder(tmp_path) is None


def test_another_machine_s_silent_claim_is_taken_over(tmp_path: Path, capfd: Any) -> None:
    foreign(tmp_path)
    began = time.monotonic()
    claim = claims.take(tmp_path)
    assert time.monotonic() - began >= claims.STALE
    assert "claimed by process 42 on node7; watching" in capfd.readouterr().err
    assert json.loads((tmp_path / claims.NAME).read_text())["token"] == claim.holder.token
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_another_machine_s_living_claim_is_obeyed(tmp_path: Path) -> None:
    foreign(tmp_path)
    timer = threading.Timer(0.2, lambda: foreign(tmp_path, beat="2"))
    timer.start()
    with pytest.raises(CompatError, match="process 42 on node7") as caught:
        claims.take(tmp_path)
    assert caught.value.id == "SC607"
    timer.join()
    assert json.loads((tmp_path / claims.NAME).read_text())["host"] == "node7"


def test_an_unreadable_claim_counts_as_another_machine_s(tmp_path: Path) -> None:
    (tmp_path / claims.NAME).write_text("")
    claims.take(tmp_path).release()


def test_who_was_taken_over_notices(tmp_path: Path) -> None:
    claim = claims.take(tmp_path)
    claim.check()
    (tmp_path / claims.NAME).unlink()
    foreign(tmp_path)
    end = time.monotonic() + 10
    while not claim._lost and time.monotonic() < end:
        time.sleep(0.01)
    with pytest.raises(CompatError, match="SC859"):
        claim.check()
    claim.release()
    assert json.loads((tmp_path / claims.NAME).read_text())["host"] == "node7"  # the other one's stays


def test_the_claim_is_touched(tmp_path: Path) -> None:
    claim = claims.take(tmp_path)
    first = (tmp_path / claims.NAME).read_bytes()
    end = time.monotonic() + 10
    while (tmp_path / claims.NAME).read_bytes() == first and time.monotonic() < end:
        time.sleep(0.01)
    assert (tmp_path / claims.NAME).read_bytes() != first
    claim.release()


def test_a_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    claim = claims.take(tmp_path)
    with pytest.raises(CompatError, match="SC607"):
        claims.take(tmp_path)
    claim.release()
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_died_while_it_took_over_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims._wait_for, "__defaults__", (0.1,))
    foreign(tmp_path, place=claims.place(), pid=os.getpid(), started="1")
    (tmp_path / f"{claims.NAME}.gate").mkdir()
    claim = claims.take(tmp_path)
    claim.release()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("attempt", range(10))
def test_of_many_at_once_one_wins(tmp_path: Path, attempt: int) -> None:
    foreign(tmp_path, place=claims.place(), pid=os.getpid(), started="1")  # a dead one, to be taken over
    won: list[claims.Claim] = []
    lost: list[CompatError] = []

    def run() -> None:
        try:
            won.append(claims.take(tmp_path))
        except CompatError as error:
            lost.append(error)

    threads = [threading.Thread(target=run) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 15)
    won[0].release()
