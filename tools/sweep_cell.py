# SPDX-License-Identifier: Apache-2.0
"""The cells of one vLLM in the sweep, run inside an environment that has it.

    python sweep_cell.py REQUEST.json

The request names the models' folder, the cells, their runs and the files that receive the results (see
:func:`main`). Imports take ten times as long as a tiny model's extraction, so torch, transformers and vLLM
are imported once, each cell (one speculators) is forked from that and imports the plugin and speculators,
and each run is forked from the cell. vLLM's own processes are forked too, except in runs that ask for
``spawn``, vLLM's default on a CPU. ``sweep.py`` documents the results.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
BATCHES = (14, 40)
MAX_MODEL_LEN = 256
#: In float32 two correct implementations differ by a few 1e-6; a wrong row, layer or order by about 1.
TOLERANCE = 1e-5
RUN_LIMIT = 300
#: Generators are not shut down, which takes longer than the extraction: the whole process group is killed.
_kept: list[Any] = []
#: The small token budget makes vLLM split prompts between steps, which is where rows are easily lost.
VLLM_ARGS: dict[str, Any] = {
    "dtype": "float32",
    "compilation_config": {"custom_ops": ["none"]},
    "max_num_batched_tokens": 512,
}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k25": "KimiK25ForConditionalGeneration",
}
#: Imported before the first fork where they exist; only a matter of speed.
PRELOAD = (
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.configuration_llama",
    "transformers.models.llama.tokenization_llama_fast",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.kimi_k25",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.distributed.device_communicators.cpu_communicator",
)


def prompts_for(count: int) -> list[list[int]]:
    """The prompts of a batch: random ids, 3 to 60 tokens long."""
    rng = random.Random(count)
    return [[rng.randrange(8, 500) for _ in range(rng.randrange(3, 61))] for _ in range(count)]


def layers_for(num_layers: int) -> list[int]:
    """Layer ids: not ascending, one of them twice, the last layer among them."""
    return [3, num_layers - 1, 0, 3]


def num_layers_of(model: Path) -> int:
    """Decoder layers of a checkpoint."""
    config = json.loads((model / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


# --------------------------------------------------------------------------- reference


def make_models(folder: Path) -> None:
    """Build the checkpoints and their reference states in float32, both by transformers alone.

    Writes ``MODEL/`` and ``MODEL.npz`` (one array per batch, prompt and layer id); ``reference.json`` last.
    """
    import numpy
    import torch
    import transformers

    sys.path.insert(0, str(TOOLS.parent / "examples"))
    tiny_models = importlib.import_module("tiny_models")
    for kind, build in tiny_models.KINDS.items():
        model = build(folder / kind)
        ids = sorted(set(layers_for(num_layers_of(model))))
        arrays = {}
        for count in BATCHES:
            states = tiny_models.reference_hidden_states(model, prompts_for(count), ids)
            for index, layers in enumerate(states):
                for id, layer in zip(ids, layers, strict=True):
                    arrays[f"{count}-{index}-{id}"] = layer.numpy()
        numpy.savez(folder / f"{kind}.npz", **arrays)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "reference.json").write_text(json.dumps(versions))


# --------------------------------------------------------------------------- one run


def run(request: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Extract with one model and compare; runs in a process of its own."""
    import speculators_compat

    model = Path(request["models"]) / spec["model"]
    ids = layers_for(num_layers_of(model))
    began = time.monotonic()
    generator = _generator(model, ids, spec["tensor_parallel"])
    _kept.append(generator)
    ready = time.monotonic()
    status = speculators_compat.status()
    result: dict[str, Any] = {"adapters": {a.id: str(a.state) for a in status.adapters}, "way": status.way}
    outputs = {count: generator.generate(prompts_for(count)) for count in BATCHES}
    result["seconds"] = {"start": round(ready - began, 1), "generate": round(time.monotonic() - ready, 2)}
    engine = spec.get("reference") == "engine capture"
    folder = Path(request["scratch"] if engine else request["models"])
    result.update(compare(outputs, ids, _arrays(folder / _reference_name(spec, engine))))
    result["reference"] = "engine capture" if engine else "transformers"
    return result


def _reference_name(spec: dict[str, Any], engine: bool) -> str:
    return f"engine-{spec['model']}-{spec['tensor_parallel']}.npz" if engine else f"{spec['model']}.npz"


def _generator(model: Path, ids: list[int], tensor_parallel: int) -> Any:
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    import speculators_compat

    speculators_compat.configure(vllm_args=VLLM_ARGS)
    return VllmHiddenStatesGenerator(
        str(model),
        layer_ids=ids,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=0.3,
        tensor_parallel_size=tensor_parallel,
    )


def _arrays(path: Path) -> Callable[[int, int, int], Any]:
    import numpy

    arrays = dict(numpy.load(path))
    return lambda count, index, id: arrays[f"{count}-{index}-{id}"]


def compare(
    outputs: dict[int, list[dict[str, Any]]], ids: list[int], reference: Callable[[int, int, int], Any]
) -> dict[str, Any]:
    """Largest relative error over all batches, prompts and layers, and whether everything is in its place."""
    import numpy

    worst, in_order = 0.0, True
    for count, results in outputs.items():
        prompts = prompts_for(count)
        in_order &= [r["input_ids"].tolist() for r in results] == prompts
        for index, result in enumerate(results):
            in_order &= len(result["hidden_states"]) == len(ids)
            for id, state in zip(ids, result["hidden_states"], strict=False):
                wanted, got = reference(count, index, id), state.float().numpy()
                if wanted.shape != got.shape:
                    in_order, worst = False, float("inf")
                    continue
                worst = max(worst, float(numpy.abs(got - wanted).max() / numpy.abs(wanted).max()))
    passed = in_order and worst <= TOLERANCE
    return {"error": float(f"{worst:.2e}"), "order": in_order, "status": "passed" if passed else "failed"}


# --------------------------------------------------------------------------- reference from the same engine


class PlainCapture:
    """Worker extension of the second reference: hooks that share no code with the plugin."""

    def sweep_hook(self, path: str, ids: list[int]) -> None:
        """Hook decoder layers, found at a path written out by hand."""
        module: Any = self.model_runner.model  # type: ignore[attr-defined]
        for part in path.split("."):
            if part != "model" or hasattr(module, part):  # Kimi-K2.5 has one level less in 0.15
                module = getattr(module, part)
        self.sweep_seen: dict[int, Any] = {}
        for id in ids:
            module[id].register_forward_hook(self._sweep_keep(id))

    def _sweep_keep(self, id: int) -> Callable[..., None]:
        def keep(module: Any, args: Any, output: Any) -> None:
            hidden, residual = output if isinstance(output, tuple) else (output, None)
            self.sweep_seen[id] = hidden.clone() if residual is None else hidden + residual

        return keep

    def sweep_take(self, file: str) -> None:
        """Write the states of the last forward pass (one prompt) to a file."""
        import numpy
        from vllm.distributed import get_tensor_model_parallel_rank

        if get_tensor_model_parallel_rank() == 0:
            numpy.savez(file, **{str(id): state.float().numpy() for id, state in self.sweep_seen.items()})


def run_engine_reference(request: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Capture with plain vLLM, one prompt at a time, and keep the states as a reference for this cell."""
    import numpy
    from vllm import LLM, SamplingParams

    import speculators_compat

    speculators_compat.deactivate()
    model = Path(request["models"]) / spec["model"]
    ids = sorted(set(layers_for(num_layers_of(model))))
    llm = LLM(
        str(model),
        max_model_len=MAX_MODEL_LEN,
        tensor_parallel_size=spec["tensor_parallel"],
        trust_remote_code=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls="sweep_cell.PlainCapture",
        **VLLM_ARGS,
    )
    path = "language_model.model.layers" if spec["model"] == "kimi_k25" else "model.layers"
    llm.collective_rpc("sweep_hook", args=(path, ids))
    arrays = {}
    params = SamplingParams(max_tokens=1, temperature=0.0)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "states.npz")
        for count in BATCHES:
            for index, prompt in enumerate(prompts_for(count)):
                llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
                llm.collective_rpc("sweep_take", args=(file,))
                for id, state in numpy.load(file).items():
                    arrays[f"{count}-{index}-{id}"] = state[: len(prompt)]
    numpy.savez(Path(request["scratch"]) / _reference_name(spec, engine=True), **arrays)
    return {"status": "passed"}


# --------------------------------------------------------------------------- processes


def in_process_of_its_own(
    function: Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]],
    request: dict[str, Any],
    spec: dict[str, Any],
) -> dict[str, Any]:
    """Fork, run ``function`` there and return what it returned, or ``status: failed`` and the problem."""
    label = "-".join([function.__name__, *(str(spec[k]) for k in ("model", "tensor_parallel", "start"))])
    folder = Path(request["scratch"])
    answer, log = folder / f"{label}.json", folder / f"{label}.log"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _child(function, request, spec, answer, log)
    deadline = time.monotonic() + RUN_LIMIT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # the run and whatever it left behind
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    if answer.exists():
        result: dict[str, Any] = json.loads(answer.read_text())
    elif time.monotonic() > deadline:
        result = {"status": "failed", "problem": f"still running after {RUN_LIMIT} s"}
    else:
        result = {"status": "failed", "problem": "the process died"}
    if result["status"] == "failed" and "problem" in result:
        result["problem"] = root_cause(result["problem"], log.read_text(errors="replace"))
    return result


def checked_run(request: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Run; if that fails, ask plain vLLM, so that the engine's own faults are known as such."""
    result = in_process_of_its_own(run, request, spec)
    if any(word in result.get("problem", "") for word in ("EADDRINUSE", "DistNetworkError")):
        result = in_process_of_its_own(run, request, spec)  # another process took the port between two calls
    if result["status"] == "passed":
        return result
    plain = in_process_of_its_own(run_engine_reference, request, spec)
    note = {"plain_vllm": plain.get("problem", "runs")}
    faults: list[str] = []
    while "error" not in result:
        known = [f for f in WORKAROUNDS if f in result["problem"] and f in plain.get("problem", "")]
        if not known or known[0] in faults:
            break
        faults.append(known[0])
        spec = {**spec, "workarounds": faults}
        note["workaround"] = "; ".join(WORKAROUNDS[fault][0] for fault in faults)
        result = in_process_of_its_own(run, request, spec)
        if result["status"] == "failed":
            plain = in_process_of_its_own(run_engine_reference, request, spec)
    if result["status"] == "failed" and "error" in result and plain["status"] == "passed":
        again = in_process_of_its_own(run, request, {**spec, "reference": "engine capture"})
        if "error" in again:
            if note["plain_vllm"] == "runs":
                note["plain_vllm"] = "disagrees with transformers"
            result = {**again, "error_to_transformers": result["error"]}
    return {**result, **note}


def _dummy_weights() -> None:
    VLLM_ARGS["load_format"] = "dummy"


def _activation_of_experts() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    def forward(gate_up: Any) -> Any:
        half = gate_up.shape[-1] // 2
        return torch.nn.functional.silu(gate_up[..., :half]) * gate_up[..., half:]

    table = cpu_fused_moe._CPU_MOE_ACT
    for key in list(getattr(table, "_factories", table)):
        if getattr(key, "value", key) == "silu":
            table[key] = types.SimpleNamespace(forward_native=forward)


def _cpu_as_current_device() -> None:
    import torch

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


def _no_binding() -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"


#: Faults of vLLM's CPU builds that plain vLLM shows too, and what lets a run and its forks go on.
WORKAROUNDS: dict[str, tuple[str, Callable[[], None]]] = {
    "Current vLLM config is not set": (
        "the CPU experts' activation is given beforehand: vLLM makes it in the first forward pass, and cannot",
        _activation_of_experts,
    ),
    "Cannot re-initialize CUDA": (  # "Found no NVIDIA driver" in a process that was not forked
        "torch.cuda.current_device() answers cpu: vLLM's Kimi-K2.5 asks for it on a host without CUDA",
        _cpu_as_current_device,
    ),
    "fused_qkv_a_proj": (
        "load_format=dummy, so the reference has other weights: this vLLM's loader for Kimi-K2.5 needs MLA, which "
        "a CPU has not",
        _dummy_weights,
    ),
    "Expected positive number of threads": (
        "VLLM_CPU_OMP_THREADS_BIND=nobind: with one core a rank this build ends up with no thread at all",
        _no_binding,
    ),
}


def _child(
    function: Callable[..., dict[str, Any]],
    request: dict[str, Any],
    spec: dict[str, Any],
    answer: Path,
    log: Path,
) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(environment(spec))
    try:
        if spec["start"] == "fork":
            _fork_instead_of_spawn()
        for fault in spec.get("workarounds", ()):
            WORKAROUNDS[fault][1]()
        result = function(request, spec)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        compat = type(error).__name__ in ("CompatError", "InputError")
        text = str(error) if compat else f"{type(error).__name__}: {error}"
        result = {"status": "failed", "problem": text}
    answer.with_suffix(".part").write_text(json.dumps(result))
    answer.with_suffix(".part").rename(answer)
    sys.stdout.flush()
    os._exit(0)


def _fork_instead_of_spawn() -> None:
    real = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: real("fork")  # type: ignore[assignment]


def environment(spec: dict[str, Any]) -> dict[str, str]:
    """Variables of one run: one core or set of cores for each tensor-parallel rank."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = spec["tensor_parallel"]
    bind = "|".join(",".join(map(str, cores[rank::ranks])) for rank in range(ranks))
    return {"VLLM_CPU_OMP_THREADS_BIND": bind}


def root_cause(problem: str, log: str) -> str:
    """The exception that ended a worker or the engine core, where the caller only saw that it died."""
    vague = ("Engine core", "EngineCore", "EngineDead", "WorkerProc init", "Worker failed", "process died")
    if not any(word in problem for word in vague):
        return problem[:2000]
    found = re.findall(r"((?:\w+\.)*\w*(?:Error|Exception|Annotation): .+)", log)
    causes = [line for line in found if not any(word in line for word in vague)]
    return f"{causes[-1][:1500]} (in vLLM's engine process)" if causes else problem[:2000]


@contextlib.contextmanager
def _quiet(log: Path) -> Iterator[None]:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    kept = os.dup(1), os.dup(2)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(kept, start=1):
            os.dup2(copy, number)


def import_vllm() -> None:
    """Import what all cells need."""
    import torch
    import transformers
    import vllm  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork
    # vLLM would start a process, with imports of its own, to look at a model class, to keep CUDA untouched.
    with contextlib.suppress(ImportError):
        registry: Any = importlib.import_module("vllm.model_executor.models.registry")
        registry._run_in_subprocess = lambda function: function()
    # vLLM 0.31 asks every object of every module for __dict__, and this one answers with a C function. A
    # spawned worker has not imported it by then, a forked one has.
    with contextlib.suppress(ImportError, AttributeError):
        wrapper: Any = importlib.import_module("llvmlite.binding.ffi")._lib_wrapper
        getter = wrapper.__getattr__

        def getattr_(self: Any, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return getter(self, name)

        wrapper.__getattr__ = getattr_
    for name in PRELOAD:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    del transformers


def import_speculators(cell: dict[str, Any]) -> dict[str, Any]:
    """Import the plugin first, as users do, then speculators; returns the versions, or the problem."""
    sys.path[:0] = cell["paths"]
    os.environ["PYTHONPATH"] = os.pathsep.join(cell["paths"])
    importlib.invalidate_caches()
    try:
        import torch
        import transformers
        import vllm
        from vllm.model_executor.models.registry import ModelRegistry

        import speculators_compat

        if cell["way"] == "other":
            ways = ("in-process", "engine")
            os.environ["SPECULATORS_COMPAT_WAY"] = ways[speculators_compat.status().way == ways[0]]
            speculators_compat.deactivate()
            speculators_compat.activate()
        importlib.import_module("speculators.data_generation.vllm_hidden_states_generator")
    except BaseException as error:
        traceback.print_exc()
        return {"problem": f"{type(error).__name__}: {error}"[:2000]}
    status = speculators_compat.status()
    return {
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vllm": vllm.__version__,
        },
        "row": status.row,
        "way": status.way,
        "adapters": {a.id: str(a.state) for a in status.adapters},
        "architectures": sorted(set(ModelRegistry.get_supported_archs()) & set(ARCHITECTURES.values())),
    }


def run_cell(request: dict[str, Any], cell: dict[str, Any]) -> None:
    """Do all runs of a cell; its answer is written anew after each."""
    began = time.monotonic()
    scratch = Path(cell["scratch"])
    scratch.mkdir(parents=True, exist_ok=True)
    request = {**request, "scratch": cell["scratch"]}
    with _quiet(scratch / "import.log"):
        answer = import_speculators(cell)
    answer["runs"] = []
    for spec in cell["runs"]:
        if "problem" in answer:
            result = {"status": "failed", "problem": answer["problem"]}
        elif ARCHITECTURES[spec["model"]] not in answer["architectures"]:
            result = {"status": "absent", "problem": f"this vLLM has no {ARCHITECTURES[spec['model']]}"}
        else:
            result = checked_run(request, spec)
        answer["runs"].append({**spec, **result})
        answer["seconds"] = round(time.monotonic() - began, 1)
        partial = scratch / "answer.part"
        partial.write_text(json.dumps(answer))
        partial.rename(scratch / "answer.json")


def main(path: str) -> None:
    """Do what the request says.

    ``{"models", "reference": true}`` builds the models. ``{"models", "jobs", "cells": [{"paths", "way",
    "scratch", "runs": [{"model", "tensor_parallel", "start"}]}]}`` runs cells, ``jobs`` at a time, and
    leaves each one's ``answer.json`` in its ``scratch`` folder; the way ``other`` is the one that the matrix
    does not pick.
    """
    request = json.loads(Path(path).read_text())
    if request.get("reference"):
        make_models(Path(request["models"]))
        return
    sys.path.insert(0, str(TOOLS))
    import_vllm()
    running: set[int] = set()
    for cell in request["cells"]:
        while len(running) >= request["jobs"]:
            running.discard(os.wait()[0])
        child = os.fork()
        if child == 0:
            try:
                run_cell(request, cell)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(0)
        running.add(child)
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    main(sys.argv[1])
