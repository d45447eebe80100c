"""Real engines that are disturbed: silent faults, kills, hangs; and the data that comes out, trained on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm_env import ROOT, VllmEnv

pytestmark = pytest.mark.real

HERE = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "extract_hidden_states.py"
EXACT = '{"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}'
LINES = 40


@pytest.fixture(scope="session")
def llama(vllm_env: VllmEnv, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trust") / "llama"
    done = vllm_env.run(ROOT / "examples" / "tiny_models.py", "llama", folder)
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(3)
    path = tmp_path_factory.mktemp("data") / "p.jsonl"
    with open(path, "w") as stream:
        for number in range(LINES):
            # Some tokens are frequent, as in text, so that there is something to learn.
            ids = [min(511, 8 + int(draw.expovariate(1 / 40))) for _ in range(draw.randrange(8, 60))]
            mask = [0] * (len(ids) // 3) + [1] * (len(ids) - len(ids) // 3)
            stream.write(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
            if number == 11:
                stream.write("not json\n")
    return path


class Job:
    """Runs of the example into one folder."""

    def __init__(self, env: VllmEnv, model: Path, data: Path, out: Path, *more: str) -> None:
        self.env, self.out, self.log = env, out, out.with_suffix(".log")
        arguments = ["--model-path", model, "--prepared-data", data, "--output-dir", out, "--batch-size", 4]
        arguments += ["--max-seq-len", 100, "--gpu-memory-utilization", 0.3, "--vllm-args", EXACT, "--skip-check"]
        self.command = [env.python, EXAMPLE, *arguments, *more]

    def start(self, way: str = "in-process", **variables: str) -> subprocess.Popen[bytes]:
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                list(map(str, self.command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env.variables("0.4.0.1", SPECULATORS_COMPAT_WAY=way, **variables),
                start_new_session=True,
            )

    def finish(self) -> None:
        process = self.start()
        assert process.wait(600) == 0, self.said()

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-8000:]

    def samples(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.out.glob("data_*.pt")}

    def wait_for_samples(self, process: subprocess.Popen[bytes], count: int) -> None:
        while len(list(self.out.glob("data_*.pt"))) < count:
            assert process.poll() is None, self.said()
            time.sleep(0.01)


def below(pid: int) -> list[int]:
    """Processes started by one, at any depth."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_bytes().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            if parent == pid:
                found += [int(entry.name), *below(int(entry.name))]
    return found


def workers(pid: int) -> list[int]:
    """vLLM's processes below one."""
    named = []
    for child in below(pid):
        try:
            line = Path(f"/proc/{child}/cmdline").read_bytes()
        except OSError:
            continue
        if b"VLLM::" in line or b"spawn_main" in line:
            named.append(child)
    return named


def gone(pids: list[int], patience: float = 20) -> bool:
    """Whether processes end, zombies aside."""

    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        except OSError:
            return False

    deadline = time.monotonic() + patience
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not any(map(lives, pids))


@pytest.fixture(scope="session")
def undisturbed(
    vllm_env: VllmEnv, llama: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    job = Job(vllm_env, llama, prepared, tmp_path_factory.mktemp("undisturbed") / "out")
    job.finish()
    samples = job.samples()
    assert len(samples) == LINES
    manifest = json.loads((job.out / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["recorded"]["alignment"] == {"proved": LINES, "not_proved": {}, "failed": {}}
    return samples


@pytest.fixture
def job(vllm_env: VllmEnv, llama: Path, prepared: Path, tmp_path: Path) -> Job:
    return Job(vllm_env, llama, prepared, tmp_path / "out")


def comparable(samples: dict[str, bytes], way: str) -> dict[str, Any]:
    """What must be the same in every run. The engine computes whatever has arrived when it begins a step, so its last bits
    differ from run to run; then it is which files there are, each whole."""
    return {name: data if way == "in-process" else len(data) for name, data in samples.items()}


def resumed(
    job: Job, undisturbed: dict[str, bytes], before: dict[str, bytes], way: str = "in-process"
) -> None:
    """After the disturbance: nothing is lost, and the rest becomes what it would have been."""
    assert comparable(before, way).items() <= comparable(undisturbed, way).items()
    job.finish()
    assert before.items() <= job.samples().items()
    assert comparable(job.samples(), way) == comparable(undisturbed, way)


@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_kills_of_the_whole_run(job: Job, undisturbed: dict[str, bytes], way: str) -> None:
    draw = random.Random(7)
    before: dict[str, bytes] = {}
    for _ in range(2 if way == "in-process" else 1):
        process = job.start(way)
        try:
            job.wait_for_samples(process, len(before) + 1)
            time.sleep(draw.uniform(0, 0.2))
            children = below(process.pid)
        finally:
            process.kill()
        process.wait()
        assert gone(children), "workers outlive a killed run"
        now = job.samples()
        assert before.items() <= now.items()
        before = now
        if len(before) == LINES:
            break
    resumed(job, undisturbed, before, way)


@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_a_killed_worker_ends_the_run(job: Job, undisturbed: dict[str, bytes], way: str) -> None:
    process = job.start(way)
    job.wait_for_samples(process, 1)
    children = below(process.pid)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    assert process.wait(120) != 0, job.said()
    assert gone(children)
    resumed(job, undisturbed, job.samples(), way)


@pytest.mark.parametrize("way", ["in-process", "engine"])
def test_a_hanging_worker_is_ended(job: Job, undisturbed: dict[str, bytes], way: str) -> None:
    process = job.start(way, SPECULATORS_COMPAT_WATCHDOG="15")
    job.wait_for_samples(process, 1)
    children = below(process.pid)
    for worker in workers(process.pid):
        os.kill(worker, signal.SIGSTOP)
    started = time.monotonic()
    status = process.wait(180)
    assert status in (1, 70), job.said()
    assert time.monotonic() - started < 120
    assert "[SC517]" in job.said()
    assert "vLLM computes a step" in job.said() or "vLLM computes the first step" in job.said()
    assert gone(children)
    resumed(job, undisturbed, job.samples(), way)


def test_ctrl_c_in_a_terminal_reaches_the_engine_too(job: Job, undisturbed: dict[str, bytes]) -> None:
    process = job.start("engine")
    job.wait_for_samples(process, 1)
    children = below(process.pid)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130, job.said()
    assert "stopped; resume with the same command" in job.said()
    assert "[SC518]" not in job.said()
    assert gone(children)
    assert comparable(job.samples(), "engine").items() <= comparable(undisturbed, "engine").items()


def test_ctrl_c_twice_ends_a_hanging_run(job: Job, undisturbed: dict[str, bytes]) -> None:
    process = job.start()
    job.wait_for_samples(process, 1)
    children = below(process.pid)
    for worker in workers(process.pid):
        os.kill(worker, signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130, job.said()
    assert gone(children)
    assert job.samples().items() <= undisturbed.items()


# ---- silent faults under a real engine


@pytest.fixture(scope="session")
def trust(vllm_env: VllmEnv, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    answer = tmp_path_factory.mktemp("planted") / "answer.json"
    done = vllm_env.run(
        HERE / "trust_runner.py",
        llama,
        answer,
        timeout=1200,
        SPECULATORS_COMPAT_WAY="engine",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return dict(json.loads(answer.read_text()))


CAUGHT = {
    "order of the batch": "SC506",
    "order of the batch, unseen by token ids": "SC516",
    "results sorted as text": "SC516",
    "a neighbour's tokens": "SC506",
    "positions shifted": "SC516",
    "another layer": "SC516",
    "after the norm instead of before": "SC516",
    "the residual left out": "SC516",
    "NaN": "SC511",
    "infinity": "SC511",
    "all zeros": "SC511",
    "hooks skipped": "SC502",
}


@pytest.mark.parametrize("fault", CAUGHT)
def test_a_silent_fault_is_caught(trust: dict[str, Any], fault: str) -> None:
    found = trust["planted"]["faults"][fault]
    assert found["id"] == CAUGHT[fault], found["text"]


def test_without_a_fault_all_is_proved_before_and_afterwards(trust: dict[str, Any]) -> None:
    assert set(trust["planted"]["faults"]) == set(CAUGHT)
    assert trust["planted"]["proved"] == {"proved": 12, "not_proved": {}, "failed": {}}
    assert trust["planted"]["afterwards"] < 1e-5


@pytest.mark.parametrize("schedule", ["chunked prefill", "preemption", "one at a time"])
def test_schedules_change_nothing(trust: dict[str, Any], schedule: str) -> None:
    found = trust["schedules"][schedule]
    assert found["error"] < 1e-5
    assert found["proved"] == {"proved": 12, "not_proved": {}, "failed": {}}
    assert (found["preempted"] > 0) is (schedule == "preemption")


def test_prefix_caching(trust: dict[str, Any]) -> None:
    assert trust["caching"] == {"refused": "SC408", "circumvented": "SC503"}


def test_the_last_layer_after_the_final_norm(trust: dict[str, Any]) -> None:
    assert trust["normed"]["error"] < 1e-5
    assert trust["normed"]["proved"] == {"proved": 12, "not_proved": {}, "failed": {}}


# ---- to the purpose: speculators' own trainers


@pytest.fixture(scope="session")
def data_set(
    vllm_env: VllmEnv, llama: Path, prepared: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(output: str) -> Path:
        if output not in made:
            job = Job(vllm_env, llama, prepared, tmp_path_factory.mktemp(output) / "out", "--format", output)
            job.finish()
            made[output] = job.out
        return made[output]

    return get


@pytest.mark.parametrize(("output", "speculators"), [("pt", "0.4.0.1"), ("safetensors", "0.5.0")])
def test_training(
    vllm_env: VllmEnv, llama: Path, data_set: Callable[[str], Path], tmp_path: Path, output: str, speculators: str
) -> None:
    answer = tmp_path / "answer.json"
    done = vllm_env.run(
        HERE / "train.py", data_set(output), llama, answer, speculators=speculators, timeout=900, SPECULATORS_COMPAT="0"
    )
    assert done.returncode == 0, done.stdout[-6000:]
    found = json.loads(answer.read_text())
    print(found)
    assert found["samples"] >= LINES - 1
    assert found["steps"] >= 40
    assert found["last"] < 0.7 * found["first"]
    length = found["shapes"]["input_ids"][0]
    assert found["shapes"]["hidden_states"] == [length, 3 * 128]
    assert found["shapes"]["verifier_last_hidden_states"] == [length, 128]


@pytest.mark.parametrize("output", ["pt", "safetensors"])
def test_verify(vllm_env: VllmEnv, llama: Path, data_set: Callable[[str], Path], output: str, tmp_path: Path) -> None:
    folder = data_set(output)
    command = ["-m", "speculators_compat.verify"]
    done = vllm_env.run(*command, folder, "--samples", "5", speculators=None)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok  ") == 5
    assert vllm_env.run(*command, folder, "--checksums-only", speculators=None).returncode == 0

    # A manifest that names other layers: the layer that fits is told.
    import shutil

    shutil.copytree(folder, tmp_path / "copy")
    manifest = json.loads((tmp_path / "copy" / "manifest.json").read_text())
    manifest["recorded"]["layer_ids"] = [k - 1 for k in manifest["recorded"]["layer_ids"]]
    (tmp_path / "copy" / "manifest.json").write_text(json.dumps(manifest))
    done = vllm_env.run(*command, tmp_path / "copy", "--samples", "2", speculators=None)
    assert done.returncode == 1
    assert "[SC612]" in done.stdout
    assert "it is after-layer 5" in done.stdout
    (victim,) = (tmp_path / "copy").rglob("*_3.*")
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = vllm_env.run(*command, tmp_path / "copy", "--checksums-only", speculators=None)
    assert done.returncode == 1
    assert "is not what was written" in done.stdout
