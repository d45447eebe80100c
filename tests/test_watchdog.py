"""Runs that hang, and Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from speculators_compat import settings, watchdog
from speculators_compat.errors import CompatError

PRELUDE = """
import os, signal, subprocess, sys, threading, time
from types import SimpleNamespace
from speculators_compat import watchdog
watchdog.GRACE = 1.5
generator = SimpleNamespace()
with watchdog.starting(generator, 100):
    child = subprocess.Popen(["sleep", "1000"])
print("child", child.pid, flush=True)
def hang(what):
    with watchdog.watching(generator, 0.5, "the test hangs") as dog:
        what()
"""


def run(code: str) -> tuple[int, str, int]:
    """Exit status, output, and the child's process id."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    return done.returncode, done.stdout, int(done.stdout.split()[1])


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_a_call_that_hangs_is_interrupted_and_its_workers_are_killed() -> None:
    status, said, child = run("hang(lambda: time.sleep(100))")
    assert status == 1
    assert "[SC517]" in said
    assert "while the test hangs" in said
    assert not lives(child)


def test_a_job_in_the_background_is_interrupted_too() -> None:
    status, said, child = run("signal.signal(signal.SIGINT, signal.SIG_IGN)\nhang(lambda: time.sleep(100))")
    assert status == 1
    assert "[SC517]" in said
    assert not lives(child)


def test_a_call_that_cannot_be_interrupted_ends_the_process() -> None:
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, watchdog.INTERRUPT])
hang(lambda: time.sleep(100))
"""
    status, said, child = run(code)
    assert status == watchdog.EXIT_HUNG
    assert "[SC517]" in said
    assert not lives(child)


def test_a_call_in_another_thread() -> None:
    code = """
def call():
    try:
        hang(lambda: [time.sleep(0.05) for _ in range(1000)])
    except Exception as error:
        print(error)
        os._exit(3)
threading.Thread(target=call).start()
"""
    status, said, child = run(code)
    assert status == 3
    assert "[SC517]" in said
    assert not lives(child)


def test_an_error_that_follows_from_the_kill_becomes_the_watchdogs() -> None:
    code = """
def wait():
    child.wait()
    raise RuntimeError("worker died")
try:
    hang(wait)
except Exception as error:
    print(error.id, type(error.__cause__).__name__)
"""
    status, said, _ = run(code)
    assert status == 0
    assert "SC517 RuntimeError" in said


def test_a_worker_that_dies_while_vllm_waits_for_it() -> None:
    code = """
watchdog.LOOK, watchdog.NOTICE = 0.1, 0.2
generator.vital = [child.pid]
try:
    with watchdog.watching(generator, 0, "the test waits") as dog:
        child.kill()
        time.sleep(100)
except Exception as error:
    print(error)
try:
    with watchdog.watching(generator, 0, "the test waits") as dog:
        raise RuntimeError("EngineDeadError")
except Exception as error:
    print(error.id, error.__cause__)
"""
    status, said, _ = run(code)
    assert status == 0, said
    assert "[SC518]" in said
    assert "ended while the test waits" in said
    assert "SC518 EngineDeadError" in said


def test_progress_keeps_it_quiet() -> None:
    code = """
with watchdog.watching(generator, 0.5, "first") as dog:
    for _ in range(6):
        time.sleep(0.2)
        dog.beat("next")
print("fine")
child.kill()
"""
    status, said, _ = run(code)
    assert status == 0
    assert "fine" in said


def test_a_failed_start_leaves_nothing_behind() -> None:
    code = """
other = SimpleNamespace()
try:
    with watchdog.starting(other, 100):
        second = subprocess.Popen(["sleep", "1000"])
        raise ValueError("no")
except ValueError:
    print("second", second.wait(10), child.poll())
child.kill()
"""
    status, said, _ = run(code)
    assert status == 0
    assert f"second {-signal.SIGKILL} None" in said


@pytest.mark.parametrize("second", [True, False])
def test_ctrl_c(second: bool) -> None:
    code = """
try:
    with watchdog.watching(generator, 100, "waiting"):
        try:
            print("ready", flush=True)
            time.sleep(100)
        finally:
            print("cleaning up", flush=True)
            time.sleep(5 if SECOND else 0)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
    watchdog.end_workers(generator, patience=0)
    child.wait()
""".replace("SECOND", str(second))
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "cleaning up\n"
    if second:
        process.send_signal(signal.SIGINT)
    said = process.stdout.read()
    process.wait(30)
    if second:
        assert process.returncode == 130
        assert "stopped at once" in said
    else:
        assert process.returncode == 0, said
        assert "interrupted True" in said
    deadline = time.monotonic() + 5
    while lives(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(child)


def test_cleaning_up_after_a_failed_call() -> None:
    done = []
    generator = SimpleNamespace(workers=[], shutdown=lambda: done.append("shutdown"))
    dog = watchdog.Watchdog(0, "", list)
    watchdog.clean_up(generator, dog, lambda: done.append("abort"))
    assert done == ["abort"]
    watchdog.clean_up(generator, dog, lambda: 1 / 0)
    assert done == ["abort", "shutdown"]
    generator.workers = [2**22 + 1]  # a worker that is gone
    watchdog.clean_up(generator, dog, lambda: done.append("abort"))
    assert done == ["abort", "shutdown", "shutdown"]


def test_own_processes_are_spared() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        before = set(watchdog.descendants())
        assert child.pid in before
        assert watchdog.workers_since(before) == []
        assert os.getpid() not in watchdog.descendants()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("text", ["x", "-1", "inf", "nan"])
def test_a_time_that_is_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(settings, "_configured", {})
    monkeypatch.setenv(settings.WATCHDOG, text)
    with pytest.raises(CompatError, match="SC410"):
        settings.current()
    settings.configure(watchdog=0)
    assert settings.current().watchdog == 0
