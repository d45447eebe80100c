"""A real server for hidden states, speculators' newest client, and an independent reference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm_env

CELL = Path(__file__).resolve().parents[2] / "tools" / "server_cell.py"
pytestmark = pytest.mark.real
#: The newest that there is for CPUs.
VLLM = "0.32.0"


def test_round_trip_through_vllm_serve() -> None:
    """The command that compat-check prints starts a server without CUDA, for a model without the interface; the states that
    speculators' client gets from it are transformers', boundary by boundary, and compat-check finds nothing wrong with it.
    """
    env = vllm_env.make(VLLM)
    done = env.run(CELL, "--model", "nemotron", "--way", "serve", "--verbose", speculators="0.9.0", timeout=400)
    lines = [line for line in done.stdout.splitlines() if line.startswith("SERVER ")]
    assert lines, done.stdout[-3000:]
    row = json.loads(lines[-1].removeprefix("SERVER "))
    assert row["outcome"] == "right", done.stdout[-5000:]
    assert row["native"] is False
    assert row["layers"][-1] == 6  # of six layers: the state before the final norm
    assert row["worst"] < 1e-5 < 0.05 < row["nearest_other_boundary"]
    assert {id: said for id, said in row["check"].items() if said != "ok" and id != "SC815"} == {}
