"""SC73x: limits of the host, and environment variables that change what a run does."""

from __future__ import annotations

import contextlib
import difflib
import os
import resource
import shutil

from ..handover import SHARED_MEMORY, stale
from .base import Outcome, Unavailable, check, failed, ok, warning
from .context import Context, size
from .memory import cgroup_limit, in_flight, mem_available
from .nccl import VARIABLES

#: Below this vLLM's own queues and a small batch do not fit; docker gives 64 MiB unless told otherwise.
_SHM_LEAST = 2**30
_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK",
    "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE",
    "PMIX_RANK", "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip


@check("SC730", "host", "/dev/shm")
def shm(context: Context) -> Outcome:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        return failed(
            f"{SHARED_MEMORY}: {error.strerror or error}",
            expected="shared memory mounted there",
            why="vLLM's workers and the hand-over of states talk through it",
            mend="docker run --shm-size=16g ..., or: mount -t tmpfs tmpfs /dev/shm",
        )
    count = len(stale(SHARED_MEMORY))
    folders = "1 folder" if count == 1 else f"{count} folders"
    left = f"; {folders} of killed runs, which the next run removes" if count else ""
    text = f"{size(usage.free)} free of {size(usage.total)}{left}"
    if not os.access(SHARED_MEMORY, os.W_OK):
        return failed(
            f"{SHARED_MEMORY} can't be written to",
            expected="shared memory that every user can write to",
            why="vLLM's workers and the hand-over of states talk through it",
            mend=f"chmod 1777 {SHARED_MEMORY}",
        )
    if usage.free < _SHM_LEAST:
        return warning(
            text,
            expected=f"at least {size(_SHM_LEAST)} free",
            why="with less, states go through the temporary folder, which is slower, and NCCL may stop",
            mend="docker run --shm-size=16g ..., or: mount -o remount,size=16g /dev/shm",
        )
    return ok(text)


@check("SC731", "host", "open files")
def open_files(context: Context) -> Outcome:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shards = 0
    if context.options.model is not None:
        try:
            shards = len(context.weights.headers)
        except Exception:  # what is wrong with them is for SC703 to say
            shards = 0
    need = max(1024, 512 + 2 * shards)
    if 0 <= soft < need:
        return warning(
            f"a limit of {soft}",
            expected=f"at least {need}",
            why="shards, sockets and shared memory are all open files; beyond the limit a worker dies at "
            "the load",
            mend=f"ulimit -n {min(65536, hard) if hard > 0 else 65536}",
        )
    return ok(f"limit {'none' if soft < 0 else soft}")


@check("SC732", "host", "host memory")
def memory_limits(context: Context) -> Outcome:
    available = mem_available()
    limit = cgroup_limit()
    address, _ = resource.getrlimit(resource.RLIMIT_AS)
    text = f"{size(available)} available" + (
        f" (a limit of {size(limit[0])} for this container)" if limit else ""
    )
    if address >= 0:
        return failed(
            f"address space limited to {size(address)}",
            expected="no limit",
            why="CUDA and mapped weights reserve far more addresses than memory; the load would stop",
            mend="ulimit -v unlimited",
        )
    need = 4 * 2**30
    if context.options.model is not None:
        with contextlib.suppress(Unavailable):
            need += in_flight(context) * context.options.max_seq_len * context.bytes_per_token
    if available < need:
        return warning(
            text,
            expected=f"about {size(need)}: the Python processes, and the states of one batch",
            why="the kernel ends processes when memory runs out, without a message",
            mend="a smaller --batch-size, or end what holds the memory: ps aux --sort=-rss | head",
        )
    return ok(text)


@check("SC733", "host", "start of workers")
def start_method(context: Context) -> Outcome:
    name = "VLLM_WORKER_MULTIPROC_METHOD"
    value = os.environ.get(name)
    if value is not None and value not in ("spawn", "fork", "forkserver"):
        return failed(
            f"{name}={value}",
            expected="spawn or fork",
            why="vLLM stops while it reads its settings",
            mend=f"export {name}=spawn",
        )
    if value == "fork" and not context.on_cpu:
        return warning(
            f"{name}=fork",
            expected="spawn on a host with GPUs",
            why="a forked worker can't use CUDA once the parent has touched it, and hangs with threads",
            mend=f"export {name}=spawn",
        )
    said = value or "vLLM's choice"
    return ok(f'{said}; with spawn the script needs: if __name__ == "__main__"')


@check("SC734", "host", "launcher variables")
def launcher(context: Context) -> Outcome:
    found = {name: os.environ[name] for name in _LAUNCHER if name in os.environ}
    if not found:
        return ok("none set")
    text = ", ".join(f"{name}={value}" for name, value in list(found.items())[:6])
    many = any(
        found.get(name, "1").isdigit() and int(found.get(name, "1")) > 1
        for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")
    ) or found.get("RANK", "0") not in ("0", "")
    how = failed if many else warning
    return how(
        text,
        expected="none of them: vLLM starts its own workers",
        why="vLLM's workers take them for their own ranks and addresses, and tensor parallel waits for ever"
        if many
        else "left by a launcher such as torchrun; vLLM's workers may take them for their own",
        mend=f"unset {' '.join(found)}",
    )


@check("SC735", "host", "NCCL variables")
def nccl(context: Context) -> Outcome:
    found = {n: v for n, v in sorted(os.environ.items()) if n.startswith("NCCL_")}
    problems: list[str] = []
    mends: list[str] = []
    for name, value in found.items():
        if name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.8)
            problems.append(f"{name} is not known to NCCL" + (f" ({near[0]}?)" if near else ""))
            mends.append(f"unset {name}")
            continue
        pattern = VARIABLES[name]
        if pattern is not None and not pattern.fullmatch(value.strip()):
            problems.append(f"{name}={value} is no value that NCCL knows")
            mends.append(f"unset {name}")
    ranks = context.options.tp * context.options.pp
    if found.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE") and ranks > 1:
        problems.append(f"NCCL_DEBUG={found['NCCL_DEBUG']} with {ranks} workers")
        mends.append("export NCCL_DEBUG=WARN")
    if found.get("NCCL_BLOCKING_WAIT") == "1":
        problems.append("NCCL_BLOCKING_WAIT=1 is for debugging")
        mends.append("unset NCCL_BLOCKING_WAIT")
    if problems:
        return warning(
            "; ".join(problems),
            expected="names and values that NCCL knows",
            why="NCCL ignores what it does not know without a word; INFO prints thousands of lines a worker",
            mend="; ".join(mends),
        )
    return ok(", ".join(f"{n}={v}" for n, v in found.items()) or "none set")


@check("SC736", "host", "vLLM variables")
def vllm_variables(context: Context) -> Outcome:
    found = {n: v for n, v in sorted(os.environ.items()) if n.startswith("VLLM_")}
    try:
        known = context.vllm.variables
    except Unavailable:
        known = frozenset()
    problems: list[tuple[str, str, str]] = []  # what, why, mend
    for name, value in found.items():
        if name == "VLLM_USE_V1" and value.strip().lower() in ("0", "false"):
            problems.append(("VLLM_USE_V1=0", "capture is made for the V1 engine", "unset VLLM_USE_V1"))
        elif name == "VLLM_USE_V2_MODEL_RUNNER":
            problems.append(
                (
                    f"{name}={value}",
                    "it overrides the model runner that vLLM picks for this model",
                    f"unset {name}",
                )
            )
        elif known and name not in known and not name.startswith(("VLLM_ASCEND_", "VLLM_PLUGIN")):
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            problems.append(
                (
                    f"{name} is not known to this vLLM" + (f" ({near[0]}?)" if near else ""),
                    "it has no effect",
                    f"unset {name}",
                )
            )
    if problems:
        return warning(
            "; ".join(what for what, _, _ in problems),
            expected="variables that this vLLM knows, and its own choice of engine",
            why="; ".join(dict.fromkeys(why for _, why, _ in problems)),
            mend="; ".join(mend for _, _, mend in problems),
        )
    text = ", ".join(f"{n}={v}" for n, v in found.items()) or "none set"
    if "VLLM_PLUGINS" in found:
        text += " (this package adds itself to VLLM_PLUGINS)"
    return ok(text)
