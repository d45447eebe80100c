"""The evidence that the matrix points to is there, complete and good; the real tests write it anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from vllm_env import ROOT, SPECULATORS, VLLM

from speculators_compat.matrix import load_matrix

sys.path.insert(0, str(Path(__file__).parent / "real"))
from cases import EVIDENCE, WAYS, jobs

FOUND = json.loads(EVIDENCE.read_text())


def test_verified_cells_point_to_files_that_exist() -> None:
    for row in load_matrix().rows:
        for cell in row.cells.values():
            if cell.status == "verified":
                assert cell.evidence is not None
                assert (ROOT / cell.evidence).is_file(), cell.evidence


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("speculators", SPECULATORS)
def test_every_case_is_there_and_close(speculators: str, way: str) -> None:
    assert FOUND["versions"]["vllm"] == VLLM
    cases = [c for c in FOUND["cases"] if (c["speculators"], c["way"]) == (speculators, way)]
    expected = {(run["id"], batch) for run in jobs(speculators, way) for batch in run["batches"]}
    assert {(c["run"], c["batch"]) for c in cases} == expected
    for case in cases:
        if case["dtype"] == "float32":
            assert case["largest_relative_error"] <= 1e-5, case
        else:
            assert case["median_relative_token_error"] < 1e-2, case
