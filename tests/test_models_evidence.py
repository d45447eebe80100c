"""What the documents say about architectures is what ``evidence/models.json`` holds."""

from __future__ import annotations

import pytest
from vllm_env import ROOT, load_tool

tool = load_tool("models_sweep")
EVIDENCE = tool.load()
NEWEST = "0.32.0"


def test_the_document_is_what_the_sweep_writes() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert f"{tool.BEGIN}\n{tool.document()}\n{tool.END}" in text


def test_the_readme_is_what_the_sweep_writes() -> None:
    assert f"{tool.LINE}{tool.line()}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("version", EVIDENCE)
def test_every_architecture_has_a_result(version: str) -> None:
    block = EVIDENCE[version]
    assert len(block["architectures"]) == block["registered"]
    assert block["coverage"] == tool.coverage(block)
    for name, found in block["architectures"].items():
        if found["status"] not in tool.GOOD:
            assert found["reason"], name
        else:
            assert found["layers"] == found["layers_expected"] > 0, name
            assert found["path"], name
            assert isinstance(found["native"], bool), name


@pytest.mark.parametrize("version", EVIDENCE)
def test_nothing_fails_that_vllm_runs(version: str) -> None:
    block = EVIDENCE[version]
    failed = [name for name, found in block["architectures"].items() if found["status"] == "failed"]
    assert not failed
    assert tool.coverage(block)["share"] >= 0.95


def test_named_families_ran_with_real_weights() -> None:
    missing = [family for family, names in tool.named(EVIDENCE[NEWEST]).items() if not names]
    assert not missing
    assert tool.coverage(EVIDENCE[NEWEST])["agree_with_transformers"] >= 25


def test_no_paths_of_a_machine() -> None:
    assert "/models/" not in tool.EVIDENCE.read_text()
