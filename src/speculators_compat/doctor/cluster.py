"""Checks of a model that spans machines: vLLM's Ray executor, and where the worker that captures will be."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from .base import Outcome, Unavailable, check, failed, ok, warning
from .context import Context

#: Seconds that ``ray status`` may take.
PATIENCE = 20.0
ARGUMENT = "distributed_executor_backend"
_START = "ray start --head here, ray start --address=THIS_HOST:6379 on the others, then again"


def uses_ray(context: Context) -> bool:
    """Whether vLLM's workers are to be Ray's."""
    return context.options.vllm_args.get(ARGUMENT) == "ray"


def ray_gpus() -> float | None:
    """GPUs of the running Ray cluster; ``None`` if none runs. Asked in a process of its own, with a bounded wait."""
    command = shutil.which("ray") or str(Path(sys.executable).with_name("ray"))
    # Found through the variable or the file that `ray start` leaves.
    try:
        done = subprocess.run([command, "status"], capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    return sum(float(total) for total in re.findall(r"[\d.]+/([\d.]+) GPU\b", done.stdout))


@check("SC871", "memory", "several machines", also=["SC860"])
def several_machines(context: Context) -> Outcome:
    tp = context.options.tp
    try:
        local: int | None = len(context.gpus)
    except Unavailable:
        local = None
    if not uses_ray(context):
        if local is not None and local < tp:
            return warning(
                f"--tp {tp} on {local} GPUs, without Ray",
                expected="as many GPUs here, or vLLM's Ray executor over several machines",
                why="vLLM looks for all GPUs on this machine",
                mend="if the model is to span machines: export SPECULATORS_COMPAT_VLLM_ARGS="
                f"""'{{"{ARGUMENT}": "ray"}}', on a Ray cluster; otherwise a smaller --tp""",
            )
        return ok("no: vLLM's workers are on this machine")
    if context.on_cpu:
        return failed(
            f"{ARGUMENT}=ray with the build for CPUs",
            expected="a build for GPUs",
            why="vLLM's CPU platform has no device that Ray knows: 0.16 uses processes of this machine instead, "
            "0.32 refuses",
            mend=f"leave {ARGUMENT} out",
        )
    if importlib.util.find_spec("ray") is None:
        problem = failed(
            f"{ARGUMENT}=ray, and no package ray",
            expected="ray in this environment, in the same version on all machines",
            why="vLLM stops when it starts its workers",
            mend="pip install 'speculators-compat[ray]'",
        )
        return Outcome(problem.status, problem.found, problem.expected, problem.why, problem.mend, id="SC860")
    if not local:
        return failed(
            f"{ARGUMENT}=ray on a machine " + ("without a visible GPU" if local == 0 else "whose GPUs can't be seen"),
            expected="a machine of the cluster on which Ray may use a GPU",
            why="tensor-parallel rank 0 captures the states and hands them over through its machine's shared memory; it "
            "would be on another machine (SC870)",
            mend="unset CUDA_VISIBLE_DEVICES"
            if local == 0 and os.environ.get("CUDA_VISIBLE_DEVICES") is not None
            else "run this on a machine of the cluster with GPUs, not on a head node without them",
        )
    total = ray_gpus()
    if total is None:
        if tp <= local:
            return ok(f"Ray, on this machine only: no cluster runs, and {local} GPUs are enough")
        return failed(
            f"--tp {tp}, {local} GPUs here, and no Ray cluster runs",
            expected="a cluster that this machine has joined",
            why="vLLM would start a cluster of this machine alone, and wait for GPUs that never come",
            mend=_START,
        )
    if total < tp:
        return failed(
            f"--tp {tp}, and {total:g} GPUs in the Ray cluster",
            expected=f"{tp} GPUs",
            why="vLLM waits for GPUs that never come",
            mend=_START,
        )
    text = f"Ray: {total:g} GPUs in the cluster, {local} of them here, {tp} needed"
    if tp > local:
        text += "; rank 0 captures, on this machine"
    return ok(text)
