"""Runs in a vLLM environment: makes real generators, extracts, compares, and writes what came out as JSON.

    python runner.py JOB.json ANSWER.json

A job is ``{"models": FOLDER, "runs": [RUN, ...]}`` or ``{"models": FOLDER, "reference": true}``. Importing vLLM takes
longer than all the rest, so every run is forked from one process that has imported it. vLLM's own processes are forked
likewise, except in runs with ``"start": "spawn"``, which is what vLLM does on a CPU by itself.
"""

import speculators_compat  # isort: skip

import importlib
import json
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import time
import traceback
from pathlib import Path

# Before torch is imported: a process whose OpenMP threads run cannot fork one that uses OpenMP.
os.environ["OMP_NUM_THREADS"] = "1"
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
#: Plain torch code instead of vLLM's CPU kernels, some of which are wrong on a host without AVX-512, and no rounding.
EXACT = {"dtype": "float32", "compilation_config": {"custom_ops": ["none"]}}
MAX_MODEL_LEN = 256
SHORT, LONG = 40, 4
#: A run that takes longer hangs.
LIMIT_S = 150
#: Imported late by vLLM and transformers; imported once here, where they exist, to save every fork the time.
PRELOAD = (
    "psutil",
    "safetensors.torch",
    "torch._dynamo",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.deepseek_v3.configuration_deepseek_v3",
    "transformers.models.llama.configuration_llama",
    "transformers.models.llama.tokenization_llama_fast",
    "vllm.entrypoints.llm",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.kimi_k25",
    "vllm.model_executor.models.llama",
    "vllm.v1.engine.core",
    "vllm.v1.engine.core_client",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
)


def prompts():
    """40 prompts that fit one step of the default budget together, and 4 that no step of a small budget holds."""
    draw = random.Random(2)
    lengths = [draw.randrange(1, 60) for _ in range(SHORT)] + [draw.randrange(140, 250) for _ in range(LONG)]
    return [[draw.randrange(8, 500) for _ in range(length)] for length in lengths]


def batch(name):
    """Indices of the prompts of a named batch."""
    return {
        "1": [17],
        "14": list(range(14)),
        "14 again": list(range(14)),
        "14 mixed": [*range(3), SHORT, *range(3, 6), SHORT + 1, SHORT + 2, *range(6, 10), SHORT + 3],
        "40": list(range(SHORT)),
    }[name]


def bind(tp):
    """Each rank's CPUs, for a host of any size."""
    cpus = sorted(os.sched_getaffinity(0))
    ranks = [cpus[rank::tp] or cpus for rank in range(tp)]
    return "|".join(",".join(map(str, rank)) for rank in ranks)


def processes():
    """Process ids of all living descendants of this process."""
    import psutil

    # multiprocessing's resource tracker belongs to this process, not to an engine, and ends with it.
    return [
        p.pid
        for p in psutil.Process().children(recursive=True)
        if p.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(p.cmdline())
    ]


def depots():
    from speculators_compat import handover

    return [str(p) for p in handover.SHARED_MEMORY.glob(f"{handover.PREFIX}{os.getpid()}-*")]


def settle():
    """What is left of an engine some seconds after its end."""
    deadline = time.monotonic() + 20
    while (left := processes()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return {"processes": left, "depots": depots()}


def compare(results, asked, references, layers):
    """Errors over all samples and layers.

    Returns:
        ``largest``: largest error relative to the largest value of the sample's reference; ``median_token``: median of
        the tokens' relative L2 errors, of the worst layer.
    """
    import torch

    assert len(results) == len(asked)
    largest, tokens = 0.0, [[] for _ in layers]
    for result, index in zip(results, asked, strict=True):
        assert result["input_ids"].tolist() == references["prompts"][index], f"prompt {index} is not in its place"
        assert result["loss_mask"] is None
        assert len(result["hidden_states"]) == len(layers)
        for got, layer, errors in zip(result["hidden_states"], layers, tokens, strict=True):
            wanted = references["states"][index][layer]
            assert got.shape == wanted.shape
            assert got.device.type == "cpu"
            difference = got.double() - wanted.double()
            assert torch.isfinite(difference).all()
            largest = max(largest, (difference.abs().max() / wanted.abs().max()).item())
            errors.extend((difference.norm(dim=1) / wanted.double().norm(dim=1)).tolist())
    return {"largest": largest, "median_token": max(statistics.median(errors) for errors in tokens)}


def make_reference(models):
    import tiny_models
    import torch
    from safetensors.torch import load_file, save_file

    for kind, build in tiny_models.KINDS.items():
        build(models / kind)
    # In bf16 what the capture adds is to be seen, not what rounding the weights does: weights that bf16 holds exactly.
    shutil.copytree(models / "kimi_k25", models / "kimi_k25_bf16")
    path = models / "kimi_k25_bf16" / "model.safetensors"
    rounded = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    for kind in (*tiny_models.KINDS, "kimi_k25_bf16"):
        config = json.loads((models / kind / "config.json").read_text())
        layers = range(config.get("text_config", config)["num_hidden_layers"])
        states = tiny_models.reference_hidden_states(models / kind, prompts(), list(layers))
        torch.save({"prompts": prompts(), "states": states}, models / f"{kind}.pt")


def refused(action):
    """The error of an action that must be refused."""
    try:
        action()
    except Exception as error:
        return {
            "type": type(error).__name__,
            "id": getattr(error, "id", None),
            "value_error": isinstance(error, ValueError),
            "text": str(error),
        }
    return {"type": None, "id": None, "value_error": False, "text": "no error"}


def one_run(run, models):
    """Make a generator and do what the run asks of it."""
    import torch
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = bind(run["tp"])
    exact = {**EXACT, **run.get("vllm_args", {})}
    speculators_compat.configure(vllm_args=exact)

    def make(**other):
        arguments = {
            "model_path": str(models / run["kind"]),
            "layer_ids": run.get("layers"),
            "max_model_len": MAX_MODEL_LEN,
            "gpu_memory_utilization": 0.3,
            "tensor_parallel_size": run["tp"],
            **other,
        }
        return VllmHiddenStatesGenerator(**arguments)

    answer = {"batches": {}, "refused": {}}
    for name, other in run.get("bad_starts", {}).items():
        if name == "broken checkpoint":
            other = {"model_path": str(models / "broken")}
        vllm_args = other.pop("vllm_args", {})
        speculators_compat.configure(vllm_args={**exact, **vllm_args})
        answer["refused"][name] = {**refused(lambda other=other: make(**other)), "left": settle()}
    speculators_compat.configure(vllm_args=exact)

    references = torch.load(models / f"{run['kind']}.pt", weights_only=True)
    started = time.monotonic()
    generator = make()
    answer["start_s"] = round(time.monotonic() - started, 1)
    answer["report"] = generator.session.report
    layers = generator.layer_ids
    answer["layers"] = layers
    kept = []
    for name in run["batches"]:
        asked = batch(name)
        started = time.monotonic()
        results = generator.generate([references["prompts"][i] for i in asked])
        kept.append((results, asked))
        tokens = sum(len(references["prompts"][i]) for i in asked)
        answer["batches"][name] = {
            **compare(results, asked, references, layers),
            "dtype": str(results[0]["hidden_states"][0].dtype),
            "tokens_per_s": round(tokens / (time.monotonic() - started)),
        }
    for name, bad in run.get("bad_prompts", {}).items():
        answer["refused"][name] = refused(lambda bad=bad: generator.generate(bad))
        asked = batch("1")
        good = generator.generate([references["prompts"][i] for i in asked])
        answer["refused"][name]["afterwards"] = compare(good, asked, references, layers)
    if run.get("interrupt"):
        answer["interrupt"] = interrupted(generator, references, layers)
    if run.get("tensor_input"):
        same = [references["prompts"][SHORT][:5], references["prompts"][SHORT + 1][:5]]
        as_lists, as_tensor = generator.generate(same), generator.generate(torch.tensor(same))
        # Not bit by bit: the engine may take the two prompts in one step or in two, and rounds differently then.
        answer["tensor_input"] = all(
            a.shape == b.shape and (a - b).abs().max() <= 1e-5 * a.abs().max()
            for one, other in zip(as_lists, as_tensor, strict=True)
            for a, b in zip(one["hidden_states"], other["hidden_states"], strict=True)
        )
    if run.get("too_long"):
        (cut,) = generator.generate([[9] * (MAX_MODEL_LEN + 50)])
        answer["too_long"] = [len(cut["input_ids"]), *(s.shape[0] for s in cut["hidden_states"])]
    answer["held"] = depots()
    generator.shutdown()
    generator.shutdown()  # twice is as good as once
    answer["refused"]["after shutdown"] = refused(lambda: generator.generate([[9]]))
    # Results live in memory that is used again: later calls, and the end of the engine, must not have changed them.
    answer["kept"] = max(compare(*pair, references, layers)["largest"] for pair in kept)
    answer["left"] = settle()
    return answer


def interrupted(generator, references, layers):
    """Ctrl-C in the middle of a call, then a call that must be right."""
    collect, asked = generator.session.collect, batch("40")

    def interrupt(ids):
        collect(ids)
        raise KeyboardInterrupt

    generator.session.collect = interrupt
    try:
        generator.generate([references["prompts"][i] for i in asked])
    except KeyboardInterrupt:
        raised = True
    else:
        raised = False
    generator.session.collect = collect
    results = generator.generate([references["prompts"][i] for i in asked])
    return {"raised": raised, **compare(results, asked, references, layers)}


def break_checkpoint(models):
    """A checkpoint that a worker fails to load: one weight has another shape."""
    from safetensors.torch import load_file, save_file

    broken = models / "broken"
    shutil.copytree(models / "llama", broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:7].clone()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})


def main(job_path, answer_path):
    sys.path.insert(0, str(EXAMPLES))
    job = json.loads(Path(job_path).read_text())
    models = Path(job["models"])
    if job.get("reference"):
        make_reference(models)
        break_checkpoint(models)
        Path(answer_path).write_text("{}")
        return
    importlib.import_module("speculators.data_generation.vllm_hidden_states_generator")
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except Exception:
            print(f"not preloaded: {name}")
    status = speculators_compat.status()
    found = {
        "runs": {},
        "row": status.row,
        "way": status.way,
        "adapters": {a.id: str(a.state) for a in status.adapters},
    }
    for run in job["runs"]:
        answer = forked(run, models)
        if str(answer.get("error", "")).startswith("killed after"):
            # vLLM's own fork of a process with threads can hang; the way users start it does not.
            answer = forked({**run, "start": "spawn"}, models)
        found["runs"][run["id"]] = answer
        Path(answer_path).write_text(json.dumps(found, indent=1))


def forked(run, models):
    """Do one run in a process of its own."""
    path = models / f"answer-{os.getpid()}.json"
    child = os.fork()
    if not child:
        try:
            if run.get("start") != "spawn":
                real = multiprocessing.get_context
                multiprocessing.get_context = lambda method=None: real("fork")
            answer = one_run(run, models)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        path.write_text(json.dumps(answer))
        sys.stdout.flush()
        os._exit(0)
    deadline = time.monotonic() + LIMIT_S
    while not os.waitpid(child, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            import psutil

            for process in [*psutil.Process(child).children(recursive=True), psutil.Process(child)]:
                process.kill()
            os.waitpid(child, 0)
            return {"error": f"killed after {LIMIT_S} s"}
        time.sleep(0.05)
    answer = json.loads(path.read_text()) if path.exists() else {"error": "the process died"}
    path.unlink(missing_ok=True)
    return answer


if __name__ == "__main__":  # vLLM's workers import this file again
    main(*sys.argv[1:])
