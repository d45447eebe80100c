"""Extraction on a GPU, compared with an independent capture of the same engine and with float32 transformers.

usage: python tools/gpu_conformance.py MODEL [DTYPE]      prints one line "CONFORMANCE {json}"

MODEL is a tiny model with real weights (llama, mistral; the others' heads are too small for MLA's kernels), or a shape of
benchmarks/throughput.py with dummy weights (kimi-k2.5-layers: the real dimensions, so the real MLA kernels run).

The independent capture is written anew here: hooks on every decoder layer, found by name, that keep what the layers
returned and the positions they were given; prompts are told apart by their lengths. Nothing of the plugin's capture,
hand-over or ordering is used, and the same forward passes are seen, so the two must be equal bit for bit.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks")]
# Functions are sent to the worker to hook the model there.
os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"


def watch(model: Any) -> int:
    """In the worker: record (layer, positions, state) of every decoder layer call."""
    record: list[Any] = []
    count = 0
    for name, module in model.named_modules():
        match = re.search(r"(?:^|\.)layers\.(\d+)$", name)
        if match and type(module).__name__.endswith("DecoderLayer"):

            def hook(
                module: Any, args: Any, kwargs: Any, output: Any, layer: int = int(match.group(1))
            ) -> None:
                positions = kwargs["positions"] if "positions" in kwargs else args[0]
                state = output[0] + output[1] if output[1] is not None else output[0].clone()
                record.append((layer, positions.clone().cpu(), state.cpu()))

            module.register_forward_hook(hook, with_kwargs=True)
            count += 1
    model._watched = record
    return count


def watched(model: Any) -> bytes:
    """In the worker: what was recorded, as torch.save writes it (vLLM's own encoding knows tensors at the top only)."""
    import io

    import torch

    out = io.BytesIO()
    torch.save(model._watched, out)
    return out.getvalue()


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


def main() -> None:
    name, dtype = sys.argv[1], (sys.argv[2:] or ["float32"])[0]
    import throughput
    import torch

    import speculators_compat

    shape = throughput.SHAPES.get(name)
    vllm_args: dict[str, Any] = {"dtype": dtype} | ({"load_format": "dummy"} if shape else {})
    speculators_compat.configure(vllm_args=vllm_args)
    from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

    rng = random.Random(0)
    vocab = shape["vocab_size"] if shape else 512
    lengths = rng.sample(range(2, 200), 40)
    prompts = [[rng.randrange(5, vocab) for _ in range(n)] for n in lengths]
    with tempfile.TemporaryDirectory() as folder:
        if shape:
            throughput.make_model(name, Path(folder))
        else:  # in a process of its own: vLLM forks its engine, and a forked process cannot use torch's threads again
            subprocess.run([sys.executable, ROOT / "examples" / "tiny_models.py", name, folder], check=True)
        layers = [3, 1, 4, 1]
        generator = VllmHiddenStatesGenerator(folder, layer_ids=layers, max_model_len=256, gpu_memory_utilization=0.4)
        try:
            generator.llm.apply_model(watch)
            results = generator.generate(prompts)
            record = torch.load(io.BytesIO(generator.llm.apply_model(watched)[0]), weights_only=True)
            session = generator.session
        finally:
            generator.shutdown()
        own = by_length(record, layers)
        unequal = sum(
            not got.equal(want)
            for result, length in zip(results, lengths, strict=True)
            for got, want in zip(result["hidden_states"], own[length], strict=True)
        )
        row: dict[str, Any] = {
            "model": name, "class": session.report["model"], "path": session.report["path"], "dtype": dtype,
            "runner": session.report["runner"], "unequal_to_own_capture": unequal, "states": len(prompts) * len(layers),
            "alignment": session.alignment.to_dict(), "way": speculators_compat.status().way,
            "in_order": all(r["input_ids"].tolist() == p for r, p in zip(results, prompts, strict=True)),
            "versions": {p: version(p) for p in ("vllm", "torch", "transformers", "speculators")},
            "date": time.strftime("%Y-%m-%d"),
        }  # fmt: skip
        row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        if not shape:
            import tiny_models

            reference = tiny_models.reference_hidden_states(folder, prompts, layers)
            row["relative_error_to_transformers_float32"] = max(
                ((got.float() - want).norm() / want.norm()).item()
                for result, expected in zip(results, reference, strict=True)
                for got, want in zip(result["hidden_states"], expected, strict=True)
            )
    print("CONFORMANCE " + json.dumps(row, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
