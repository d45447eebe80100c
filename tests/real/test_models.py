"""A tiny model of each family, extracted and compared with transformers: what ``tools/models_cell.py`` checks.

One process imports vLLM and forks for each architecture, so a model takes a few seconds. ``nox -s models`` does the
same for every architecture of the registry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_env import ROOT, VllmEnv, make

#: The newest release with a build for CPUs: builds such as 0.16's run no state-space layers on CPUs.
NEWEST = "0.32.0"
pytestmark = pytest.mark.real
Family = tuple[str, str, str]
Run = Callable[[str], dict[str, Any]]
EXACT = 1e-4
#: Architecture, where its decoder layers are, and whether its layers leave two addends or one.
FAMILIES: dict[str, Family] = {
    "dense": ("LlamaForCausalLM", "model.layers", "sum"),
    "experts": ("Qwen3MoeForCausalLM", "model.layers", "sum"),
    "MLA": ("DeepseekV3ForCausalLM", "model.layers", "sum"),
    "sliding window": ("Gemma3ForCausalLM", "model.layers", "sum"),
    "parallel residual": ("GPTJForCausalLM", "transformer.h", "hidden"),
    "multimodal": ("Qwen3VLForConditionalGeneration", "language_model.model.layers", "sum"),
}
ON_THE_NEWEST: dict[str, Family] = {
    "hybrid": ("GraniteMoeHybridForCausalLM", "model.layers", "hidden"),
    "multimodal, MLA": ("KimiK25ForConditionalGeneration", "language_model.model.layers", "sum"),
}
MORE: dict[str, Family] = {
    "norm after the layer": ("Exaone4ForCausalLM", "model.layers", "hidden"),
    "parallel residual": ("CohereForCausalLM", "model.layers", "hidden"),
    "absolute positions": ("GPT2LMHeadModel", "transformer.h", "hidden"),
    "experts of one kind in every layer": ("MixtralForCausalLM", "model.layers", "sum"),
    "scaled residual": ("GraniteForCausalLM", "model.layers", "hidden"),
    "soft caps": ("Gemma2ForCausalLM", "model.layers", "sum"),
    "a wrapper that only vLLM has": ("InternVLChatModel", "language_model.model.layers", "sum"),
}
MORE_ON_THE_NEWEST: dict[str, Family] = {
    "experts with attention sinks": ("GptOssForCausalLM", "model.layers", "sum"),
    "short convolutions": ("Lfm2ForCausalLM", "model.layers", "sum"),
    "through transformers": ("Olmo2ForCausalLM", "model.layers", "hidden"),
}
#: Extracted too, but transformers has no such model: compared with the second capture alone.
ALONE: dict[str, Family] = {"config that is code": ("OrionForCausalLM", "model.layers", "hidden")}
#: A layer with several streams, and layers that run several times: which state is meant would be a guess.
REFUSED = {"Gemma3nForCausalLM": "SC508", "OuroForCausalLM": "SC522"}


@pytest.fixture(scope="module")
def run(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs architectures in one process, once for all tests of a group."""
    done: dict[str, dict[str, Any]] = {}

    def answers(group: str) -> dict[str, Any]:
        if group not in done:
            version, architectures = GROUPS[group]
            environment = make(version) if version else vllm_env
            folder = tmp_path_factory.mktemp("families")
            request = {
                "architectures": architectures,
                "scratch": str(folder / "scratch"),
                "answer": str(folder / "answer.json"),
                "limit": 300,
            }
            (folder / "request.json").write_text(json.dumps(request))
            ended = environment.run(ROOT / "tools" / "models_cell.py", folder / "request.json", timeout=3000)
            assert ended.returncode == 0, ended.stdout[-6000:]
            done[group] = json.loads(Path(str(request["answer"])).read_text())
        return done[group]

    return answers


def names(*families: dict[str, Family]) -> list[str]:
    return [architecture for family in families for architecture, _, _ in family.values()]


GROUPS = {
    "families": ("", names(FAMILIES)),
    "on the newest": (NEWEST, names(ON_THE_NEWEST)),
    "more": ("", [*names(MORE, ALONE), *REFUSED]),
    "more on the newest": (NEWEST, names(MORE_ON_THE_NEWEST)),
}


def check(answers: dict[str, Any], family: Family, *, transformers: bool = True) -> None:
    found = answers[family[0]]
    assert found["status"] == "passed", found
    assert (found["path"], found["residual"]) == family[1:]
    assert found["layers"] == found["layers_expected"] == 4
    assert found["aligned"] == 6  # every sample of the generator's calls is proved by the engine's greedy token
    if transformers:
        assert found["weights"] == "transformers", found
        assert 0 < found["error"] <= EXACT


@pytest.mark.parametrize("family", FAMILIES)
def test_family(run: Run, family: str) -> None:
    check(run("families"), FAMILIES[family])


@pytest.mark.parametrize("family", ON_THE_NEWEST)
def test_family_on_the_newest(run: Run, family: str) -> None:
    check(run("on the newest"), ON_THE_NEWEST[family])


@pytest.mark.wide
@pytest.mark.parametrize("family", MORE)
def test_more(run: Run, family: str) -> None:
    check(run("more"), MORE[family])


@pytest.mark.wide
@pytest.mark.parametrize("family", MORE_ON_THE_NEWEST)
def test_more_on_the_newest(run: Run, family: str) -> None:
    check(run("more on the newest"), MORE_ON_THE_NEWEST[family])


@pytest.mark.wide
@pytest.mark.parametrize("family", ALONE)
def test_without_a_reference(run: Run, family: str) -> None:
    check(run("more"), ALONE[family], transformers=False)


@pytest.mark.wide
@pytest.mark.parametrize("architecture", REFUSED)
def test_refused(run: Run, architecture: str) -> None:
    found = run("more")[architecture]
    assert found["status"] == "refused", found
    assert REFUSED[architecture] in found["reason"]
