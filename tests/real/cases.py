"""What is extracted in the real tests, and how it is written down."""

from __future__ import annotations

import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

from vllm_env import ROOT, SPECULATORS, VLLM, VllmEnv

RUNNER = Path(__file__).parent / "runner.py"
EVIDENCE = ROOT / "evidence" / "real_extraction.json"
KINDS = ("llama", "deepseek_v3", "kimi_k25")
WAYS = ("in-process", "engine")
#: What a run's generator is given, and the batches that go through it. "chunked" has prompts longer than a step.
SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {"layers": [3, 1, 4, 1], "batches": ["1", "14", "40", "14 again"]},
    "chunked": {
        "layers": None,  # speculators' own choice
        "batches": ["1", "14 mixed", "40"],
        "vllm_args": {"max_num_batched_tokens": 64},
    },
}
#: Name to the constructor's arguments that differ.
BAD_STARTS: dict[str, dict[str, Any]] = {
    "layer id out of range": {"layer_ids": [0, 6]},
    "negative layer id": {"layer_ids": [-1]},
    "no layer ids": {"layer_ids": []},
    "unknown vLLM argument": {"vllm_args": {"dtyp": "float32"}},
    "pipeline parallel": {"vllm_args": {"pipeline_parallel_size": 2}},
    "value that vLLM refuses": {"vllm_args": {"dtype": "float31"}},
    "broken checkpoint": {},
}
BAD_PROMPTS: dict[str, Any] = {
    "no prompts": [],
    "empty prompt": [[5], []],
    "token outside the vocabulary": [[5, 512]],
    "negative token": [[-1]],
    "text": ["abc"],
    "fractions": [[1.5]],
    "an image": [[5], {"prompt_token_ids": [5], "multi_modal_data": {"image": "cat.png"}}],
}


def jobs(speculators: str, way: str) -> list[dict[str, Any]]:
    """All runs of one process."""
    runs: list[dict[str, Any]] = [
        {"id": f"{kind} tp{tp} {name}", "kind": kind, "tp": tp, **schedule}
        for kind in KINDS
        for tp in (1, 2)
        for name, schedule in SCHEDULES.items()
    ]
    bf16 = {"layers": [0, 1, 2], "batches": ["40"], "vllm_args": {"dtype": "bfloat16"}}
    runs.append({"id": "kimi_k25 tp1 bf16", "kind": "kimi_k25_bf16", "tp": 1, **bf16})
    rough = {
        "bad_starts": BAD_STARTS,
        "bad_prompts": BAD_PROMPTS,
        "interrupt": True,
        "tensor_input": True,
        "too_long": True,
    }
    # A "spawned" run starts vLLM's processes as vLLM itself does on a CPU, so that the workers import everything anew.
    runs.append({"id": "rough", "kind": "llama", "tp": 1, **SCHEDULES["plain"], **rough})
    if speculators == SPECULATORS[-1]:
        runs[-1]["start"] = "spawn"
        runs.append({"id": "spawned", "start": "spawn", "kind": "kimi_k25", "tp": 2, **SCHEDULES["chunked"]})
    elif way == "in-process":
        runs.append({"id": "spawned", "start": "spawn", "kind": "llama", "tp": 1, **SCHEDULES["plain"]})
    return runs


def run_job(
    env: VllmEnv, folder: Path, job: dict[str, Any], name: str, **variables: str
) -> tuple[dict[str, Any], str]:
    """Have the runner do a job; returns its answer and its log."""
    request, answer = folder / f"{name}.job.json", folder / f"{name}.answer.json"
    request.write_text(json.dumps({"models": str(folder), **job}))
    speculators = variables.pop("speculators", SPECULATORS[-1])
    done = env.run(RUNNER, request, answer, speculators=speculators, timeout=1800, **variables)
    (folder / f"{name}.log").write_text(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    return json.loads(answer.read_text()), done.stdout


def write_evidence(env: VllmEnv, answers: dict[tuple[str, str], dict[str, Any]]) -> None:
    """Write down what was measured, one case a line."""
    code = (
        "import json; from speculators_compat.detect import detect_all; "
        "print(json.dumps({n: str(i.version) for n, i in detect_all().items()}))"
    )
    versions = json.loads(env.run("-c", code, SPECULATORS_COMPAT="0").stdout)
    del versions["speculators"]
    former = json.loads(EVIDENCE.read_text()) if EVIDENCE.exists() else {}
    # What this session has not run stays, where it was run on the same packages.
    kept = former["cases"] if former.get("versions") == versions else []
    cases = [case for case in kept if (case["speculators"], case["way"]) not in answers]
    for (speculators, way), answer in sorted(answers.items()):
        for run in jobs(speculators, way):
            found = answer["runs"][run["id"]]
            if "error" in found:
                continue
            for name, batch in found["batches"].items():
                cases.append(
                    {
                        "speculators": speculators,
                        "way": way,
                        "run": run["id"],
                        "start": run.get("start", "fork"),
                        "model": found["report"]["model"],
                        "path": found["report"]["path"],
                        "tensor_parallel": run["tp"],
                        "token_budget": run.get("vllm_args", {}).get("max_num_batched_tokens", 8192),
                        "layers": found["layers"],
                        "batch": name,
                        "dtype": batch["dtype"].removeprefix("torch."),
                        "largest_relative_error": float(f"{batch['largest']:.2e}"),
                        "median_relative_token_error": float(f"{batch['median_token']:.2e}"),
                    }
                )
    head = {
        "what": "states that real vLLM gave, against a float32 transformers forward of the same tiny weights",
        "made by": "UPDATE_EVIDENCE=1 .envs/dev/bin/python -m pytest tests/real/test_extraction.py",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}, Python {sys.version.split()[0]}",
        "versions": versions,
    }
    assert versions["vllm"] == VLLM
    cases.sort(key=lambda case: (case["speculators"], case["way"]))
    lines = ",\n".join(json.dumps(case) for case in cases)
    EVIDENCE.parent.mkdir(exist_ok=True)
    EVIDENCE.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "cases": [\n{lines}\n]}}\n')
