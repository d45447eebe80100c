"""Auxiliary states as vLLM's own model runner gets them, from real models, compared with transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_env import VLLM, make

pytestmark = pytest.mark.real
EXACT = 1e-5
VERSIONS = (VLLM,)


@pytest.fixture(scope="session", params=VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def answers(version: str, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("eagle3")
    (folder / "job.json").write_text(
        json.dumps({"models": str(models), "kinds": ["deepseek_v3", "kimi_k25", "llama"]})
    )
    done = make(version).run(
        Path(__file__).parent / "eagle3_runner.py",
        folder / "job.json",
        folder / "answer.json",
        timeout=1800,
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return dict(json.loads((folder / "answer.json").read_text()))


def of(answers: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = answers[kind]
    assert "failed" not in found, found["failed"]
    return found


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k25", "llama"])
def test_states(answers: dict[str, Any], kind: str) -> None:
    """At boundaries in any order and at every boundary there is, first and last included."""
    found = of(answers, kind)
    assert 0 < found["error"] <= EXACT
    assert 0 < found["all"] <= EXACT
    assert found["forward_kept"]
    assert found["refused"] == ["SC520"] * 3


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_k25", "llama"])
def test_native_models_keep_their_own(answers: dict[str, Any], version: str, kind: str) -> None:
    found = of(answers, kind)
    assert found["native"] is (kind == "llama" or version != VLLM)
    assert found["equipped"] is not found["native"]
    if found["native"]:
        assert found["shim_equals_native"], "the shim and the model's own states differ"
    else:
        assert found["both_spellings"]
        assert found["default"] == [2, 2, 2]  # (2, n // 2, n - 3) of 5 layers


def test_undone(answers: dict[str, Any]) -> None:
    for kind in ("deepseek_v3", "kimi_k25", "llama"):
        assert of(answers, kind)["left"] == []
        assert of(answers, kind)["asked"] == "function"


def test_allow_list(answers: dict[str, Any], version: str) -> None:
    found = of(answers, "allow_list")
    assert found["with"] is None
    assert found["again"] is None
    assert found["without"] == ("ValidationError" if version == VLLM else None)
    assert found["put back"] is (version == VLLM)
