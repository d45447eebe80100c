"""A tiny model of each family: what ``tools/models_cell.py`` checks, on the release that most tests run on.

``nox -s models`` does the same for every architecture of the registry.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_env import ROOT, VllmEnv

pytestmark = [pytest.mark.real, pytest.mark.wide]
#: Architecture, where its decoder layers are, and whether its layers leave two addends or one.
FAMILIES = {
    "dense": ("LlamaForCausalLM", "model.layers", "sum"),
    "residual in the hidden states already": ("CohereForCausalLM", "model.layers", "hidden"),
    "norm after the layer": ("Exaone4ForCausalLM", "model.layers", "hidden"),
    "parallel residual": ("FalconForCausalLM", "transformer.h", "hidden"),
    "absolute positions": ("GPT2LMHeadModel", "transformer.h", "hidden"),
    "experts": ("Qwen3MoeForCausalLM", "model.layers", "sum"),
    "experts, MLA, dense first layer": ("DeepseekV3ForCausalLM", "model.layers", "sum"),
    "experts of one kind in every layer": ("MixtralForCausalLM", "model.layers", "sum"),
    "sliding window": ("Gemma3ForCausalLM", "model.layers", "sum"),
    "scaled residual": ("GraniteForCausalLM", "model.layers", "hidden"),
    "config that is code": ("OrionForCausalLM", "model.layers", "hidden"),
    "multimodal": ("Qwen3VLForConditionalGeneration", "language_model.model.layers", "sum"),
}
#: A layer with several streams, and layers that run several times: which state is meant would be a guess.
REFUSED = {"Gemma3nForCausalLM": "SC508", "OuroForCausalLM": "SC522"}


@pytest.fixture(scope="module")
def answers(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("families")
    request = {
        "architectures": [*(architecture for architecture, _, _ in FAMILIES.values()), *REFUSED],
        "scratch": str(folder / "scratch"),
        "answer": str(folder / "answer.json"),
        "limit": 300,
    }
    (folder / "request.json").write_text(json.dumps(request))
    done = vllm_env.run(
        ROOT / "tools" / "models_cell.py",
        folder / "request.json",
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found: dict[str, Any] = json.loads(Path(request["answer"]).read_text())
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_family(answers: dict[str, Any], family: str) -> None:
    architecture, path, residual = FAMILIES[family]
    found = answers[architecture]
    assert found["status"] == "passed", found
    assert (found["path"], found["residual"]) == (path, residual)
    assert found["layers"] == found["layers_expected"] == 4


@pytest.mark.parametrize("architecture", REFUSED)
def test_refused(answers: dict[str, Any], architecture: str) -> None:
    found = answers[architecture]
    assert found["status"] == "refused", found
    assert REFUSED[architecture] in found["reason"]
