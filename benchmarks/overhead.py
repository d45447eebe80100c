"""What the plugin costs a process: its import, ``compat-check``, and activation. Whole processes, medians.

usage: python benchmarks/overhead.py [--environments .envs/vllm-0.16.0 ...] [--speculators FOLDER ...] [--runs 21]

Needs the standard library only. Each environment holds vLLM and the plugin; for each there is a FOLDER with an unpacked
speculators, which must be importable there without the plugin. Elapsed time is what a user waits; processor time (of user
and system) says what is due to the program where others work on the machine, too. The commands take turns, so that a
machine that gets slower does so for all.

python                  the interpreter's own start, contained in every other line
import                  import speculators_compat
compat-check            without arguments
speculators             import speculators, the plugin switched off
speculators, activated  import speculators_compat, speculators
activation              what activate() and its import hooks take of the line before, measured in the process, as the
                        difference of two imports of torch says little: one full garbage collection more or less, which
                        a few objects decide, is 0.2 s there. It counts, too, what a hook imports first and speculators
                        would have imported anyway.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Adds up the time in activation's entry points, outermost calls only; answers with elapsed and processor seconds.
ACTIVATION = """
import json, os, time
os.environ["SPECULATORS_COMPAT"] = "0"
import speculators_compat
from speculators_compat import activation, importing, serving
spent, depth = [0.0, 0.0], 0

def timed(function):
    def run(*args, **kwargs):
        global depth
        depth += 1
        began = time.perf_counter(), time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            depth -= 1
            if not depth:
                spent[0] += time.perf_counter() - began[0]
                spent[1] += time.process_time() - began[1]
    return run

for owner, name in ((activation, "_imported"), (importing._Door, "open"), (serving, "_arrived")):
    setattr(owner, name, timed(getattr(owner, name)))
del os.environ["SPECULATORS_COMPAT"]
timed(activation.activate)()
import speculators
assert speculators_compat.status().way
print("SPENT" + json.dumps(spent))
"""
#: Elapsed milliseconds that are aimed at.
GOALS = {"import": 60, "compat-check": 500, "activation": 100}
#: These import torch.
SLOW = ("speculators", "speculators, activated", "activation")


def commands(environment: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    python = str(environment / "bin" / "python")
    off = {"SPECULATORS_COMPAT": "0"}
    return {
        "python": ([python, "-c", "pass"], {}),
        "import": ([python, "-c", "import speculators_compat"], {}),
        "compat-check": ([str(environment / "bin" / "compat-check")], {}),
        "speculators": ([python, "-c", "import speculators"], off),
        "speculators, activated": ([python, "-c", "import speculators_compat, speculators"], {}),
        "activation": ([python, "-c", ACTIVATION], {}),
    }


def once(command: list[str], variables: dict[str, str]) -> tuple[float, float]:
    """Elapsed and processor time of one process, in milliseconds."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    told = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    elapsed = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 3):  # 3: compat-check of an untested combination
        raise SystemExit(f"{command} ended with {process.returncode}")
    if command[-1] == ACTIVATION:
        spent = json.loads(told.rpartition("SPENT")[2])
        return spent[0] * 1000, spent[1] * 1000
    return elapsed * 1000, (usage.ru_utime + usage.ru_stime) * 1000


def measure(environment: Path, speculators: Path, runs: int, slow_runs: int) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SPECULATORS_COMPAT", "PYTHON"))}
    kept["PYTHONPATH"] = str(speculators.resolve())
    told = subprocess.run(
        [environment / "bin" / "compat-check", "--json"], env=kept, capture_output=True, text=True, check=False
    )
    installed = json.loads(told.stdout)["installed"]
    times: dict[str, list[tuple[float, float]]] = {}
    for number in range(-1, runs):  # the first one warms the disk
        for name, (command, variables) in commands(environment).items():
            if number < (slow_runs if name in SLOW else runs) and (slow_runs or name not in SLOW):
                taken = once(command, kept | variables)
                if number >= 0:
                    times.setdefault(name, []).append(taken)
    rows = {}
    for name, taken_all in times.items():
        row: dict[str, Any] = {"runs": len(taken_all)}
        for unit, values in zip(("elapsed_ms", "processor_ms"), zip(*taken_all, strict=True), strict=True):
            row[unit] = round(statistics.median(values), 1)
            row[unit.replace("_ms", "_lowest_ms")] = round(min(values), 1)
        rows[name] = row
    return {"versions": {name: one["version"] for name, one in installed.items()}, "rows": rows}


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if "model name" in line), platform.machine())
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load": [round(x, 1) for x in os.getloadavg()],
    }


def show(result: dict[str, Any]) -> None:
    print(f"{result['date']}, {result['machine']}")
    for one in result["environments"]:
        print("\n" + ", ".join(f"{name} {version}" for name, version in one["versions"].items()))
        print(f"{'':24}{'elapsed':>12}{'processor':>12}{'goal':>10}")
        for name, row in one["rows"].items():
            goal = f"{GOALS[name]} ms" if name in GOALS else ""
            print(f"{name:24}{row['elapsed_ms']:>9.0f} ms{row['processor_ms']:>9.0f} ms{goal:>10}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    envs = ROOT / ".envs"
    add("--environments", nargs="+", type=Path, default=[envs / "vllm-0.16.0", envs / "vllm-0.32.0"])
    releases = envs / "speculators"
    add("--speculators", nargs="+", type=Path, default=[releases / "0.4.0.1", releases / "0.9.0"])
    add("--runs", type=int, default=21)
    add("--slow-runs", type=int, default=5, help="of those that import speculators, and so torch; 0: none")
    add("--out", type=Path, default=ROOT / "benchmarks" / "results" / "overhead.json")
    options = parser.parse_args()
    if not 0 <= options.slow_runs <= options.runs:
        parser.error("--slow-runs is not between 0 and --runs")
    result: dict[str, Any] = {"date": date.today().isoformat(), "machine": machine(), "environments": []}
    if len(options.environments) != len(options.speculators):
        parser.error("--environments and --speculators differ in number")
    for environment, speculators in zip(options.environments, options.speculators, strict=True):
        result["environments"].append(measure(environment, speculators, options.runs, options.slow_runs))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    show(result)


if __name__ == "__main__":
    main()
