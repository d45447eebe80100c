"""The process in which a rehearsal runs: ``python -m speculators_compat.doctor.rehearsal_child JOB.json``.

After each stage it writes what it knows to the job's answer, so that the parent can tell how far it came.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PROMPTS = 40  # more than vLLM keeps in flight for the generator, and than sorts by text as by number


class Wrong(Exception):
    """The results are not what they should be; the message says what."""


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    answer: dict[str, Any] = {"stage": "import", "seconds": {}}
    run = Rehearsal(job)
    for stage in ("import", "start", "generate", "compare", "write", "shutdown"):
        answer["stage"] = stage
        _write(job["answer"], answer)
        began = time.monotonic()
        try:
            answer.update(getattr(run, f"do_{stage.replace('import', 'imports')}")() or {})
        except BaseException as error:
            traceback.print_exc()
            answer["error"] = {
                "type": type(error).__name__,
                "text": str(error),
                "id": getattr(error, "id", None),
                "trace": traceback.format_exc(),
            }
        answer["seconds"][stage] = round(time.monotonic() - began, 2)
        answer["adapters"] = _adapters()
        if "error" in answer:
            break
    else:
        answer["stage"] = "done"
    _write(job["answer"], answer)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # whatever threads and processes are left: the parent ends them


def _write(path: str, answer: dict[str, Any]) -> None:
    Path(path + ".part").write_text(json.dumps(answer))
    os.replace(path + ".part", path)


def _adapters() -> dict[str, str]:
    import speculators_compat

    return {a.id: str(a.state) for a in speculators_compat.status().adapters}


class Rehearsal:
    """One rehearsal, stage by stage."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.scratch = Path(job["scratch"])
        draw = random.Random(7)
        ids = job["token_ids"]
        lengths = [draw.randrange(1, 60) for _ in range(PROMPTS - 1)] + [job["longest"]]
        self.prompts = [[draw.choice(ids) for _ in range(length)] for length in lengths]
        draw.shuffle(self.prompts)
        self.generator: Any = None
        self.results: list[dict[str, Any]] = []

    def do_imports(self) -> None:
        import speculators_compat

        speculators_compat.configure(vllm_args=self.job["vllm_args"], layer_convention="after-layer")
        import speculators.data_generation.vllm_hidden_states_generator  # noqa: F401

    def do_start(self) -> dict[str, Any]:
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        self.generator = VllmHiddenStatesGenerator(
            model_path=self.job["model"],
            layer_ids=self.job["layer_ids"],
            max_model_len=self.job["max_model_len"],
            gpu_memory_utilization=self.job["gpu_memory_utilization"],
            tensor_parallel_size=self.job["tp"],
        )
        session = getattr(self.generator, "session", None)
        return {"report": dict(session.report) if session is not None else {}}

    def do_generate(self) -> None:
        self.results = self.generator.generate([list(prompt) for prompt in self.prompts])
        if len(self.results) != PROMPTS:
            raise Wrong(f"{len(self.results)} results for {PROMPTS} prompts")
        ids = self.job["layer_ids"]
        moved = [
            i
            for i, (result, prompt) in enumerate(zip(self.results, self.prompts, strict=True))
            if [int(t) for t in result["input_ids"]] != prompt
        ]
        if moved:
            raise Wrong(f"{len(moved)} of {PROMPTS} results are not in the place of their prompts")
        for i, (result, prompt) in enumerate(zip(self.results, self.prompts, strict=True)):
            shapes = [tuple(state.shape) for state in result["hidden_states"]]
            if shapes != [(len(prompt), self.job["hidden"])] * len(ids):
                raise Wrong(f"prompt {i} of {len(prompt)} tokens came back as {shapes}")

    def do_compare(self) -> dict[str, Any]:
        """One prompt at a time through the same engine, seen by hooks of another make."""
        import torch

        from . import rehearsal_worker

        rpc = self._rpc()
        ids, hidden = self.job["layer_ids"], self.job["hidden"]
        places = rpc(rehearsal_worker.install, args=(self.job["path"], self.job["layers"], hidden, ids))
        file = str(self.scratch / "witness.pt")
        worst = {"in the batch": 0.0, "alone": 0.0}
        where: dict[str, str] = {}
        for i, (result, prompt) in enumerate(zip(self.results, self.prompts, strict=True)):
            (alone,) = self.generator.generate([list(prompt)])
            rpc(rehearsal_worker.take, args=(file,))
            seen = torch.load(file, weights_only=True)
            for position, k in enumerate(ids):
                views = [seen[key][: len(prompt)] for key in (f"{k} enters", f"{k} leaves") if key in seen]
                if not views:
                    raise Wrong(f"no independent state after layer {k}")
                for what, states in (("in the batch", result), ("alone", alone)):
                    got = states["hidden_states"][position].float()
                    error = min(_error(got, view) for view in views)
                    if not error <= worst[what]:
                        worst[what] = error
                        where[what] = f"prompt {i} ({len(prompt)} tokens) {what}, after layer {k}"
        exact = str(self.results[0]["hidden_states"][0].dtype) == "torch.float32"
        # Alone, both looked at the same pass. In the batch rounding differs, and with it the experts chosen; states of
        # another row or layer differ by about 1.
        allowed = {"alone": 1e-4 if exact else 2e-2, "in the batch": 1e-4 if exact else 0.3}
        for what, error in worst.items():
            if not error <= allowed[what]:
                raise Wrong(
                    f"relative error {error:.1e} against the independent capture, "
                    f"allowed {allowed[what]:.0e}: {where[what]}"
                )
        return {"error_found": max(worst.values()), "place": places[0]}

    def _rpc(self) -> Any:
        generator = self.generator
        if hasattr(generator, "llm"):
            return generator.llm.llm_engine.collective_rpc
        return generator.executor.collective_rpc

    def do_write(self) -> None:
        import torch

        from ..dataio import Sample, SampleWriter

        folder = self.scratch / "samples"
        samples = [
            Sample(index=i, input_ids=prompt, loss_mask=[i % 2] * len(prompt), original_length=len(prompt))
            for i, prompt in enumerate(self.prompts)
        ]
        with SampleWriter(folder, {"rehearsal": True, "format": "pt"}) as writer:
            for sample, result in zip(samples, self.results, strict=True):
                writer.write(sample, result)
        for sample, result in zip(samples, self.results, strict=True):
            back = torch.load(folder / f"data_{sample.index}.pt", weights_only=True)
            same = (
                back["input_ids"].tolist() == sample.input_ids
                and back["loss_mask"].tolist() == sample.loss_mask
                and len(back["hidden_states"]) == len(result["hidden_states"])
                and all(
                    torch.equal(a, b)
                    for a, b in zip(back["hidden_states"], result["hidden_states"], strict=True)
                )
            )
            if not same:
                raise Wrong(f"sample {sample.index} reads back other than it was written")
        self.results = []

    def do_shutdown(self) -> None:
        shutdown = getattr(self.generator, "shutdown", None)
        if shutdown is None:
            raise Wrong("the generator has no shutdown(): its workers live on")
        shutdown()
        end = time.monotonic() + 30
        while (left := _children()) and time.monotonic() < end:
            time.sleep(0.2)
        if left:
            raise Wrong(f"processes left behind: {', '.join(left)}")


def _error(got: Any, wanted: Any) -> float:
    if got.shape != wanted.shape:
        return float("inf")
    scale = float(wanted.norm())
    return float((got - wanted).norm()) / scale if scale else float("inf")


def _children() -> list[str]:
    """Living descendants of this process; not the resource tracker, which ends with it."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            command = (
                Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except OSError:
            continue
        if fields[0] != "Z":
            parents[int(entry)] = int(fields[1])
            names[int(entry)] = command
    me, found = os.getpid(), []
    for pid in parents:
        ancestor = pid
        while ancestor in parents and ancestor != me:
            ancestor = parents[ancestor]
        if ancestor == me and pid != me and "resource_tracker" not in names[pid]:
            found.append(f"{pid} ({names[pid][:40].strip()})")
    return found


if __name__ == "__main__":
    main(sys.argv[1])
