"""SC71x: does the run fit - parallel sizes, layer ids, lengths, device memory, and who holds it now."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..handover import SHARED_MEMORY, size_class
from ..layer_ids import trainer_format
from . import gpu
from .base import Outcome, Unavailable, check, failed, ok, skipped, warning
from .context import Context, size

#: vLLM pads the vocabulary to a multiple of this before it is split.
_VOCAB_PADDING = 64
#: What the driver and NCCL take beside everything else, roughly; vLLM does not count it.
_OVERHEAD = 1.2 * 2**30
#: vLLM keeps this many requests in flight, as the generator asks it to.
_MAX_SEQS = 32


def in_flight(context: Context) -> int:
    """The most prompts of a batch that are computed before the first is handed over."""
    given = context.options.vllm_args.get("max_num_seqs")
    return min(context.options.batch_size, given if isinstance(given, int) and given > 0 else _MAX_SEQS)


@check("SC710", "memory", "tensor parallel")
def tensor_parallel(context: Context) -> Outcome:
    tp, facts = context.options.tp, context.facts
    if tp == 1:
        return ok("1: nothing is split")
    expert_parallel = bool(context.options.vllm_args.get("enable_expert_parallel"))
    odd: list[str] = []

    def divides(what: str, number: int | None, by: int = tp) -> None:
        if number and number % by:
            odd.append(f"{what} {number} by {by}")

    divides("heads", facts.heads)
    kv = facts.kv_heads
    if kv and not facts.is_mla:
        if kv >= tp:
            divides("KV heads", kv)
        elif tp % kv:
            odd.append(f"{tp} ranks by {kv} KV heads")
    if facts.vocab_size:
        padded = -(-facts.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
        divides("padded vocabulary", padded)
    block = facts.weight_block or 1
    pieces = []
    for name, label in (
        ("intermediate_size", "MLP width"),
        ("moe_intermediate_size", "expert width"),
        ("shared_expert_intermediate_size", "shared expert width"),
    ):
        width = facts.text.get(name)
        if not isinstance(width, int) or (expert_parallel and name == "moe_intermediate_size"):
            continue
        if facts.experts is None and name != "intermediate_size":
            continue
        divides(label, width)
        # Of a model with both, only the experts are quantized in most checkpoints: others are not refused
        # for it.
        concerned = name == "moe_intermediate_size" or facts.text.get("moe_intermediate_size") is None
        if block > 1 and concerned and width % tp == 0 and (width // tp) % block:
            pieces.append(f"{label} {width} / {tp} = {width // tp} by the quantization's block {block}")
    if expert_parallel:
        divides("experts", facts.experts)
    if odd or pieces:
        good = [n for n in (1, 2, 4, 8, 16) if n < tp and not (facts.heads or n) % n]
        return failed(
            "not divisible: " + "; ".join(odd + pieces),
            expected=f"sizes that divide by the tensor parallel size {tp}",
            why="vLLM stops while it builds the model, after its workers have started",
            mend=f"--tp {good[-1] if good else 1}",
        )
    kept = f"; each KV head is kept {tp // kv} times" if kv and kv < tp and not facts.is_mla else ""
    return ok(f"{tp}: heads, KV heads, experts and vocabulary divide{kept}")


@check("SC711", "memory", "pipeline parallel")
def pipeline_parallel(context: Context) -> Outcome:
    pp = context.options.pp
    if pp == 1:
        return ok("1: every rank sees every layer")
    return failed(
        f"--pp {pp}",
        expected="1",
        why="each pipeline rank sees its own decoder layers only, and states of the others would be "
        "missing (SC404)",
        mend=f"--pp 1 --tp {context.options.tp * pp}",
    )


@check("SC712", "memory", "GPUs")
def gpus(context: Context) -> Outcome:
    if not context.on_cpu and isinstance(context._gpus, gpu.Hangs):
        return failed(
            str(context._gpus),
            expected="an answer within a second",
            why="a driver that hangs will hang vLLM's workers as well",
            mend="nvidia-smi -L; then look for Xid errors with: dmesg | grep -i xid",
        )
    found, need = context.gpus, context.options.tp * context.options.pp
    if len(found) < need and context.options.vllm_args.get("distributed_executor_backend") == "ray":
        return skipped(f"{len(found)} visible here, {need} needed in the Ray cluster (SC871)")
    if len(found) < need:
        setting = os.environ.get("CUDA_VISIBLE_DEVICES")
        limit = f" (CUDA_VISIBLE_DEVICES={setting})" if setting is not None else ""
        return failed(
            f"{len(found)} visible{limit}, {need} needed",
            expected=f"{need} GPUs for --tp {context.options.tp}"
            + (f" --pp {context.options.pp}" if context.options.pp > 1 else ""),
            why="vLLM stops when its workers choose their devices",
            mend="unset CUDA_VISIBLE_DEVICES" if setting is not None else f"--tp {max(1, len(found))}",
        )
    kinds = sorted({f"{g.name} {size(g.total)}" for g in found})
    return ok(f"{len(found)} visible: {', '.join(kinds)}")


@check("SC713", "memory", "GPU memory now")
def held(context: Context) -> Outcome:
    need = context.options.tp * context.options.pp
    found = context.gpus[:need]
    try:
        holders = gpu.processes(found)
    except (Unavailable, gpu.Hangs):
        holders = []
    share = context.options.gpu_memory_utilization
    short = [g for g in found if g.free < share * g.total]
    who = "; ".join(f"pid {p.pid} on GPU {p.gpu}: {size(p.used)}, {p.command}" for p in holders[:4])
    pids = " ".join(str(p) for p in dict.fromkeys(h.pid for h in holders))
    if short:
        first = min(short, key=lambda g: g.free / g.total)
        return failed(
            f"GPU {first.index}: {size(first.free)} of {size(first.total)} free"
            + (f"; {who}" if who else ""),
            expected=f"{size(share * first.total)} free for --gpu-memory-utilization {share:g}",
            why="vLLM refuses to start with less; what a crashed run left behind holds it for ever",
            mend=f"kill {pids}   (if they are yours and dead)"
            if pids
            else "nvidia-smi; end what holds the memory",
        )
    if holders:
        return warning(
            who,
            expected="no other process on these GPUs",
            why="there is room for both now, but what they take later is missing then",
            mend=f"kill {pids}   (if they are yours and dead)",
        )
    least = min((g.free for g in found), default=0)
    return ok(f"no process on them, at least {size(least)} free")


@check("SC714", "memory", "fits")
def fits(context: Context) -> Outcome:
    hidden, options = context.shape[1], context.options
    capture = context.captured_layers * context.token_budget * hidden * context.state_bytes
    weights: float | None
    try:
        weights = context.weight_bytes / (options.tp * options.pp)
    except Unavailable as reason:
        if context.on_cpu:
            return skipped(f"not compared with the host's memory: {reason}")
        weights = None
    activations = _activations(context)
    per_token = _kv_bytes(context)
    parts = [
        f"weights {size(weights)}" if weights is not None else "weights unknown",
        f"activations about {size(activations)}",
        f"capture {size(capture)}",
        f"KV cache {size(per_token * context.max_model_len)} a prompt",
    ]
    numbers = "a GPU: " + ", ".join(parts)
    if context.on_cpu:
        return _fits_host(context, weights or 0, per_token)
    try:
        found = context.gpus[: options.tp * options.pp]
    except Unavailable as reason:
        return skipped(f"{numbers}. Not compared: {reason}")
    if not found:
        return skipped(f"{numbers}. Not compared: no GPU is visible")
    least = min(found, key=lambda g: g.total)
    budget = options.gpu_memory_utilization * least.total
    outside = least.total - budget - _OVERHEAD
    if weights is not None:
        room = budget - weights - activations
        tokens = int(room / per_token) if per_token else 0
        if room < per_token * context.max_model_len:
            more = min(0.95, (weights + activations + per_token * context.max_model_len) / least.total + 0.02)
            enough = (weights + activations) < 0.93 * least.total
            return failed(
                f"{numbers}; {size(budget)} of {size(least.total)} may be used",
                expected="room for the weights, one step's activations and the KV cache of one prompt",
                why="vLLM would stop after the load, when it sizes the KV cache",
                mend=f"--gpu-memory-utilization {more:.2f}"
                if enough
                else f"--tp {options.tp * 2}, or a quantized checkpoint",
            )
        numbers += f"; KV cache for {tokens:,} tokens"
    if capture > outside:
        lower = max(0.1, (least.total - _OVERHEAD - capture) / least.total - 0.01)
        return failed(
            f"{numbers}; {size(max(0, outside))} are left outside vLLM's share",
            expected=f"{size(capture)} outside it for the capture buffers, and {size(_OVERHEAD)} for the "
            "driver",
            why="vLLM fills its share with KV cache; the first step would run out of memory",
            mend=f"--gpu-memory-utilization {lower:.2f}",
        )
    return ok(numbers)


def _fits_host(context: Context, weights: float, per_token: float) -> Outcome:
    """On a CPU everything is host memory; each rank has its share of the weights there."""
    available = mem_available()
    setting = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    kv = float(setting) * 2**30 if setting.replace(".", "", 1).isdigit() else 4 * 2**30
    ranks = context.options.tp
    text = (
        f"weights {size(weights * ranks)}, KV cache {size(kv * ranks)}, {size(available)} of memory available"
    )
    if (weights + kv) * ranks > available:
        return failed(
            text,
            expected="room for both",
            why="the kernel ends processes when memory runs out, without a message",
            mend="export VLLM_CPU_KVCACHE_SPACE=1"
            if kv > 2**30
            else "a host with more memory, or a smaller model",
        )
    if 0 < kv < per_token * context.max_model_len:
        return failed(
            f"KV cache {size(kv)}, one prompt of {context.options.max_seq_len} tokens needs "
            f"{size(per_token * context.max_model_len)}",
            expected="room for one prompt",
            why="vLLM stops when it sizes the KV cache",
            mend=f"export VLLM_CPU_KVCACHE_SPACE={int(per_token * context.max_model_len / 2**30) + 1}",
        )
    return ok(text)


def _activations(context: Context) -> float:
    """One step's intermediate values on one rank, about; vLLM measures them when it starts."""
    facts, tp, tokens = context.facts, context.options.tp, context.token_budget
    hidden = context.shape[1]
    text = facts.text
    wide = text.get("intermediate_size")
    inner = (
        max((wide if isinstance(wide, int) else 4 * hidden), 3 * (facts.heads or 1) * (facts.head_dim or 64))
        / tp
    )
    values = tokens * (4 * hidden + 3 * inner)
    expert, chosen = text.get("moe_intermediate_size"), text.get("num_experts_per_tok")
    if facts.experts and isinstance(expert, int) and isinstance(chosen, int):
        values += tokens * chosen * (hidden + 3 * expert / tp)
    return values * context.state_bytes


def _kv_bytes(context: Context) -> float:
    """KV cache of one token on one rank; of a hybrid model, as if every layer had one."""
    facts, tp = context.facts, context.options.tp
    layers = context.shape[0] / context.options.pp
    width = 1 if "fp8" in str(context.options.vllm_args.get("kv_cache_dtype", "")) else context.state_bytes
    if facts.is_mla and not (context.on_cpu or os.environ.get("VLLM_MLA_DISABLE") == "1"):
        rope = facts.text.get("qk_rope_head_dim")
        return float(
            layers * (int(facts.text["kv_lora_rank"]) + (rope if isinstance(rope, int) else 64)) * width
        )
    heads = max(1, (facts.kv_heads or 1) // tp)
    return float(layers * 2 * heads * (facts.head_dim or 128) * width)


@check("SC715", "memory", "shared memory")
def shared_memory(context: Context) -> Outcome:
    options = context.options
    batch = size_class(options.max_seq_len * context.bytes_per_token) * in_flight(context)
    one_step = max(options.max_seq_len, min(context.token_budget, options.max_seq_len * options.batch_size))
    step = size_class(one_step * context.bytes_per_token)
    text = f"{size(batch)} for {in_flight(context)} prompts of {options.max_seq_len} tokens"
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return skipped(f"{text}; {SHARED_MEMORY} is looked at by SC730")
    text += f", {size(free)} free in {SHARED_MEMORY}"
    gib = -(-batch * 2 // 2**30)
    fitting = max(1, int(free * 0.8 / max(1, size_class(options.max_seq_len * context.bytes_per_token))))
    if 256 * 2**20 <= free < step:
        return failed(
            text,
            expected=f"at least {size(step)}, the states of one step",
            why="captured states are handed over there; the first batch would end with SC504",
            mend=f"docker run --shm-size={gib}g ..., or --batch-size {min(fitting, options.batch_size)}",
        )
    if free < batch:
        return warning(
            text,
            expected="room for the states of all prompts in flight, at their longest",
            why="a batch of long prompts could end with SC504"
            if free >= 256 * 2**20
            else "the temporary folder is used instead, which is slower",
            mend=f"docker run --shm-size={gib}g ..., or --batch-size {min(fitting, options.batch_size)}",
        )
    return ok(text)


@check("SC716", "memory", "layer ids")
def layer_ids(context: Context) -> Outcome:
    layers, _ = context.shape
    given = context.options.layer_ids
    ids = context.layer_ids
    wrong = [k for k in ids if not 0 <= k < layers]
    if wrong:
        if given is None:
            return failed(
                f"the default ids {ids} do not fit a model of {layers} layers",
                expected="ids that exist",
                why="the generator stops before the load (SC406)",
                mend=f"--layer-ids 0 {layers - 1}",
            )
        boundary = "; EAGLE-3 counts boundaries, boundary k is id k - 1 here" if layers in wrong else ""
        boundaries = layers in wrong and all(1 <= k <= layers for k in ids)
        # Numbers only where they are meant for sure: ids that were brought into range would be other layers.
        mend = f"--layer-ids {' '.join(str(k - 1) for k in ids)}" if boundaries else f"the last layer is {layers - 1}"
        return failed(
            f"{' '.join(map(str, wrong))} of {layers} layers",
            expected=f"ids from 0 to {layers - 1}",
            why=f"the generator stops before the load (SC406){boundary}",
            mend=mend,
        )
    if len(set(ids)) < len(ids):
        unique = " ".join(str(k) for k in dict.fromkeys(ids))
        return warning(
            f"{' '.join(map(str, ids))} names layers twice",
            expected="each layer once",
            why="each is written as often as it is named",
            mend=f"--layer-ids {unique}",
        )
    by = "" if given is not None else " (speculators' default)"
    newer = given is not None and trainer_format(context.installed("speculators").version) == "safetensors"
    flag = " (the example script: --layer-convention after-layer)" if newer else ""
    return ok(f"{' '.join(map(str, ids))} of {layers}{by}: the states that leave these layers{flag}")


@check("SC717", "memory", "sequence length")
def length(context: Context) -> Outcome:
    limit, wanted = context.facts.max_positions, context.options.max_seq_len
    if limit is None:
        return skipped("config.json names no longest sequence")
    if context.max_model_len > limit:
        return failed(
            f"--max-seq-len {wanted}, and the model ends at {limit} tokens",
            expected=f"at most {limit - 1}: one place is for the token that is sampled",
            why="vLLM refuses a max_model_len beyond the model's",
            mend=f"--max-seq-len {limit - 1}",
        )
    return ok(f"{wanted} of {limit} tokens")


def mem_available() -> int:
    """Host memory that can be had without swapping, in bytes, within this control group."""
    available = 2**63
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    limit = cgroup_limit()
    return min(available, limit[0] - limit[1]) if limit is not None else available


def cgroup_limit() -> tuple[int, int] | None:
    """Limit and present use of memory in this control group, in bytes; ``None`` without a limit."""
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            text = Path(folder, limit).read_text().strip()
            if text.isdigit() and int(text) < 2**60:
                cache = re.search(
                    r"^(?:total_)?inactive_file (\d+)", Path(folder, "memory.stat").read_text(), re.MULTILINE
                )
                return int(text), int(Path(folder, used).read_text()) - (int(cache.group(1)) if cache else 0)
        except (OSError, ValueError):
            continue
    return None
