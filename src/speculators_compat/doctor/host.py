"""SC73x: limits of the host, and environment variables that change what a run does."""

from __future__ import annotations

import difflib
import os
import re
import resource
import shutil

from ..handover import PREFIX, SHARED_MEMORY
from .base import Outcome, Unavailable, check, failed, ok, warning
from .context import Context, size
from .memory import cgroup_limit, mem_available

#: Below this vLLM's own queues and a small batch do not fit; docker gives 64 MiB unless told otherwise.
_SHM_LEAST = 2**30
_LAUNCHER = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "MASTER_ADDR",
    "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "PMIX_RANK",
    "ACCELERATE_USE_DEEPSPEED",
)  # fmt: skip
_SIZE = re.compile(r"-?\d+[kKmMgG]?")
_LEVEL = re.compile(r"LOC|NVL|PIX|PXB|PXN|P2C|PHB|SYS|[0-5]", re.IGNORECASE)


def _words(text: str) -> list[str]:
    return text.split()


#: NCCL's variables; a pattern for the value where only some are understood.
_NCCL: dict[str, re.Pattern[str] | None] = {
    "NCCL_DEBUG": re.compile(r"VERSION|WARN|INFO|TRACE|ABORT|NONE", re.IGNORECASE),
    "NCCL_P2P_LEVEL": _LEVEL,
    "NCCL_NET_GDR_LEVEL": _LEVEL,
    "NCCL_ALGO": re.compile(
        r"[\^]?(\w+:)?[\^]?(Tree|Ring|CollnetDirect|CollnetChain|NVLS|NVLSTree|PAT)([,;].*)?", re.IGNORECASE
    ),
    "NCCL_PROTO": re.compile(r"[\^]?(\w+:)?[\^]?(LL|LL128|Simple)([,;].*)?", re.IGNORECASE),
    **dict.fromkeys(
        _words("""NCCL_P2P_DISABLE NCCL_SHM_DISABLE NCCL_IB_DISABLE NCCL_NVLS_ENABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE
        NCCL_P2P_DIRECT_DISABLE NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE_PARALLEL NCCL_CHECK_POINTERS
        NCCL_NET_SHARED_BUFFERS NCCL_IB_ADAPTIVE_ROUTING NCCL_GRAPH_REGISTER NCCL_LOCAL_REGISTER
        NCCL_IGNORE_DISABLED_P2P NCCL_PXN_DISABLE NCCL_COLLNET_ENABLE NCCL_MNNVL_ENABLE"""),
        re.compile(r"-?[0-2]"),
    ),
    **dict.fromkeys(
        _words("""NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MAX_NCHANNELS NCCL_MIN_NCHANNELS NCCL_MAX_CTAS NCCL_MIN_CTAS
        NCCL_NSOCKS_PERTHREAD NCCL_SOCKET_NTHREADS NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX NCCL_IB_SL
        NCCL_IB_TC NCCL_IB_QPS_PER_CONNECTION NCCL_NCHANNELS_PER_NET_PEER NCCL_P2P_NVL_CHUNKSIZE
        NCCL_P2P_PCI_CHUNKSIZE NCCL_P2P_NET_CHUNKSIZE NCCL_LL_BUFFSIZE NCCL_LL128_BUFFSIZE NCCL_CROSS_NIC
        NCCL_WORK_FIFO_BYTES NCCL_CHUNK_SIZE NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS
        NCCL_CGA_CLUSTER_SIZE"""),
        _SIZE,
    ),
    **dict.fromkeys(
        _words("""NCCL_SOCKET_IFNAME NCCL_SOCKET_FAMILY NCCL_IB_HCA NCCL_NET NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN NCCL_TUNER_CONFIG_PATH
        NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE NCCL_DEBUG_FILE NCCL_DEBUG_SUBSYS
        NCCL_COMM_ID NCCL_CONF_FILE NCCL_HOSTID NCCL_COMM_BLOCKING NCCL_LAUNCH_MODE NCCL_SET_STACK_SIZE
        NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_ROCE_VERSION_NUM NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_CUDA_SUPPORT
        NCCL_IB_ADDR_FAMILY NCCL_IB_ADDR_RANGE NCCL_IB_AR_THRESHOLD NCCL_IB_USE_INLINE NCCL_IB_FIFO_TC
        NCCL_IB_MERGE_VFS NCCL_IB_MERGE_NICS NCCL_IB_RETURN_ASYNC_EVENTS NCCL_IB_ECE_ENABLE NCCL_IB_WARN_RAIL_LOCAL
        NCCL_IB_OOO_RQ NCCL_IB_DATA_DIRECT NCCL_OOB_NET_ENABLE NCCL_OOB_NET_IFNAME NCCL_UID_STAGGER_RATE
        NCCL_UID_STAGGER_THRESHOLD NCCL_NET_GDR_READ NCCL_NET_GDR_C2C NCCL_NET_MERGE_LEVEL NCCL_NET_FORCE_MERGE
        NCCL_NET_DISABLE_INTRA NCCL_NET_OVERHEAD NCCL_NET_OPTIONAL_RECV_COMPLETION NCCL_NVB_DISABLE
        NCCL_NVLSTREE_MAX_CHUNKSIZE NCCL_NVLS_CHUNKSIZE NCCL_NVLS_NCHANNELS NCCL_NVLINK_UTIL_CENTRIC_SCHED_ENABLE
        NCCL_P2P_PXN_LEVEL NCCL_P2P_USE_CUDA_MEMCPY NCCL_P2P_READ_ENABLE NCCL_P2P_LL_THRESHOLD NCCL_P2P_BATCH_ENABLE
        NCCL_P2P_SCHEDULE_GROUP_SIZE NCCL_SHM_USE_CUDA_MEMCPY NCCL_SHM_MEMCPY_MODE NCCL_SHM_LOCALITY
        NCCL_DMABUF_ENABLE NCCL_GDRCOPY_ENABLE NCCL_GDRCOPY_SYNC_ENABLE NCCL_GDRCOPY_FLUSH_ENABLE NCCL_GDR_FLUSH_DISABLE
        NCCL_LL128_NTHREADS NCCL_LL128_C2C NCCL_MAX_NRINGS NCCL_MIN_NRINGS NCCL_MAX_CTA NCCL_CTA_POLICY NCCL_RINGS
        NCCL_SINGLE_RING_THRESHOLD NCCL_TREE_THRESHOLD NCCL_PROGRESS_APPENDOP_FREQ NCCL_PROXY_APPEND_BATCH_SIZE
        NCCL_PROXY_CPUSET NCCL_PROXY_DUMP_SIGNAL NCCL_CREATE_THREAD_CONTEXT NCCL_WARN_ENABLE_DEBUG_INFO
        NCCL_PROFILER_PLUGIN NCCL_PROFILE_EVENT_MASK NCCL_RUNTIME_CONNECT NCCL_RAS_ENABLE NCCL_RAS_ADDR
        NCCL_RAS_TIMEOUT_FACTOR NCCL_SINGLE_PROC_MEM_REG_ENABLE NCCL_LEGACY_CUDA_REGISTER NCCL_LOCAL_REGISTER_CACHE
        NCCL_MEM_SYNC_DOMAIN NCCL_MNNVL_UUID NCCL_MNNVL_CLIQUE_ID NCCL_NTHREADS_PER_BLOCK NCCL_NVTX_DISABLE
        NCCL_OVERRIDE_CUBLAS_GEMM NCCL_SYM_CTAS NCCL_SYM_KERNEL NCCL_WIN_ENABLE NCCL_WIN_STRIDE NCCL_DEV_OVERRIDE
        NCCL_SOCKET_RETRY_CNT NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_SOCKET_POLL_TIMEOUT_MSEC NCCL_SOCKET_INLINE
        NCCL_SOCKET_MIN_TASKSIZE NCCL_DEBUG_TIMESTAMP_FORMAT NCCL_DEBUG_TIMESTAMP_LEVELS NCCL_ENABLE_VERSION_CHECK
        NCCL_LIBRARY NCCL_VERSION NCCL_HOME NCCL_ROOT NCCL_ROOT_DIR NCCL_LIB_DIR NCCL_INCLUDE_DIR
        NCCL_ASYNC_ERROR_HANDLING NCCL_BLOCKING_WAIT NCCL_DESYNC_DEBUG NCCL_TIMEOUT NCCL_SO_PATH""")
    ),
}


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
    stale = [
        p.name
        for p in SHARED_MEMORY.glob(f"{PREFIX}*")
        if (owner := p.name[len(PREFIX) :].partition("-")[0]).isdigit()
        and not os.path.exists(f"/proc/{owner}")
    ]
    folders = "1 folder" if len(stale) == 1 else f"{len(stale)} folders"
    left = f"; {folders} of killed runs, which the next run removes" if stale else ""
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
            why="shards, sockets and shared memory are all open files; beyond the limit a worker dies at the load",
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
        try:
            options = context.options
            need += min(options.batch_size, 32) * options.max_seq_len * context.bytes_per_token
        except Unavailable:
            pass
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
        if name not in _NCCL:
            near = difflib.get_close_matches(name, _NCCL, n=1, cutoff=0.8)
            problems.append(f"{name} is not known to NCCL" + (f" ({near[0]}?)" if near else ""))
            mends.append(f"unset {name}")
            continue
        pattern = _NCCL[name]
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
