"""compat-check --rehearse on real vLLM: green for Kimi-K2.5's real dimensions; red without an adapter it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from doctor_support import KIMI, make_model
from vllm_env import VllmEnv, make

pytestmark = pytest.mark.real

#: The newest release with a build for CPUs; used where its environment is there already.
NEWEST = "0.32.0"
#: On two cores that have nothing else to do.
LIMIT = 180.0
LLAMA = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def newest() -> VllmEnv:
    return make(NEWEST)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama's config with Kimi's small tokenizer, and no weights."""
    folder = make_model(tmp_path_factory.mktemp("models") / "llama", {**LLAMA, "vocab_size": 512}, shards=0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((KIMI / name).read_bytes())
    return folder


def compat_check(env: VllmEnv, *arguments: str | Path, **variables: str) -> dict[str, Any]:
    done = env.run("-m", "speculators_compat.cli", "--json", *arguments, timeout=1000, **variables)
    try:
        report = json.loads(done.stdout[done.stdout.index('{\n  "schema"') :])
    except ValueError:
        pytest.fail(done.stdout[-3000:])
    assert done.returncode == report["exit_code"]
    return report  # type: ignore[no-any-return]


def rehearse(env: VllmEnv, model: Path, *, speculators: str = "0.4.0.1", **variables: str) -> dict[str, Any]:
    """The result of a rehearsal alone."""
    arguments = ("--model", model, "--rehearse", "--only", "SC740")
    (result,) = compat_check(env, *arguments, speculators=speculators, **variables)["checks"]
    return result  # type: ignore[no-any-return]


def assert_green(report: dict[str, Any], exit_code: int) -> None:
    """Nothing failed, in the whole check of a folder with config and tokenizer alone."""
    assert report["exit_code"] == exit_code, [c for c in report["checks"] if c["status"] == "failed"]
    result = report["checks"][-1]
    assert result["status"] == "ok", result["found"]
    assert "KimiK25ForConditionalGeneration at language_model.model.layers: 4 of 61 layers" in result["found"]
    assert "nothing left behind" in result["found"]
    busy = os.getloadavg()[0] > 2 * len(os.sched_getaffinity(0))
    assert busy or result["seconds"] < LIMIT


@pytest.mark.parametrize("speculators", ["0.3.0", "0.4.0.1"])
def test_kimi_on_the_seed(vllm_env: VllmEnv, speculators: str) -> None:
    assert_green(compat_check(vllm_env, "--model", KIMI, "--rehearse", speculators=speculators), 0)


def test_kimi_on_the_newest(newest: VllmEnv) -> None:
    report = compat_check(newest, "--model", KIMI, "--rehearse")
    assert_green(report, 0 if report["row"]["status"] == "verified" else 3)


def assert_caught(result: dict[str, Any], id: str, adapter: str, words: str) -> None:
    assert (result["status"], result["id"]) == ("failed", id), result["found"]
    assert f"Adapter concerned: {adapter}." in result["found"]
    assert words in result["found"]
    assert result["mend"] == "unset SPECULATORS_COMPAT_WITHOUT"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ("scheduler_config", "is_encoder_decoder"),
        ("scheduler", "'block_size'"),
        ("kv_cache", "'kv_cache_specs'"),
        ("device_memory", "NVIDIA driver"),
        ("generation", ""),
        ("vllm_arguments", "weights"),
    ],
)
def test_what_the_seed_needs(vllm_env: VllmEnv, llama: Path, adapter: str, words: str) -> None:
    result = rehearse(vllm_env, llama, speculators="0.3.0", SPECULATORS_COMPAT_WITHOUT=adapter)
    assert_caught(result, "SC742", adapter, words)


def test_what_a_wrapper_needs(vllm_env: VllmEnv) -> None:
    result = rehearse(vllm_env, KIMI, SPECULATORS_COMPAT_WITHOUT="layer_navigation")
    assert_caught(result, "SC742", "layer_navigation", "has no attribute 'model'")


@pytest.mark.wide
@pytest.mark.parametrize(
    ("adapter", "id", "words"),
    [
        ("transformers_torch_name", "SC741", "name 'torch' is not defined"),
        ("engine", "SC742", ""),
    ],
)
def test_what_the_newest_needs(newest: VllmEnv, llama: Path, adapter: str, id: str, words: str) -> None:
    assert_caught(rehearse(newest, llama, SPECULATORS_COMPAT_WITHOUT=adapter), id, adapter, words)


def test_without_the_plugin(vllm_env: VllmEnv, llama: Path) -> None:
    result = rehearse(vllm_env, llama, speculators="0.3.0", SPECULATORS_COMPAT="0")
    assert result["status"] == "failed"
    assert "is_encoder_decoder" in result["found"]
    assert result["mend"] == "unset SPECULATORS_COMPAT"


def test_remote_code_that_raises(vllm_env: VllmEnv, tmp_path: Path) -> None:
    """Read by the other checks, and run by the rehearsal alone."""
    for entry in KIMI.iterdir():
        (tmp_path / entry.name).write_bytes(entry.read_bytes())
    code = tmp_path / "configuration_kimi_k25.py"
    code.write_text(
        code.read_text().replace("super().__init__(**kwargs)", "raise RuntimeError('on purpose')")
    )
    result = rehearse(vllm_env, tmp_path)
    assert (result["status"], result["id"]) == ("failed", "SC742")
    assert "RuntimeError: on purpose" in result["found"]
