#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Spread an extraction over a Ray cluster: one engine a shard, failed ones are started again, all are merged.

    ray start --head                                  # on the other machines: ray start --address=HEAD:6379
    python ray_extract.py --num-gpus 8 --model-path MODEL --prepared-data prompts.jsonl --output-dir states --tp-size 8

Takes what extract_hidden_states.py takes, and runs that script once for each shard, in a process of its own. All
machines must see the script, the model, the data and --output-dir under the same paths. A shard whose process, Ray
worker or machine dies is started again and goes on where it stopped. In the end --output-dir holds what one run without
Ray would have made, and logs/ what each process has printed; repeating the command computes only what is missing.

Exit status: 0 done, 1 error, 2 usage, 130 ended by Ctrl-C.
"""

import speculators_compat  # noqa: F401 - before speculators  # isort: skip

import argparse
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import extract_hidden_states as extraction

from speculators_compat import dataio, shards
from speculators_compat.errors import CompatError

SCRIPT = Path(extraction.__file__).resolve()
#: Variables of this process that the shards' processes get too.
PASSED_ON = ("SPECULATORS_COMPAT", "VLLM_", "HF_", "HUGGING_FACE_", "NCCL_", "TRANSFORMERS_", "PYTHONPATH", "LD_PRELOAD")
#: A shard whose former process still holds its folder is tried again, so long in seconds. It may have to shut down vLLM.
PATIENCE = 300.0
#: What a second attempt only repeats: errors in what the caller gave, the data, the folder; states that fail their proof.
PERMANENT = re.compile(r"\[(SC[1-3]\d\d|SC4\d\d|SC60[1-6]|SC85[0-8])\]|^(unproved): ", re.MULTILINE)
BUSY = "[SC607]"
PR_SET_PDEATHSIG = 1


@dataclass
class Outcome:
    """How an attempt ended; ``status`` is the process's exit status, ``None`` if Ray lost it."""

    status: int | None
    said: str = ""
    seconds: float = 0.0
    node: str = ""


@dataclass
class Job:
    """A shard and its attempts."""

    shard: shards.Shard
    retries: int = 0
    busy_since: float | None = None
    after: float = 0.0
    attempts: list[dict[str, Any]] = field(default_factory=list)


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0],
        epilog="All other options are those of extract_hidden_states.py.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--address", help="of the Ray cluster (default: the running one, else a new one on this machine)")
    add("--shards", type=int, help="parts of the data (default: as many engines as the cluster holds at once)")
    add("--num-gpus", type=float, help="GPUs of an engine (default: --tp-size); 0 on CPUs")
    add("--num-cpus", type=float, default=1, help="CPUs of an engine, as Ray counts them (default: 1)")
    add("--max-retries", type=int, default=3, help="starts of a shard after the first one (default: 3)")
    own, rest = parser.parse_known_args(argv)
    args = extraction.parse(rest)  # ends with a message where an option is wrong
    if args.shard is not None:
        parser.error("--shard: the shards are made here; give their number as --shards")
    if (own.shards is not None and own.shards < 1) or own.max_retries < 0:
        parser.error("--shards must be 1 or more, --max-retries 0 or more")
    if own.num_gpus is None:
        own.num_gpus = args.tp_size
    return own, args, rest


# -------------------------------------------------------------------------------- what runs on the cluster's machines


def run_shard(arguments: list[str], environment: dict[str, str], log: str, script: str) -> Outcome:
    """Run the extraction of a shard in a process of its own, which ends when this one does."""
    began, parent = time.monotonic(), os.getpid()
    libc = ctypes.CDLL(None)

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before
            os._exit(1)

    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        # A session of its own: its workers can be found by it even when it has died and they have not.
        process = subprocess.Popen(
            [sys.executable, script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=tie,
        )
        try:
            status = process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
    with open(log, "rb") as out:
        out.seek(max(0, os.path.getsize(log) - 4000))
        said = out.read().decode(errors="replace")
    return Outcome(status, said, time.monotonic() - began, os.uname().nodename)


def missing_paths(paths: list[str]) -> list[str]:
    """Which of these this machine does not see."""
    return [path for path in paths if not os.path.exists(path)]


# --------------------------------------------------------------------------------------------------------- the driver


def drive(
    jobs: list[Job],
    submit: Callable[[Job], Any],
    wait: Callable[[list[Any], float | None], tuple[Any, Outcome] | None],
    max_retries: int,
    *,
    clock: Callable[[], float] = time.monotonic,
    tell: Callable[[str], object] = lambda text: print(text, file=sys.stderr, flush=True),
) -> list[Job]:
    """Run all shards, and those that fail again.

    Args:
        submit: start a shard's next attempt; returns a handle.
        wait: the first of these handles to end and its outcome; ``None`` if none does in so many seconds.

    Returns:
        The shards that failed for good.
    """
    waiting, running, failed = list(jobs), {}, []
    while waiting or running:
        for job in [job for job in waiting if job.after <= clock()]:
            waiting.remove(job)
            running[submit(job)] = job
        soonest = min((job.after for job in waiting), default=None)
        ended = wait(list(running), None if soonest is None else max(0.1, soonest - clock()))
        if ended is None:
            continue
        handle, outcome = ended
        job = running.pop(handle)
        lines = [line for line in outcome.said.splitlines() if line.strip()]
        last = next((line for line in reversed(lines) if line.startswith("[SC")), "".join(lines[-1:]))
        facts = {"status": outcome.status, "seconds": round(outcome.seconds, 1), "node": outcome.node}
        job.attempts.append({**facts, "last": last[:300]})
        if outcome.status == 0:
            tell(f"shard {job.shard}: done in {outcome.seconds:.0f} s on {outcome.node}")
            continue
        if BUSY in outcome.said and outcome.status == 1:
            job.busy_since = job.busy_since or clock()
            if clock() - job.busy_since < PATIENCE:
                job.after = clock() + 5
                waiting.append(job)
                continue
        job.busy_since = None
        how = "lost" if outcome.status is None else f"ended with status {outcome.status}"
        cause = PERMANENT.search(outcome.said)
        if outcome.status == 2 or cause or job.retries >= max_retries:
            tell(f"shard {job.shard}: {how}, given up{f' ({cause[1] or cause[2]})' if cause else ''}")
            failed.append(job)
            continue
        job.retries += 1
        job.after = clock() + min(2.0**job.retries, 60)
        tell(f"shard {job.shard}: {how}, started again ({job.retries} of {max_retries})")
        waiting.append(job)
    return failed


def start_ray(address: str | None) -> Any:
    try:
        import ray
    except ImportError as error:
        raise CompatError(
            "SC860",
            found=f"ray can't be imported: {error}",
            expected="ray in this environment, on all machines in the same version",
            why="it starts the shards on the cluster's machines",
            mend="pip install 'speculators-compat[ray]'; or use --shard I/N of extract_hidden_states.py without it",
        ) from None
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING, ignore_reinit_error=True)
    return ray


def room(nodes: list[dict[str, Any]], gpus: float, cpus: float) -> dict[str, int]:
    """How many engines each machine holds, by Ray's node id.

    Raises:
        CompatError: SC861 if there is none that holds one.
    """
    places = {}
    for node in nodes:
        has = node.get("Resources", {})
        wanted = [(has.get(name, 0), need) for name, need in (("GPU", gpus), ("CPU", cpus)) if need]
        count = min((int(there / need) for there, need in wanted), default=1)
        if node.get("Alive") and count > 0:
            places[node["NodeID"]] = count
    if not places:
        each = [node.get("Resources", {}) for node in nodes]
        there = [f"{has.get('GPU', 0):g} GPUs, {has.get('CPU', 0):g} CPUs" for has in each]
        raise CompatError(
            "SC861",
            found=f"machines with {'; '.join(there) or 'nothing'}",
            expected=f"one with {gpus:g} GPUs and {cpus:g} CPUs free for Ray",
            why="Ray would wait for ever",
            mend="add machines, or ask for less: --num-gpus (0 on CPUs), --num-cpus, --tp-size",
        )
    return places


def check_folders(ray: Any, places: dict[str, int], args: argparse.Namespace) -> None:
    """Make sure that all machines see the same folder (SC862)."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    mark = Path(args.output_dir).resolve() / f".seen-{os.getpid()}"
    paths = [str(mark), str(SCRIPT), os.path.abspath(args.prepared_data)]
    paths += [os.path.abspath(args.model_path)] if os.path.isdir(args.model_path) else []
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise dataio._write_error(mark.parent, 0, error) from error
    try:
        asked = {}
        for node in places:
            strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            task = ray.remote(num_cpus=0)(missing_paths)
            asked[node] = task.options(scheduling_strategy=strategy).remote(paths)
        blind = {node: missing for node, ref in asked.items() if (missing := ray.get(ref))}
    finally:
        mark.unlink(missing_ok=True)
    if blind:
        node, missing = next(iter(blind.items()))
        shown = str(mark.parent) if missing[0] == str(mark) else missing[0]
        raise CompatError(
            "SC862",
            found=f"{len(blind)} of {len(places)} machines do not see {shown} (node {node[:8]} is one)",
            expected="script, model, data and --output-dir under the same paths on all machines",
            why="shards would fail there, or write where nobody looks",
            mend="put them on a file system that all machines share",
        )


def extract(argv: list[str] | None) -> int:
    own, args, rest = parse(argv)
    out = Path(args.output_dir).resolve()
    dataio.check_data_file(args.prepared_data)
    ray = start_ray(own.address)
    places = room(ray.nodes(), own.num_gpus, own.num_cpus)
    check_folders(ray, places, args)
    count = own.shards or sum(places.values())
    print(f"{count} shards on {len(places)} machines, {sum(places.values())} at a time", file=sys.stderr)
    environment = {k: v for k, v in os.environ.items() if k.startswith(PASSED_ON) and k != "SPECULATORS_COMPAT_ACTIVE"}
    # Retries are this driver's: Ray would count a killed process as one of its own, and say nothing.
    task = ray.remote(num_gpus=own.num_gpus, num_cpus=own.num_cpus, max_retries=0)(run_shard)
    jobs = [Job(shards.Shard(index, count)) for index in range(count)]
    absolute = ["--output-dir", str(out), "--prepared-data", os.path.abspath(args.prepared_data)]
    absolute += ["--model-path", os.path.abspath(args.model_path)] if os.path.isdir(args.model_path) else []

    def submit(job: Job) -> Any:
        log = out / "logs" / f"{job.shard.folder}.{len(job.attempts) + 1}.log"
        return task.remote([*rest, *absolute, "--shard", str(job.shard)], environment, str(log), str(SCRIPT))

    def wait(handles: list[Any], seconds: float | None) -> tuple[Any, Outcome] | None:
        if not handles:
            time.sleep(seconds or 0)
            return None
        ready, _ = ray.wait(handles, num_returns=1, timeout=seconds)
        if not ready:
            return None
        try:
            return ready[0], ray.get(ready[0])
        except ray.exceptions.RayError as error:  # the worker or its machine died
            return ready[0], Outcome(None, str(error).splitlines()[0])

    failed = drive(jobs, submit, wait, own.max_retries)
    record = {"shards": {str(job.shard): job.attempts for job in jobs}}
    (out / "logs").mkdir(exist_ok=True)
    (out / "logs" / "ray.json").write_text(json.dumps(record, indent=1) + "\n")
    try:
        merged = merge(out)
    except CompatError as error:
        if error.id != "SC854" or not failed:  # where no shard came far enough, its own error is the one to tell
            raise
        merged = shards.Merged()
    print(f"merged:    {merged.samples} of {merged.expected} samples, {merged.tokens:,} tokens")
    print(f"restarted: {sum(job.retries for job in jobs)} times")
    print(f"output:    {out}")
    if failed:
        ends = [f"{job.shard}: {job.attempts[-1]['last']}" for job in failed]
        raise CompatError(
            "SC863",
            found=f"{len(failed)} of {count} shards failed: " + "; ".join(ends[:5]),
            expected="all shards done",
            why=f"{merged.expected - merged.samples} samples are missing" if merged.expected else "nothing was extracted",
            mend=f"see {out / 'logs'}, then repeat the same command: it computes only what is missing",
        )
    if (error := merged.error(out)) is not None:
        raise error
    return 0


def merge(out: Path, patience: float = 120.0) -> shards.Merged:
    """Merge; a shard's process that is just ending is waited for."""
    end = time.monotonic() + patience
    while True:
        try:
            return shards.merge(out)
        except CompatError as error:
            if error.id != "SC607" or time.monotonic() > end:
                raise
            time.sleep(2)


def main(argv: list[str] | None = None) -> int:
    return extraction.main(argv, extract)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
