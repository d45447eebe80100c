"""Faults of the host while samples are written: kills at random moments, a full disk, a folder that can't be written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="samples are torch files; these tests run where vLLM is installed")

ROOT = Path(__file__).resolve().parent.parent
RUNNER = Path(__file__).parent / "kill_runner.py"


@pytest.mark.parametrize(("output", "kills"), [("pt", 40), ("safetensors", 25)])
def test_kills_at_random_moments_lose_nothing(tmp_path: Path, output: str, kills: int) -> None:
    if output == "safetensors":
        pytest.importorskip("datasets", reason="comes with vLLM and speculators")
    done = subprocess.run(
        [sys.executable, RUNNER, tmp_path / "job", output, str(kills), "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "SPECULATORS_COMPAT": "0", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    counted = json.loads(done.stdout.splitlines()[-1])
    print(counted)
    assert counted["kills"] == kills
    assert counted["lost"] == counted["leftovers"] == 0
    assert counted["equal"] == counted["finished_runs"] > 0


@pytest.mark.parametrize("output", ["pt", "safetensors"])
@pytest.mark.parametrize(
    ("limit", "folder", "id"),
    [
        (6000, "out", "SC602"),  # a quota: the kernel refuses to let a file grow beyond it
        (None, "/sys/kernel/out", "SC603"),  # a file system that nobody can write to
    ],
)
def test_no_room_and_no_permission(tmp_path: Path, limit: int | None, folder: str, id: str, output: str) -> None:
    code = f"""
import resource, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import kill_runner
from pathlib import Path
kill_runner.install_fake()
arguments, expected = kill_runner.make_job(Path({str(tmp_path)!r}) / "job", {output!r})
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.exit(kill_runner.load_example()([*arguments, "--output-dir", {str(tmp_path / folder)!r}]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SPECULATORS_COMPAT": "0", "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"[{id}]" in done.stderr
    assert "Traceback" not in done.stderr
    if limit:
        assert not list((tmp_path / folder).rglob("*.tmp"))
