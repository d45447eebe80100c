#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spread an extraction over a local Ray cluster of several machines, kill parts of it, and compare the result.

    python tools/ray_test.py                      # vLLM 0.16.0 with speculators 0.4.0.1
    python tools/ray_test.py --vllm 0.32.0
    python tools/ray_test.py --vllm 0.32.0 --executor    # vLLM's own Ray executor instead

Real vLLM on the CPU, a tiny model with weights, a cluster of a head and two machines (raylets). While shards are being
written these are killed with SIGKILL: the extraction's process, vLLM's engine process where there is one, the Ray worker
above it, and at last a whole machine. The result must have every sample once, with the states that one run without Ray
extracts and that transformers computes. What was found goes into evidence/ray.json.

--executor: the generator with ``distributed_executor_backend="ray"`` and tensor parallel 2. vLLM's CPU platform has no Ray
device, so it is told that its device is called GPU, of which the cluster claims to have two; the workers run on the CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
EVIDENCE = ROOT / "evidence" / "ray.json"
SPECULATORS = "0.4.0.1"
PROMPTS, LENGTHS, SHARDS = 160, (150, 400), 4
LAYERS = (0, 3, 5)
#: Relative error of a state, float32, against the run without Ray and against transformers.
TOLERANCE = 1e-5

PREPARE = """
import sys
sys.path.insert(0, {examples!r})
import tiny_models
tiny_models.build_llama({model!r})
"""

# The cluster, as `ray start` on three machines makes it.
CLUSTER = """
import sys
from ray.cluster_utils import Cluster

memory = {"object_store_memory": 80 * 2**20}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
nodes = [cluster.add_node(num_cpus=1, **memory) for _ in range(2)]
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""

COMPARE = """
import json, sys
from pathlib import Path
import torch
from speculators_compat import dataio, verify
one, other = Path(sys.argv[1]), Path(sys.argv[2])
names = [p.name for p in verify.sample_paths(one, "pt")]
worst, equal, wrong = 0.0, 0, []
for name in names:
    a, b = (torch.load(f / name, weights_only=True) for f in (one, other))
    if not torch.equal(a["input_ids"], b["input_ids"]) or not torch.equal(a["loss_mask"], b["loss_mask"]):
        wrong.append(name)
        continue
    pairs = list(zip(a["hidden_states"], b["hidden_states"], strict=True))
    worst = max([worst, *(float((x - y).norm() / y.norm()) for x, y in pairs)])
    equal += all(torch.equal(x, y) for x, y in pairs)
faults = verify.wrong_checksums(one, verify.sample_paths(one, "pt"))
print(json.dumps({"compared": len(names), "bit_equal": equal, "wrong": wrong, "largest_error": worst,
                  "checksum_faults": faults, "same_names": names == [p.name for p in verify.sample_paths(other, "pt")]}))
"""


# Found by Python in every process: lets vLLM's CPU platform use what Ray takes for GPUs.
SHIM = """
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "vllm.platforms.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            module.CpuPlatform.ray_device_key = "GPU"
            module.CpuPlatform.ray_noset_device_env_vars = ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]
            module.CpuPlatform.device_control_id_to_physical_device_id = classmethod(lambda cls, id: int(id))

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""

EXECUTOR = """
import speculators_compat
import json, os, sys
import torch

if __name__ == "__main__":
    sys.path.insert(0, {examples!r})
    import ray
    import tiny_models
    model = {model!r}
    tiny_models.build_llama(model)
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # for vLLM's engine process
    speculators_compat.configure(vllm_args={{"dtype": "float32", "compilation_config": {{"custom_ops": ["none"]}},
                                            "distributed_executor_backend": "ray"}})
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
    layers = {layers!r}
    generator = VllmHiddenStatesGenerator(model, layer_ids=list(layers), max_model_len=256, gpu_memory_utilization=0.3,
                                          tensor_parallel_size=2)
    backend = generator.vllm_config.parallel_config.distributed_executor_backend
    prompts = [[(7 * i + j) % 300 + 3 for j in range(20 + 5 * i)] for i in range(12)]
    results = generator.generate(prompts)
    proved = generator.session.alignment.proved
    generator.shutdown()
    reference, worst = tiny_models.load_reference(model), 0.0
    for prompt, result in zip(prompts, results, strict=True):
        kept = []
        def keep(module, args, output):
            state = output[0] if isinstance(output, tuple) else output
            kept.append(state.reshape(len(prompt), -1).float())
        hooks = [layer.register_forward_hook(keep) for layer in reference.model.layers]
        with torch.inference_mode():
            reference(input_ids=torch.tensor([prompt]))
        for hook in hooks:
            hook.remove()
        for k, state in zip(layers, result["hidden_states"], strict=True):
            worst = max(worst, float((state.float() - kept[k]).norm() / kept[k].norm()))
    print(json.dumps({{"backend": str(backend), "tensor_parallel": 2, "prompts": len(results), "proved": proved,
                      "largest_error_against_transformers": worst}}))
"""


class Failed(Exception):
    """What was found is not what must be."""


def python_and_environment(vllm: str) -> tuple[Path, dict[str, str]]:
    sys.path.insert(0, str(ROOT / "tools"))
    import environments

    python = environments.make_vllm_env(vllm)
    folders = [environments.install_ray(python=str(python)), environments.install_speculators(SPECULATORS)]
    environment = {
        **{k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")},
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_MLA_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_period_ms": "1000",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    return python, environment


def children(pid: int) -> list[int]:
    from speculators_compat import watchdog

    return watchdog.descendants(pid)


def holder(out: Path, shard: int) -> int | None:
    """The process that extracts a shard, by its claim."""
    try:
        return int(json.loads((out / f"shard-{shard}-of-{SHARDS}" / ".claim").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return None


def command(pid: int) -> bytes:
    """A process's command line, or the name that it has given itself."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def end(cluster: subprocess.Popen[str]) -> None:
    """Shut the cluster down; its processes end with it."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        cluster.communicate(timeout=60)
    cluster.kill()


class Killer(threading.Thread):
    """Kills a part of each shard's run once, when some of its samples are on disk."""

    def __init__(self, out: Path, victims: dict[int, str]) -> None:
        super().__init__(daemon=True)
        self.out, self.victims = out, victims
        self.over = threading.Event()
        self.killed: list[dict[str, Any]] = []

    def run(self) -> None:
        left = dict(self.victims)
        while left and not self.over.wait(0.003):
            for shard, kind in list(left.items()):
                folder = self.out / f"shard-{shard}-of-{SHARDS}"
                count = len(list(folder.glob("data_*.pt"))) if folder.is_dir() else 0
                pid = holder(self.out, shard)
                if not 2 <= count < PROMPTS // SHARDS - 5 or pid is None:
                    continue
                victim = self.strike(kind, pid)
                if victim is not None:
                    self.killed.append({"shard": shard, "what": kind, "samples_on_disk": count})
                    print(f"killed {kind} of shard {shard} with {count} samples on disk", file=sys.stderr, flush=True)
                    del left[shard]

    def strike(self, kind: str, pid: int) -> int | None:
        victim, also = pid, []
        try:
            if kind in ("Ray worker", "machine"):
                victim = parent(pid)
            if kind == "machine":  # a raylet and all that it has started, at once
                victim = parent(victim)
                also = children(victim)
        except (OSError, ValueError):  # it has ended meanwhile
            return None
        if {"Ray worker": b"ray::", "machine": b"raylet"}.get(kind, b"") not in command(victim):
            return None
        if kind == "engine process":
            cores = [one for one in children(pid) if b"VLLM::" in command(one)]
            victim = cores[0] if cores else pid  # speculators' own class has it in the script's process
        for one in (victim, *also):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        return victim


def run(vllm: str, work: Path) -> dict[str, Any]:
    """Make both runs and compare them.

    Raises:
        Failed: naming what is wrong.
    """
    python, environment = python_and_environment(vllm)

    def call(name: str, *command: str, timeout: float = 900) -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, cwd=work)
        (work / f"{name}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            raise Failed(f"{name}: status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    model, data, out, plain = work / "model", work / "prompts.jsonl", work / "ray", work / "plain"
    call("prepare", str(python), "-c", PREPARE.format(examples=str(EXAMPLES), model=str(model)))
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    draw = random.Random(0)
    lines = []
    for _ in range(PROMPTS):
        ids = [draw.randrange(3, vocabulary) for _ in range(draw.randint(*LENGTHS))]
        lines.append(json.dumps({"input_ids": ids, "loss_mask": [0] * 5 + [1] * (len(ids) - 5)}))
    lines.insert(11, "not json")
    data.write_text("\n".join(lines) + "\n")
    vllm_args = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}
    arguments = ["--model-path", str(model), "--prepared-data", str(data), "--batch-size", "4", "--max-seq-len", "512"]
    arguments += ["--layer-ids", *map(str, LAYERS), "--vllm-args", json.dumps(vllm_args), "--skip-check"]

    began = time.monotonic()
    call("plain", str(python), str(EXAMPLES / "extract_hidden_states.py"), *arguments, "--output-dir", str(plain))
    plain_seconds = time.monotonic() - began

    began = time.monotonic()
    (work / "cluster.py").write_text(CLUSTER)
    with open(work / "cluster.log", "w") as told, open(work / "driver.log", "w") as log, contextlib.ExitStack() as stack:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": told, "text": True}
        cluster = subprocess.Popen([str(python), str(work / "cluster.py")], env=environment, cwd=work, **pipes)
        stack.callback(end, cluster)
        assert cluster.stdout is not None
        words = cluster.stdout.readline().split()
        if words[:1] != ["address"]:
            raise Failed(f"no cluster: {(work / 'cluster.log').read_text()[-2000:]}")
        command = [str(python), str(EXAMPLES / "ray_extract.py"), "--address", words[1], "--shards", str(SHARDS)]
        command += ["--num-gpus", "0", "--num-cpus", "1", "--output-dir", str(out), *arguments]
        driver = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=work)
        stack.callback(driver.kill)
        victims = {0: "extraction process", 1: "Ray worker", 2: "engine process", 3: "machine"}
        killer = Killer(out, victims)
        killer.start()
        stack.callback(killer.over.set)
        status = driver.wait(timeout=1500)
    seconds = time.monotonic() - began
    said = (work / "driver.log").read_text()
    if status:
        raise Failed(f"the driver ended with status {status}: {said[-3000:]}")
    compared = json.loads(call("compare", str(python), "-c", COMPARE, str(out), str(plain)).splitlines()[-1])
    verified = call("verify", str(python), "-m", "speculators_compat.verify", str(out), "--samples", "8")
    attempts = json.loads((out / "logs" / "ray.json").read_text())["shards"]
    manifest = json.loads((out / "manifest.json").read_text())
    resumed = [
        int(line.split()[1])
        for path in sorted((out / "logs").glob("*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if line.startswith("resuming: ")
    ]
    left = sorted(p.name for p in out.iterdir() if p.is_dir() and p.name != "logs")
    found = {
        "vllm": vllm,
        "speculators": SPECULATORS,
        "way": manifest["recorded"]["way"],
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "cluster": "a head and 2 machines of 1 CPU each, as processes of one host",
        "prompts": PROMPTS,
        "shards": SHARDS,
        "killed": killer.killed,
        "starts": {name: [one["status"] for one in tries] for name, tries in attempts.items()},
        "restarted": sum(len(tries) - 1 for tries in attempts.values()),
        "samples_kept_by_restarts": resumed,
        "samples": manifest["samples"],
        "twice": manifest["samples"] - len({path.name for path in out.glob("data_*.pt")}),
        "proved": manifest["recorded"]["alignment"]["proved"],
        "against_the_run_without_ray": compared,
        "transformers": [line.split() for line in verified.splitlines()],
        "seconds": {"without_ray": round(plain_seconds, 1), "with_ray_and_kills": round(seconds, 1)},
    }
    wrong = []
    if len(killer.killed) < len(victims):
        wrong.append(f"only {len(killer.killed)} kills")
    if found["restarted"] < len(killer.killed):
        wrong.append("a kill without a restart")
    if manifest["samples"] != PROMPTS or not manifest["complete"] or found["twice"] or left:
        wrong.append(f"{manifest['samples']} samples, complete: {manifest['complete']}, left: {left}")
    if compared["compared"] != PROMPTS or compared["wrong"] or compared["checksum_faults"] or not compared["same_names"]:
        wrong.append(f"compared: {compared}")
    if not compared["largest_error"] <= TOLERANCE:
        wrong.append(f"largest error {compared['largest_error']}")
    if not all(line.startswith("ok") for line in verified.splitlines()):
        wrong.append(verified)
    if wrong:
        raise Failed(json.dumps({"wrong": wrong, **found}, indent=1) + "\n" + said[-2000:])
    return found


def run_executor(vllm: str, work: Path) -> dict[str, Any]:
    """Extract through vLLM's Ray executor and compare with transformers.

    Raises:
        Failed: with the output, or what was found.
    """
    python, environment = python_and_environment(vllm)
    (work / "shim").mkdir(exist_ok=True)
    del environment["CUDA_VISIBLE_DEVICES"]  # Ray would believe it
    (work / "shim" / "sitecustomize.py").write_text(SHIM)
    environment["PYTHONPATH"] = f"{work / 'shim'}{os.pathsep}{environment['PYTHONPATH']}"
    script = work / "executor.py"
    script.write_text(EXECUTOR.format(examples=str(EXAMPLES), model=str(work / "model"), layers=LAYERS))
    done = subprocess.run(
        [str(python), str(script)], env=environment, capture_output=True, text=True, timeout=600, cwd=work
    )
    (work / "executor.log").write_text(done.stdout + done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"backend"')]
    if not lines:
        raise Failed((done.stdout + done.stderr)[-3000:])
    found: dict[str, Any] = json.loads(lines[-1])
    if found["backend"] != "ray" or found["proved"] != found["prompts"]:
        raise Failed(json.dumps(found))
    if not found["largest_error_against_transformers"] <= TOLERANCE:
        raise Failed(json.dumps(found))
    about = {"vllm": vllm, "speculators": SPECULATORS, "date": datetime.date.today().isoformat()}
    return {**about, "host": "a CPU; its platform told that its Ray device is GPU, of which Ray claims two", **found}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--vllm", default="0.16.0")
    parser.add_argument("--executor", action="store_true", help="vLLM's own Ray executor instead of shards")
    parser.add_argument("--keep", type=Path, help="keep the folders of the runs here")
    parser.add_argument("--no-evidence", action="store_true", help="don't write evidence/ray.json")
    args = parser.parse_args(argv)
    work = args.keep or Path(tempfile.mkdtemp(prefix="ray-test-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        found = (run_executor if args.executor else run)(args.vllm, work.resolve())
    except Failed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if args.keep is None:
            shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if not args.no_evidence:
        old = json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {"how": "python tools/ray_test.py", "runs": {}}
        part = old.setdefault("vllm_ray_executor" if args.executor else "runs", {})
        part[args.vllm] = found
        EVIDENCE.write_text(json.dumps(old, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
