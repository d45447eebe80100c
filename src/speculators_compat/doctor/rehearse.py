"""SC74x: the rehearsal, seen from the outside - prepares it, waits for it, and says what its failure
means.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import settings
from ..handover import sweep_stale
from .base import Outcome, Unavailable, check, failed, ok, skipped
from .context import Context, Unreadable, read_json
from .model import _largest_id
from .rehearsal_worker import REHEARSAL
from .shrink import CannotShrink, Plan, shrink, write_copy

#: Seconds after which a rehearsal is ended. On two busy cores it takes three minutes.
PATIENCE = 900.0
LONGEST = 200
MAX_MODEL_LEN = 256
_STAGES = {
    "import": ("SC741", "importing speculators' generator and vLLM"),
    "start": ("SC742", "starting the generator"),
    "generate": ("SC743", "generating"),
    "compare": ("SC744", "comparing with an independent capture"),
    "write": ("SC745", "writing the samples and reading them back"),
    "shutdown": ("SC746", "shutting down"),
}
#: What a failure's text tells about the adapter that deals with it; the first that is chosen here counts.
_SYMPTOMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"is_encoder_decoder|SchedulerConfig", ("scheduler_config", "engine")),
    (r"modeling_attn_mask_utils", ("transformers_mask_utils",)),
    (r"PydanticUndefinedAnnotation|name 'torch' is not defined", ("transformers_torch_name",)),
    (r"vllm\.utils\.hashing|get_hash_fn_by_name", ("hashing_module",)),
    (r"cannot import name .*kv_cache_utils", ("kv_cache_names",)),
    (r"eos_token_id", ("request", "engine")),
    (
        r"get_kv_cache_config_from_groups|kv_cache_specs|KV cache layout|kv_cache_groups_uniform",
        ("kv_cache", "engine"),
    ),
    (r"Scheduler.*block_size|hash_block_size", ("scheduler", "engine")),
    (
        r"mem_get_info|No CUDA|not compiled with CUDA|no NVIDIA driver|No available memory for the cache",
        ("device_memory", "engine"),
    ),
    (r"model weights|safetensors|\*\.bin|has no weights", ("vllm_arguments", "generation", "engine")),
    (r"trust_remote_code|AutoConfig|AutoTokenizer|num_hidden_layers", ("config_loading",)),
    (
        r"SupportsEagle3|supports_eagle3|EAGLE3|hidden state extraction",
        ("eagle3_protocol", "eagle3_allow_list", "generation", "engine"),
    ),
    (r"SC501|no attribute '(?:model|layers|language_model)'", ("layer_navigation",)),
    (
        r"not in the place|captured states|_(?:setup|reset)_capture|input_batch|sample_tokens|shutdown\(\)",
        ("generation", "engine"),
    ),
    (r"speculators_compat_setup", ("vllm_arguments", "engine")),
)


@dataclass(frozen=True)
class Job:
    """A rehearsal that was prepared."""

    plan: Plan
    folder: Path
    description: str
    environment: dict[str, str]


@check("SC740", "rehearsal", "rehearsal", also=[id for id, _ in _STAGES.values()])
def rehearsal(context: Context) -> Outcome:
    if context.options.model is None:
        return skipped("give --model")
    with tempfile.TemporaryDirectory(prefix="speculators-compat-rehearsal-") as name:
        folder = Path(name)
        try:
            job = prepare(context, folder)
        except (CannotShrink, OSError, Unreadable) as error:
            return failed(
                f"no small copy of the model can be made: {error}",
                expected="a config with layers, heads and a hidden size",
                why="the rehearsal needs one; nothing else was tried",
                mend="compat-check --model shows what is wrong with the config",
            )
        answer = run(job)
        return judge(answer, job, (folder / "log.txt").read_text(errors="replace"))


def prepare(context: Context, folder: Path) -> Job:
    """Write the small copy and the job."""
    options, facts = context.options, context.facts
    cpu = context.on_cpu or not _has_gpu(context)
    devices = len(os.sched_getaffinity(0)) if cpu else len(context.gpus)
    tp = max(1, min(options.tp, devices, 2 if cpu else options.tp))
    plan = shrink(context.config, tp=tp, cpu=cpu)
    model = folder / "model"
    supplied = write_copy(context.folder, model, plan)
    ids = sorted({min(k, plan.layers - 1) for k in _scaled(context, plan)})
    vllm_args = {**options.vllm_args, "load_format": "dummy"}
    if cpu:
        vllm_args["dtype"] = "float32"
        # Some of vLLM's CPU kernels are wrong on hosts without AVX-512: a prompt's states depend on its batch.
        vllm_args.setdefault("compilation_config", {"custom_ops": ["none"]})
        vllm_args.pop("quantization", None)
    for one_copy in ("pipeline_parallel_size", "data_parallel_size", "kv_cache_memory_bytes"):
        vllm_args.pop(one_copy, None)
    content = {
        "model": str(model),
        "scratch": str(folder),
        "answer": str(folder / "answer.json"),
        "layer_ids": ids,
        "layers": plan.layers,
        "hidden": plan.hidden,
        "path": facts.layer_path,
        "token_ids": _token_ids(context, plan),
        "longest": LONGEST,
        "max_model_len": MAX_MODEL_LEN,
        "gpu_memory_utilization": min(options.gpu_memory_utilization, 0.3),
        "tp": tp,
        "vllm_args": vllm_args,
    }
    (folder / "job.json").write_text(json.dumps(content))
    notes = [*plan.notes, *supplied]
    if tp != options.tp:
        notes.append(f"tensor parallel {tp} instead of {options.tp}")
    text = f"{plan.layers} of {facts.layers} layers, hidden {plan.hidden}, tensor parallel {tp}"
    return Job(plan, folder, "; ".join([text, *notes]), _environment(context, folder, cpu, tp))


def _has_gpu(context: Context) -> bool:
    try:
        return bool(context.gpus)
    except Unavailable:
        return False


def _scaled(context: Context, plan: Plan) -> list[int]:
    """Layer ids of the small copy: as spread as those of the run, the last one among them if it is there."""
    layers = context.shape[0]
    given = context.layer_ids
    return [max(0, round(k * (plan.layers - 1) / max(1, layers - 1))) for k in given if 0 <= k < layers] or [
        0
    ]


def _token_ids(context: Context, plan: Plan) -> list[int]:
    """Ordinary tokens: those that the tokenizer knows, without those that the config gives a meaning."""
    end = context.facts.vocab_size or 256
    with contextlib.suppress(Unreadable):
        largest = _largest_id(read_json(context.folder / "tokenizer.json"))
        end = min(end, largest + 1) if largest is not None else end
    special: set[int] = set()

    def collect(part: Mapping[str, Any]) -> None:
        for key, value in part.items():
            if isinstance(value, dict):
                collect(value)
            elif "token" in key:
                special.update(
                    v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int)
                )

    collect(plan.config)
    usable = [k for k in range(min(end, 4096)) if k not in special]
    return usable[len(usable) // 16 :] or [0]


def _environment(context: Context, folder: Path, cpu: bool, tp: int) -> dict[str, str]:
    environment = dict(os.environ)
    if path := environment.get("PYTHONPATH"):  # it starts in another folder
        environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep) if part)
    environment.update(
        {
            REHEARSAL: "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the witness is a function, sent to the workers
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": str(folder / "modules"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
    )
    if cpu:
        environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
        # Compiling single operations takes 20 s, and changes nothing that is looked at.
        environment.setdefault("TORCHDYNAMO_DISABLE", "1")
        if context.facts.is_mla:
            environment.setdefault("VLLM_MLA_DISABLE", "1")
        if tp > 1:
            cores = sorted(os.sched_getaffinity(0))
            bind = "|".join(",".join(map(str, cores[rank::tp])) for rank in range(tp))
            environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", bind)
    return environment


def run(job: Job) -> dict[str, Any]:
    """Run the rehearsal in a process group of its own, and end whatever is left of it."""
    command = [sys.executable, "-m", f"{__package__}.rehearsal_child", str(job.folder / "job.json")]
    with open(job.folder / "log.txt", "wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=job.environment,
            cwd=job.folder,
            start_new_session=True,
        )
        late = False
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            sweep_stale()
    try:
        answer: dict[str, Any] = json.loads((job.folder / "answer.json").read_text())
    except (OSError, ValueError):
        answer = {"stage": "import"}
    if answer["stage"] != "done" and "error" not in answer:
        text = (
            f"still running after {PATIENCE:.0f} s"
            if late
            else f"the process died (status {process.returncode})"
        )
        answer["error"] = {"type": "", "text": text, "id": None, "trace": ""}
    return answer


def judge(answer: dict[str, Any], job: Job, log: str) -> Outcome:
    """What the rehearsal's answer means for the real run."""
    if answer["stage"] == "done":
        report, seconds = answer.get("report", {}), sum(answer["seconds"].values())
        return ok(
            f"{report.get('model', 'the model')} at {report.get('path', answer.get('place'))}: "
            f"{job.description}; "
            f"40 prompts, written and read back, largest error {answer['error_found']:.0e} against an "
            "independent "
            f"capture, nothing left behind; {seconds:.0f} s"
        )
    id, doing = _STAGES[answer["stage"]]
    error = answer["error"]
    reason = root_cause(error, log)
    adapter = concerned([reason, error["text"], error["trace"]], answer.get("adapters", {}))
    where = f" Adapter concerned: {adapter}." if adapter else ""
    if settings.without():
        where += f" Switched off: {', '.join(settings.without())}."
    outcome = failed(
        f"{doing}: {reason}.{where} (small copy: {job.description})",
        expected="the small copy of the model to go the whole way",
        why="the real run goes the same way and would fail in the same place, after the load",
        mend=_remedy(adapter, error.get("id")),
    )
    keep_log(job)
    return Outcome(outcome.status, outcome.found, outcome.expected, outcome.why, outcome.mend, id)


def keep_log(job: Job) -> None:
    """Keep the log of a failure where the user can read it."""
    with contextlib.suppress(OSError):
        shutil.copyfile(
            job.folder / "log.txt", Path(tempfile.gettempdir()) / "speculators-compat-rehearsal.log"
        )


def _remedy(adapter: str | None, id: str | None) -> str:
    without = settings.without()
    if settings.switched_off():
        return f"unset {settings.OFF_SWITCH}"
    if without:
        return f"unset {settings.WITHOUT}"
    log = f"the log is {Path(tempfile.gettempdir()) / 'speculators-compat-rehearsal.log'}"
    if adapter:
        return f"compat-check --explain {adapter}; {log}"
    return f"compat-check --explain {id}; {log}" if id else f"compat-check shows the versions; {log}"


def root_cause(error: Mapping[str, Any], log: str) -> str:
    """The exception that was at the bottom of it: often it was raised in another process, and only the
    log has it.
    """
    text = str(error["text"]).strip()
    if error.get("id"):
        found = re.search(r"found: +(.+)", text)
        return f"[{error['id']}] {found.group(1) if found else text.splitlines()[0]}"[:400]
    first = f"{error['type']}: {text}" if error["type"] not in ("", "Wrong") else text
    vague = (
        "EngineCore",
        "Engine core",
        "EngineDead",
        "WorkerProc initialization",
        "Worker failed",
        "the process died",
        "RuntimeError: Executor failed",
    )
    if any(word in first for word in vague):
        causes = [
            line
            for line in re.findall(r"((?:\w+\.)*\w*(?:Error|Exception|Annotation|Interrupt): .+)", log)
            if not any(word in line for word in vague)
        ]
        if causes:
            return f"{causes[-1][:300]} (in a process of vLLM's)"
        tail = [line for line in log.strip().splitlines() if line.strip()]
        return f"{first}; last said: {tail[-1][-200:]}" if tail else first
    return " ".join(first.split())[:400]


def concerned(texts: Sequence[str], states: Mapping[str, str]) -> str | None:
    """The adapter that deals with such a failure.

    Args:
        texts: what the failure says, the most telling first.
        states: the adapters of this run.
    """
    without = settings.without()
    named = re.search(r"adapter (\w+)", texts[0])
    if named and named.group(1) in states:
        return named.group(1)
    shown = [adapters for text in texts for pattern, adapters in _SYMPTOMS if re.search(pattern, text)]
    for chosen in (without, states, tuple(a for _, adapters in _SYMPTOMS for a in adapters)):
        for adapters in shown:
            hit = next((adapter for adapter in adapters if adapter in chosen), None)
            if hit is not None:
                return hit
    return None
